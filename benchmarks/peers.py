"""Measure how long torchrun and torchft stop training when a worker is killed, with the model of recovery.py.

torchrun: one agent with four workers, DDP over gloo, a checkpoint every 10 steps, restarts allowed. Down = from the
SIGKILL of one worker to the first step after it that all four have completed, less the median step. torchft: see
`torchft_peer.py`; it is measured if it is installed.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import TypedDict

import torchft_peer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
CHECKPOINT_EVERY = 10
WORLD = 4
#: torchft's default, and five times a step of this model on two cores. The survivors are down for about that long.
TORCHFT_TIMEOUTS_S = (60.0, 2.0)
CONTEXT = 16


class Row(TypedDict):
    """A step reported by rank 0; `restart` counts torchrun's restarts."""

    step: int
    time: float
    restart: int


def main() -> int:
    """Run and print the downtime and the repeated steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    down: list[float] = []
    lost: list[int] = []
    for _ in range(options.kills):
        seconds, steps = torchrun_kill()
        down.append(seconds)
        lost.append(steps)
        print(f"torchrun: down {seconds:.2f} s beyond a step, {steps} steps done again", flush=True)
    print(
        f"torchrun, 1 agent x {WORLD} workers: down less the median step {statistics.median(down):.2f} s "
        f"({min(down):.2f}..{max(down):.2f}), {options.kills} runs; steps lost {statistics.median(lost):.0f}"
    )
    measure_torchft(options.kills)
    return 0


def measure_torchft(kills: int) -> None:
    """Print the cost of a kill and of a return with torchft, for each timeout."""
    if not torchft_peer.is_installed():
        print("torchft: not measured, because it is not installed (pip install torchft-nightly)")
        return
    for timeout_s in TORCHFT_TIMEOUTS_S:
        costs: list[torchft_peer.KillCost] = []
        for _ in range(kills):
            costs.append(torchft_peer.kill_one(timeout_s))
            print(f"torchft, timeouts of {timeout_s:g} s: {costs[-1]}", flush=True)
        down, join = [cost.down_s for cost in costs], [cost.join_s for cost in costs]
        print(
            f"torchft, {torchft_peer.GROUPS} replica groups, timeouts of {timeout_s:g} s: down less the median step "
            f"{statistics.median(down):.2f} s ({min(down):.2f}..{max(down):.2f}), {kills} runs; steps discarded "
            f"{statistics.median(cost.discarded for cost in costs):.0f}; the step of a join takes longer by "
            f"{statistics.median(join):.2f} s ({min(join):.2f}..{max(join):.2f})"
        )


def torchrun_kill() -> tuple[float, int]:
    """Return the seconds that one kill cost, and the number of repeated steps."""
    with tempfile.TemporaryDirectory(prefix="torchrun-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += ["--max-restarts=3", __file__, "--worker", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("wb") as output:
            run = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            before = wait_for(folder, lambda rows: bool(rows) and rows[-1]["step"] >= 2 * CHECKPOINT_EVERY + 5)
            median = statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(before))
            victim = int((folder / "pid-2").read_text())
            os.kill(victim, signal.SIGKILL)
            at, known = time.time(), len(before)
            rows = wait_for(folder, lambda rows: any(row["restart"] > 0 for row in rows))
            first = next(row for row in rows if row["restart"] > 0)
            done = max(row["step"] for row in rows[: max(known, 1)])
            return first["time"] - at - median, done - first["step"] + 1
        finally:
            run.send_signal(signal.SIGINT)
            try:
                run.wait(20)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()


def wait_for(folder: Path, ready: Callable[[list[Row]], bool]) -> list[Row]:
    """Return rank 0's rows once they satisfy the condition; workers report only through this file."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        path = folder / "steps"
        rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if ready(rows):
            return rows
        time.sleep(0.01)
    raise SystemExit("torchrun made no progress:\n" + (folder / "output").read_text()[-3000:])


def worker(folder: Path) -> None:
    """Train with DDP and checkpoints as in torchrun's documentation."""
    import plain_torch
    import torch
    from dense_gpt import GPT, Bytes, loss_of, read_text
    from torch.nn.parallel import DistributedDataParallel

    from holdfast.runtime.tensors import collate, seed_all

    restart, rank, world = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    # Without a prefix, restarted workers read the addresses of dead ones from the agent's store (torch 2.13). gloo
    # tries them for 5 s, fails, and uses up another restart. A prefix per restart gives torchrun its best result.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    plain_torch.join_group(plain_torch.tcp_store(host, port, f"restart-{restart}"), rank=rank, world=world)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    seed_all(0)
    model = GPT(6, 256, 4, CONTEXT)
    optimizer = plain_torch.adamw(model.parameters())
    first, checkpoint = 1, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = Bytes(read_text(None), CONTEXT)
    with (folder / "steps").open("a") as rows:
        for step in range(first, 1_000_000):
            optimizer.zero_grad(set_to_none=True)
            for number in range(2):
                sync = number == 1
                start = ((step * world + rank) * 2 + number) * 4 % (len(data) - 4)
                batch = collate([data[start + place] for place in range(4)])
                ddp.require_backward_grad_sync = sync
                torch.autograd.backward(loss_of(ddp, batch) / 2)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            if step % CHECKPOINT_EVERY == 0 and rank == 0:
                partial = checkpoint.with_suffix(".partial")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
                partial.replace(checkpoint)
            plain_torch.barrier()
            if rank == 0:
                rows.write(json.dumps({"step": step, "time": time.time(), "restart": restart}) + "\n")
                rows.flush()


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(Path(sys.argv[sys.argv.index("--worker") + 1]))
    else:
        sys.exit(main())
