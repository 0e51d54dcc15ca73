"""Measure the delay that a rebalance adds to the steps around it, in a job of four nodes with shifting loads.

    make bench-rebalance
    python benchmarks/rebalance.py --rebalances 10

Every layer's tokens follow a table in which a different pair of experts becomes hot at regular steps. The coordinator
checks the loads equally often, and moves replicas (weights and optimizer state) to match them. An emulated accelerator
makes the rebalance pay off: on two cores, imbalance has no visible effect otherwise.

Pause = the longest of the step before the rebalance and the two after it, less the median of the steps between this
rebalance and the previous one. All figures come from the job's event file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from ending import end_in_order
from recovery import ROOT, RecoveryBench, format_spread
from standstill import SuspensionWatch

from holdfast.protocol.events import Rebalanced, StepCommitted
from tests.harness.local_job import LocalJob

MOE = ROOT / "examples" / "moe_gpt.py"
LAYERS, EXPERTS = 4, 8
#: With Adam's two moments, an expert of a layer has 1.6 MB.
MODEL = ("--layers", str(LAYERS), "--experts", str(EXPERTS), "--dim", "128", "--hidden", "512", "--context", "16")
ARGS = ("--steps", "1000000", "--aux-loss", "0", "--global-batch", "16", "--micro-batch", "4", *MODEL)
OPTIONS = ("--nodes", "4", "--expert-slots", "6", "--emulate-compute", "0.0001/token")
#: Steps between two checks of the loads.
EVERY = 20
#: Tokens of a hot expert relative to the others.
HOT = 6.0
#: Largest number of undisturbed steps to compare with.
USUAL = 12
#: Smallest number of undisturbed steps to compare with.
LEAST_USUAL = 4


def main() -> int:
    """Run the benchmark and print its table; return 1 if anything was lost."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rebalances", type=int, default=30)
    wanted = parser.parse_args().rebalances
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        trace = Path(folder) / "trace.npz"
        write_trace(trace, shifts=4 * wanted)
        run = LocalJob(MOE, (*ARGS, "--routing-trace", str(trace)), options=(*OPTIONS, "--rebalance-every", str(EVERY)))
        with SuspensionWatch() as watch, run as job:
            bench = RebalanceBench(job, watch)
            for _ in range(wanted):
                bench.measure_rebalance()
            return bench.report()


def write_trace(file: Path, *, shifts: int) -> None:
    """Write loads that change half-way between two checks, so that they are constant around each rebalance."""
    tokens = np.ones((shifts, LAYERS, EXPERTS))
    for shift in range(shifts):
        for layer in range(LAYERS):
            tokens[shift, layer, [(3 * shift + layer) % EXPERTS, (3 * shift + layer + 1) % EXPERTS]] = HOT
    # The nearest iteration counts, so each row applies from half a period before its iteration to half a period after.
    np.savez(file, tokens=tokens, iterations=np.arange(shifts) * EVERY)


class RebalanceBench(RecoveryBench):
    """One job with repeated rebalances."""

    def __init__(self, job: LocalJob, watch: SuspensionWatch) -> None:
        super().__init__(job, watch, rng=np.random.default_rng(0))  # pyright: ignore[reportArgumentType] - never drawn
        self.pauses: list[float] = []
        self.moved: list[float] = []
        self._seen = 0

    def measure_rebalance(self) -> None:
        """Wait for the next rebalance, and record its pause."""
        done = self.job.wait(Rebalanced, since=self._seen)
        self.wait_steps(since=self.job.events.index(done), steps=3)
        before, self._seen = self._seen, self.job.events.index(done) + 1
        steps = {event.step: event.step_s for event in self.job.all(StepCommitted)}
        first = max([event.step for event in self.job.events[:before] if isinstance(event, StepCommitted)], default=3)
        usual = [steps[step] for step in range(max(first + 3, done.step - 1 - USUAL), done.step - 1)]
        around = {step: steps[step] for step in range(done.step - 1, done.step + 2)}
        if len(usual) < LEAST_USUAL:  # the first check is made as soon as there are loads
            self.measure_rebalance()
            return
        pause = max(around.values()) - statistics.median(usual)
        self.pauses.append(pause)
        self.moved.append(done.moved_bytes / 1e6)
        shown = " ".join(f"{seconds:.3f}" for seconds in around.values())
        print(
            f"rebalance at step {done.step - 1:4d}: {done.experts_moved:3d} experts, {self.moved[-1]:5.1f} MB, steps "
            f"{shown} s, usual {statistics.median(usual):.3f} s, pause {pause:6.3f} s",
            flush=True,
        )

    def report(self) -> int:
        """Print the table; return 1 if a step, a sample or a worker was lost."""
        print(f"\nmedian step {self.median_step() * 1e3:.0f} ms")
        print(f"  pause of a rebalance, s  {format_spread(self.pauses)}")
        print(f"  moved, MB                {format_spread(self.moved)}")
        print(self.watch.report())
        wrong = self.find_losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
