"""Kill one replica that spans two workers, and compare how long training stops in holdfast and in torchft's HSDP.

    pip install --no-deps torchft-nightly, and likewise the opentelemetry packages that it imports
    python benchmarks/layouts_peer.py --rounds 5

There are three replicas of the GPT of examples/fsdp_gpt.py, each sharded with FSDP2 over two processes. Both processes
of one replica get SIGKILL at a random moment. Down = from the kill until *all* survivors have committed a step again,
less the median step. The two systems alternate.

torchft is not a dependency: if it is not installed, only holdfast is measured, and the output states that. Its workers
do what torchtitan's FaultTolerantTrainer does, on gloo, with the timeouts given here instead of the defaults of a
minute. torchft drops the samples of the lost replica and of a discarded step; holdfast trains them all.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import asked
from asked import Figure
from ending import end_in_order
from layouts import LayoutBench
from recovery import format_spread
from standstill import SuspensionWatch

from holdfast.protocol.layouts.layout import Layout
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "fsdp_gpt.py"
REPLICAS, PLACES = 3, 2
LAYERS, DIM, HEADS, CONTEXT = 4, 128, 4, 16
#: Samples per step: micro-batches of 4 in holdfast, one batch per replica in torchft.
SAMPLES = 36
SETTLE_STEPS = 15
#: Settings of torchft's lighthouse: when a silent replica counts as lost, how long it waits for a live one, and how
#: often it checks. Replicas that once diverge by more than the join timeout never rejoin.
LIGHTHOUSE = {"heartbeat_timeout_ms": 200, "join_timeout_ms": 2000, "quorum_tick_ms": 10}
HEARTBEAT = timedelta(milliseconds=25)  #: Interval of a replica's heartbeats.
#: Timeout of torchft's remote calls. It must exceed that of collectives: a caller may wait for a peer that times out.
CALL_S = 10.0


class Row(TypedDict):
    """One step of torchft, written by a replica's first process."""

    time: float
    committed: bool
    replicas: int


