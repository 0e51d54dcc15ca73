"""Measure how long torchft stops training when one of four replica groups is killed, and when it returns.

A lighthouse and four processes, each a replica group of one worker, train the model of `benchmarks/recovery.py`. One is
killed with SIGKILL, and started again when the others train. The others are down for about torchft's timeout. It is an
argument here; torchft's default is 60 s. Install `torchft-nightly` to measure it: holdfast does not depend on it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
GROUPS, VICTIM, WATCHED = 4, 2, 0
CONTEXT = 16
PATIENCE_S = 240.0


class Row(TypedDict):
    """A step that a replica group attempted.

    `committed` states whether it counts; `groups` is the number of participating groups.
    """

    step: int
    time: float
    committed: bool
    groups: int


@dataclass(frozen=True)
class KillCost:
    """The cost of a kill and a return for the watched group."""

    #: From the SIGKILL to the next committed step, less the median step.
    down_s: float
    #: Attempted steps that did not count.
    discarded: int
    #: The longest step from the return until all groups participate again, less the median step.
    join_s: float
    step_s: float


def is_installed() -> bool:
    """Return whether torchft can be imported."""
    return importlib.util.find_spec("torchft") is not None


def _torchft(module: str) -> Any:
    """Import a module of torchft without types, as it may not be installed."""
    return importlib.import_module(module)


def kill_one(timeout_s: float) -> KillCost:
    """Kill one replica group, start it again, and return the cost."""
    lighthouse: Any = _torchft("torchft.coordination").LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=int(min(timeout_s, 5) * 1000)
    )
    with tempfile.TemporaryDirectory(prefix="torchft-") as name:
        folder = Path(name)
        address = lighthouse.address()
        groups = {number: _start(folder, number, address, timeout_s) for number in range(GROUPS)}
        try:
            before = _wait_for(folder, lambda rows: sum(row["groups"] == GROUPS for row in rows) >= 25)
            step_s = statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(before[5:]))
            os.kill(groups[VICTIM].pid, signal.SIGKILL)
            killed_at = time.time()
            groups[VICTIM].wait()
            rows = _wait_for(folder, lambda rows: rows[-1]["committed"] and rows[-1]["time"] > killed_at + 2 * step_s)
            after = [row for row in rows if row["time"] > killed_at]
            # The step interrupted by the kill may have been complete. The downtime is the longest wait after it.
            ends = [killed_at, *(row["time"] for row in after if row["committed"])]
            down_s = max(b - a for a, b in itertools.pairwise(ends)) - step_s
            discarded = sum(not row["committed"] for row in after)
            groups[VICTIM] = _start(folder, VICTIM, address, timeout_s)
            back = len(rows)
            rows = _wait_for(folder, lambda rows: sum(row["groups"] == GROUPS for row in rows[back:]) >= 5)
            joined = [row["time"] for row in rows[back - 1 :] if row["committed"]]
            join_s = max(b - a for a, b in itertools.pairwise(joined)) - step_s
            return KillCost(down_s, discarded, join_s, step_s)
        finally:
            for group in groups.values():
                group.kill()
                group.wait()
            lighthouse.shutdown()


def _start(folder: Path, number: int, lighthouse: str, timeout_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--timeout-s", str(timeout_s), "--group", str(folder), str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse}
    with (folder / f"output-{number}").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _wait_for(folder: Path, is_ready: Callable[[list[Row]], bool]) -> list[Row]:
    """Return the rows of the watched group once they satisfy the condition."""
    deadline, path = time.monotonic() + PATIENCE_S, folder / f"steps-{WATCHED}"
    while time.monotonic() < deadline:
        rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if rows and is_ready(rows):
            return rows
        time.sleep(0.01)
    raise SystemExit("torchft made no progress:\n" + (folder / f"output-{WATCHED}").read_text()[-3000:])


def train(folder: Path, number: int, timeout_s: float) -> None:
    """Train as one replica group, as torchft's example `train_ddp.py` does."""
    import plain_torch
    import torch
    from dense_gpt import GPT, Bytes, loss_of, read_text

    from holdfast.runtime.tensors import collate, seed_all

    store, port = plain_torch.serve_store()
    seed_all(0)
    model = GPT(6, 256, 4, CONTEXT)
    inner = plain_torch.adamw(model.parameters())
    limit = timedelta(seconds=timeout_s)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    torchft = _torchft("torchft")
    manager: Any = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=max(limit, timedelta(seconds=5)),
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=port,
        replica_id=f"group-{number}-",
    )
    ddp: Any = torchft.DistributedDataParallel(manager, model, gradient_as_bucket_view=True)
    optimizer: Any = torchft.Optimizer(manager, inner)
    data = Bytes(read_text(None), CONTEXT)
    with (folder / f"steps-{number}").open("a") as rows:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            for half in range(2):
                start = ((step * GROUPS + number) * 2 + half) * 4 % (len(data) - 4)
                batch = collate([data[start + place] for place in range(4)])
                ddp.require_backward_grad_sync = half == 1
                torch.autograd.backward(loss_of(ddp, batch) / 2)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            committed = manager.current_step() > step
            row = {"step": step, "time": time.time(), "committed": committed, "groups": manager.num_participants()}
            rows.write(json.dumps(row) + "\n")
            rows.flush()
    del store


def main() -> int:
    """Kill one replica group and print the cost, or train as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout-s", type=float, default=2.0, help="timeout of collectives and of the lighthouse")
    parser.add_argument("--group", nargs=2, metavar=("FOLDER", "NUMBER"), help="train as this replica group")
    options = parser.parse_args()
    if options.group:
        train(Path(options.group[0]), int(options.group[1]), options.timeout_s)
    elif not is_installed():
        print("torchft is not installed: pip install torchft-nightly", file=sys.stderr)
        return 2
    else:
        print(kill_one(options.timeout_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
