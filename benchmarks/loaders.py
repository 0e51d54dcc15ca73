"""Measure slow data with loader workers: a step relative to its compute time, and a kill with and without them.

    make bench-loaders
    python benchmarks/loaders.py --turns 3 --kills 5

Steps: scripts run alone and alternate: data in memory (compute time alone), and data that take 5 ms per sample, with
two loader workers and with none. Kills: jobs of four nodes alternate: data in memory without loader workers, and slow
data with two and with none. The accelerator is emulated: each micro-batch takes a stated time (--compute-ms) in which
the processor is free, the same for all compared runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAMPLES, WIDTH = 4096, 64
GLOBAL_BATCH, MICRO_BATCH = 32, 4
WARM_UP_STEPS = 10
AT_HAND = ("--sample-ms", "0", "--loader-workers", "0")
TAKES_TIME = ("--sample-ms", "5", "--loader-workers")
STEPS_OF = {
    "compute alone": AT_HAND,
    "5 ms a sample, 2 loader workers": (*TAKES_TIME, "2"),
    "5 ms a sample, none": (*TAKES_TIME, "0"),
}
KILLS_OF = {
    "data at hand, no loader workers": AT_HAND,
    "5 ms a sample, 2 loader workers": (*TAKES_TIME, "2"),
    "5 ms a sample, none": (*TAKES_TIME, "0"),
}


class SlowData:
    """Samples that take time to fetch, and contain the pid of the fetching process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch

        time.sleep(self.seconds)
        return torch.full((WIDTH,), index / SAMPLES), os.getpid()


def main() -> int:
    """Run both parts and print their tables."""
    options = _options()
    if options.worker:
        return train(options)
    compute = ("--compute-ms", str(options.compute_ms))
    print(f"emulated accelerator: {options.compute_ms:g} ms a micro-batch of {MICRO_BATCH} samples")
    times: dict[str, list[float]] = {kind: [] for kind in STEPS_OF}
    for _ in range(options.turns):
        for kind, arguments in STEPS_OF.items():
            times[kind].append(_median_step_alone((*arguments, *compute, "--steps", str(options.steps))))
    alone = times["compute alone"]
    for kind, seconds in times.items():
        ratios = [one / other for one, other in zip(seconds, alone, strict=True)]
        print(f"{kind:32s} a step {_spread(seconds)} s, of the compute alone {_spread(ratios)}", flush=True)
    if options.kills:
        _measure_kills(options, compute)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each run")
    parser.add_argument("--kills", type=int, default=10, help="kills for each kind of job, in two jobs; 0 for none")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="emulated time of a micro-batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sample-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--loader-workers", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f}, {len(values)})"


def _median_step_alone(arguments: tuple[str, ...]) -> float:
    """Return the median step of a script run alone."""
    command = [sys.executable, __file__, "--worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def _measure_kills(options: argparse.Namespace, compute: tuple[str, ...]) -> None:
    from recovery import RecoveryBench
    from standstill import SuspensionWatch

    from tests.harness.local_job import LocalJob

    down: dict[str, list[float]] = {kind: [] for kind in KILLS_OF}
    rng = random.Random(options.seed)
    for turn in range(2):
        for kind, arguments in KILLS_OF.items():
            run = LocalJob(
                __file__,
                ("--worker", *arguments, *compute, "--steps", "1000000"),
                options=("--nodes", "4", "--allow-faults"),
            )
            with SuspensionWatch() as watch, run as job:
                bench = RecoveryBench(job, watch, rng)
                bench.wait_steps(since=0, steps=30)
                for number in range((options.kills + turn) // 2):
                    bench.kill_at_random(number)
                down[kind] += bench.tallies["random moment"].down
    for kind, seconds in down.items():
        print(f"{kind:32s} a kill costs {_spread(seconds)} s beyond a step")


def train(options: argparse.Namespace) -> int:
    """Run as the training script: print the time of each measured step."""
    import torch

    import holdfast

    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = holdfast.init()
    job.protect(
        model,
        optimizer,
        SlowData(options.sample_ms / 1000),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        num_workers=options.loader_workers,
    )
    times: list[float] = []
    warm = 0
    for step in job.steps(1_000_000):
        began = time.perf_counter()
        pids: set[int] = set()
        for x, by in step.micro_batches():
            pids |= set(map(int, by))
            time.sleep(options.compute_ms / 1000)
            step.backward(model(x).square().mean())
        step.apply()
        # The first steps are trained while the loader workers start.
        warm += options.loader_workers == 0 or os.getpid() not in pids
        if warm > WARM_UP_STEPS:
            times.append(time.perf_counter() - began)
        if len(times) == options.steps:
            break
    print(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
