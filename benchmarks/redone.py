"""Count micro-batches that are computed again after a kill.

    make bench-redone
    python benchmarks/redone.py --kills 40 --seed 1

At most the lost rank's micro-batches may be computed again, and none if a survivor is READY. Four ranks have eight
micro-batches each. One node at a time is killed at a random moment, and another one replaces it. Each rank records the
micro-batches that it starts. The exit code is 1 if a survivor's micro-batch was computed again, or any of a step that a
survivor finished, or if a step was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from recovery import RecoveryBench, format_spread
from standstill import SuspensionWatch

import holdfast
from holdfast.protocol.events import GenerationStarted, StepCommitted
from tests.harness.local_job import LocalJob

NODES, EACH = 4, 8
#: A micro-batch of a step: the step, and its first sample.
MicroBatch = tuple[int, int]


def main() -> int:
    """Run the benchmark and print its tables, or train as its script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's two layers")
    parser.add_argument("--train", type=Path, help="train as a rank, and record started micro-batches in this folder")
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.width)
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-redone-") as folder:
        script = ("--train", folder, "--width", str(options.width))
        with (
            SuspensionWatch() as watch,
            LocalJob(__file__, script, options=("--nodes", str(NODES), "--allow-faults")) as job,
        ):
            bench = RecoveryBench(job, watch, random.Random(options.seed))
            bench.wait_steps(since=0, steps=10)
            for number in range(options.kills):
                bench.kill_at_random(number)
            return report(bench, read_started(Path(folder)))


def train(folder: Path, width: int) -> None:
    """Train a model of two layers without end, as one rank of the job."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    job = holdfast.init()
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    x = torch.randn(NODES * EACH * 64, 1)
    data = torch.utils.data.TensorDataset(x, torch.arange(len(x)))
    batch = NODES * EACH
    job.protect(
        model, torch.optim.AdamW(model.parameters()), data, global_batch=batch, micro_batch=1, max_grad_norm=1.0
    )
    worker = json.loads(os.environ["HOLDFAST_WORKER"])["worker"].replace("/", "_")
    begun = os.open(folder / worker, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for step in job.steps(1_000_000):
        for values, number in step.micro_batches():
            os.write(begun, f"{step.number} {int(number)}\n".encode())
            time.sleep(0.01)
            step.backward(model(values.expand(1, width)).square().mean())
        step.apply()


def read_started(folder: Path) -> dict[str, list[MicroBatch]]:
    """Return the micro-batches that each worker started, in order."""
    files = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    return {worker: [(int(step), int(one)) for step, one in map(str.split, lines)] for worker, lines in files.items()}


def report(bench: RecoveryBench, begun: dict[str, list[MicroBatch]]) -> int:
    """Print the repeated micro-batches; return 1 if there were more than allowed."""
    workers: dict[MicroBatch, list[str]] = {}
    for worker, computed in begun.items():
        for key in computed:
            workers.setdefault(key, []).append(worker)
    again = {key: names for key, names in workers.items() if len(names) > 1}
    # A killed worker started nothing after that step. All but one of the workers that started it were therefore killed.
    survivors = sorted(
        key for key, names in again.items() if sum(begun[worker][-1][0] > key[0] for worker in names) > 1
    )
    wrong = [f"a survivor's micro-batch {key} was computed again" for key in survivors]
    rows: dict[str, list[int]] = {}
    for decision, step in interrupted_steps(bench):
        count = sum(key[0] == step for key in again)
        rows.setdefault(decision, []).append(count)
        if count > (EACH if decision == "redo" else 0):
            wrong.append(f"{decision} of step {step}: {count} micro-batches were computed again")
    print(f"\n{NODES} ranks, {EACH} micro-batches each; computed again after a kill:")
    for decision, counts in rows.items():
        typical = f"median {statistics.median(counts):g} ({min(counts)}..{max(counts)})"
        print(f"  {decision:8s} {len(counts):3d} kills: {typical} of {NODES * EACH}")
    print(f"  of survivors' {len(survivors)}")
    down = [value for tally in bench.tallies.values() for value in tally.down]
    print(f"down less the median step ({bench.median_step() * 1e3:.0f} ms), seconds: {format_spread(down)}")
    print(bench.watch.report())
    wrong += bench.find_losses()
    print("wrong: " + ("nothing" if not wrong else "; ".join(wrong)))
    return 1 if wrong else 0


def interrupted_steps(bench: RecoveryBench) -> Sequence[tuple[str, int]]:
    """Return the decision after each kill, and the interrupted step."""
    found: list[tuple[str, int]] = []
    steps = bench.job.all(StepCommitted)
    for before, started in pairwise(bench.job.all(GenerationStarted)):
        if started.reason == "failure" and started.world_size < before.world_size:
            # A step completed before the failure may be announced after it.
            done = next(event for event in steps if event.time > started.time)
            found.append((started.decision, done.step))
    return found


if __name__ == "__main__":
    sys.exit(main())
