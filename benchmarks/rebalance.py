"""What a rebalance costs the steps around it: a job of four nodes whose loads shift again and again.

    make bench-rebalance
    python benchmarks/rebalance.py --rebalances 10

Every layer's tokens follow a table in which another pair of experts is hot every so many steps; the coordinator looks
as often, and moves replicas (weights and optimizer state) to where the tokens are. An emulated accelerator makes that
pay: on two cores no imbalance shows otherwise.
Pause = the longest of the step on whose boundary a rebalance took effect and the two after it, less the median of the
steps before, since the rebalance before it. All figures come from the job's own event file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from ending import end_in_order
from recovery import ROOT, Bench, spread
from standstill import Watch

from holdfast.protocol.events import Rebalanced, StepCommitted
from tests.harness.local_job import LocalJob

MOE = ROOT / "examples" / "moe_gpt.py"
LAYERS, EXPERTS = 4, 8
#: with Adam's two moments, an expert of a layer has 1.6 MB
MODEL = ("--layers", str(LAYERS), "--experts", str(EXPERTS), "--dim", "128", "--hidden", "512", "--context", "16")
ARGS = ("--steps", "1000000", "--aux-loss", "0", "--global-batch", "16", "--micro-batch", "4", *MODEL)
OPTIONS = ("--nodes", "4", "--expert-slots", "6", "--emulate-compute", "0.0001/token")
#: steps from one look at the loads to the next
EVERY = 20
#: how many times the tokens of others a hot expert has
HOT = 6.0
#: steps that count as the usual ones, at the most
USUAL = 12
#: and at the least
LEAST_USUAL = 4


def main() -> int:
    """Run the benchmark and print its table; 1 if anything was lost."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rebalances", type=int, default=30)
    wanted = parser.parse_args().rebalances
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        trace = Path(folder) / "trace.npz"
        write_trace(trace, shifts=4 * wanted)
        run = LocalJob(MOE, (*ARGS, "--routing-trace", str(trace)), options=(*OPTIONS, "--rebalance-every", str(EVERY)))
        with Watch() as watch, run as job:
            bench = RebalanceBench(job, watch)
            for _ in range(wanted):
                bench.rebalance()
            return bench.report()


def write_trace(file: Path, *, shifts: int) -> None:
    """Write loads that change half-way between two looks, so that they stay as they are around each rebalance."""
    tokens = np.ones((shifts, LAYERS, EXPERTS))
    for shift in range(shifts):
        for layer in range(LAYERS):
            tokens[shift, layer, [(3 * shift + layer) % EXPERTS, (3 * shift + layer + 1) % EXPERTS]] = HOT
    # (the nearest iteration counts: that of a whole multiple from half a period before it to half a period after it)
    np.savez(file, tokens=tokens, iterations=np.arange(shifts) * EVERY)


class RebalanceBench(Bench):
    """One job whose experts move again and again."""

    def __init__(self, job: LocalJob, watch: Watch) -> None:
        super().__init__(job, watch, rng=np.random.default_rng(0))  # pyright: ignore[reportArgumentType] - never drawn
        self.pauses: list[float] = []
        self.moved: list[float] = []
        self._seen = 0

    def rebalance(self) -> None:
        """Wait for the next one, and note its pause."""
        done = self.job.wait(Rebalanced, since=self._seen)
        self.settle(since=self.job.events.index(done), steps=3)
        before, self._seen = self._seen, self.job.events.index(done) + 1
        steps = {event.step: event.step_s for event in self.job.all(StepCommitted)}
        first = max([event.step for event in self.job.events[:before] if isinstance(event, StepCommitted)], default=3)
        usual = [steps[step] for step in range(max(first + 3, done.step - 1 - USUAL), done.step - 1)]
        around = {step: steps[step] for step in range(done.step - 1, done.step + 2)}
        if len(usual) < LEAST_USUAL:  # (the first look is as soon as there are loads)
            self.rebalance()
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
        print(f"  pause of a rebalance, s  {spread(self.pauses)}")
        print(f"  moved, MB                {spread(self.moved)}")
        print(self.watch.report())
        wrong = self.losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