def main() -> int:
    """Measure both systems alternately; return 1 if holdfast lost a survivor."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=0.5, help="timeout of torchft's collectives, in seconds")
    asked.add_figures_option(parser)
    options = parser.parse_args()
    rng, there = random.Random(options.seed), importlib.util.find_spec("torchft") is not None
    here, peers, own_steps, steps, lost = list[float](), list[float](), list[float](), list[float](), 0
    for number in range(options.rounds):
        code, down, step = holdfast_kill(number)
        lost, here, own_steps = lost | code, [*here, down], [*own_steps, step]
        if there:
            took = torchft_kill(rng, options.timeout)
            if took is None:
                print("torchft: no survivor committed a step within a minute", flush=True)
                continue
            down, step, discarded = took
            peers, steps = [*peers, down], [*steps, step]
            print(f"torchft down {down:.3f} s less a step of {step:.3f} s, {discarded} steps discarded", flush=True)
    print(f"holdfast: down less the median step {format_spread(here)}; the step: {format_spread(own_steps)}")
    print(
        f"torchft, timeouts of {options.timeout:g} s: "
        + (format_spread(peers) if there else "not installed, not measured")
    )
    figures = [Figure(name="FSDP2 replica killed: down less a step", values=tuple(here), unit="s")]
    if peers:
        print(
            f"torchft's step: {format_spread(steps)}; {options.rounds - len(peers)} runs in which all survivors stopped"
        )
        figures.append(Figure(name="the same, torchft's HSDP", values=tuple(peers), unit="s"))
    asked.write_figures(options.figures, figures)
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    return lost


def holdfast_kill(seed: int) -> tuple[int, float, float]:
    """Kill a node; return whether anything was lost, the downtime less a step, and the median step."""
    args = ("--steps", "1000000", "--layers", str(LAYERS), "--dim", str(DIM), "--heads", str(HEADS))
    args += ("--context", str(CONTEXT), "--global-batch", str(SAMPLES), "--shard", str(PLACES))
    options = ("--nodes", str(REPLICAS), "--workers-per-node", str(PLACES))
    with SuspensionWatch() as watch, LocalJob(SCRIPT, args, options=options) as job:
        bench = LayoutBench(job, watch, random.Random(seed), REPLICAS, Layout(shard=PLACES))
        bench.wait_steps(since=0, steps=SETTLE_STEPS)
        step = bench.median_step()
        bench.kill_at_random(seed)
        (tally,) = bench.tallies.values()
        return int(bool(bench.find_losses())), tally.down[0], step


# ---- torchft ----


def torchft_kill(rng: random.Random, timeout_s: float) -> tuple[float, float, int] | None:
    """Kill one torchft replica; return the downtime less a step, the median step, and the number of discarded steps."""
    import plain_torch

    os.environ.setdefault("RUST_LOG", "warn")  # by default it logs every quorum, which would distort the measurement
    torchft: Any = importlib.import_module("torchft.coordination")
    lighthouse = torchft.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **LIGHTHOUSE)
    stores = [plain_torch.serve_store() for _ in range(REPLICAS)]
    with tempfile.TemporaryDirectory(prefix="torchft-") as name:
        folder, workers = Path(name), dict[tuple[int, int], subprocess.Popen[bytes]]()
        for replica, rank in itertools.product(range(REPLICAS), range(PLACES)):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(PLACES), "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(stores[replica][1]), "REPLICA": str(replica)}
            command = [sys.executable, __file__, "--worker", name, str(timeout_s)]
            with (folder / f"output-{replica}-{rank}").open("wb") as output:
                workers[replica, rank] = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            return _kill_replica(folder, workers, rng)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
            lighthouse.shutdown()


def _kill_replica(
    folder: Path, workers: dict[tuple[int, int], subprocess.Popen[bytes]], rng: random.Random
) -> tuple[float, float, int] | None:
    """Wait until the replicas train together, kill one, and wait for the others."""
    started = _wait_until(
        lambda: (
            all(_are_together(_rows(folder, replica)) for replica in range(REPLICAS))
            or any(worker.poll() is not None for worker in workers.values())
        ),
        400,
    )
    if not started or any(worker.poll() is not None for worker in workers.values()):
        said = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("output-*")))
        raise SystemExit(f"torchft made no progress:\n{said}")
    taken = [b["time"] - a["time"] for a, b in itertools.pairwise(_rows(folder, 0)[-SETTLE_STEPS:])]
    step, victim = statistics.median(taken), rng.randrange(REPLICAS)
    time.sleep(rng.random() * step)
    at = time.time()
    for rank in range(PLACES):
        workers[victim, rank].send_signal(signal.SIGKILL)
    survivors = [replica for replica in range(REPLICAS) if replica != victim]

    def after(replica: int) -> list[Row]:
        return [row for row in _rows(folder, replica) if row["time"] > at]

    def again(replica: int) -> Row | None:
        return next((row for row in after(replica) if row["committed"] and row["replicas"] < REPLICAS), None)

    if not _wait_until(lambda: all(again(replica) for replica in survivors), 60):
        return None
    ends = [row["time"] for row in map(again, survivors) if row is not None]
    discarded = max(sum(not row["committed"] for row in after(replica)) for replica in survivors)
    return max(ends) - at - step, step, discarded


def _are_together(rows: list[Row]) -> bool:
    last = rows[-SETTLE_STEPS:]
    return len(last) == SETTLE_STEPS and all(row["committed"] and row["replicas"] == REPLICAS for row in last)


def _rows(folder: Path, replica: int) -> list[Row]:
    path = folder / f"steps-{replica}"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def _wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def worker(folder: Path, timeout_s: float) -> None:
    """Train as torchtitan's FaultTolerantTrainer does: FSDP2 with gradients averaged by a managed group."""
    sys.path.insert(0, str(SCRIPT.parent))
    import plain_torch
    import torch
    import torch.distributed
    from dense_gpt import GPT, Bytes, loss_of, read_text
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from holdfast.runtime.tensors import collate, named_modules, seed_all

    dist: Any = torch.distributed
    torchft: Any = importlib.import_module("torchft")
    managed: Any = importlib.import_module("torchft.process_group").ManagedProcessGroup
    replica, rank, limit = int(os.environ["REPLICA"]), int(os.environ["RANK"]), timedelta(seconds=timeout_s)
    store = plain_torch.tcp_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "replica")
    plain_torch.join_group(store, rank=rank, world=PLACES)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=None,  # registered below, once the model exists
        state_dict=None,
        min_replica_size=1,
        timeout=timedelta(seconds=CALL_S),
        quorum_timeout=timedelta(seconds=30),
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        heartbeat_interval=HEARTBEAT,
        init_sync=False,
    )
    group = managed(manager)
    group.register("dp_replicate")
    seed_all(0)
    model, mesh = GPT(LAYERS, DIM, HEADS, CONTEXT), init_device_mesh("cpu", (PLACES,), mesh_dim_names=("shard",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shard"])
    for _, module in named_modules(model):
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=group, op=dist.ReduceOp.AVG))
    optimizer = plain_torch.adamw(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    # Taken once, as in torchtitan: torchft requests it during a forward pass, which FSDP2's state_dict would disturb.
    shards = model.state_dict()
    manager.register_state_dict_fn("model", model.load_state_dict, lambda: shards)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    data, own = Bytes(read_text(None), CONTEXT), SAMPLES // REPLICAS // PLACES
    with (folder / f"steps-{replica}").open("a") as rows:
        _wait_for_all(folder, replica, rank)
        while True:
            manager.start_quorum()
            optimizer.zero_grad()
            start = ((manager.current_step() * REPLICAS + replica) * PLACES + rank) * own % (len(data) - own)
            torch.autograd.backward(loss_of(model, collate([data[start + place] for place in range(own)])))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if committed := manager.should_commit():
                optimizer.step()
            if rank == 0:
                row = Row(time=time.time(), committed=committed, replicas=manager.num_participants())
                rows.write(json.dumps(row) + "\n")
                rows.flush()


def _wait_for_all(folder: Path, replica: int, rank: int) -> None:
    """Wait until all workers are ready: torchft would first heal a late replica, which must not be measured."""
    (folder / f"ready-{replica}-{rank}").touch()
    if not _wait_until(lambda: len(list(folder.glob("ready-*"))) == REPLICAS * PLACES, 300):
        raise SystemExit("the other replicas did not come")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        sys.exit(main())
