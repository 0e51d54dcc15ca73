"""Measure the cost of failures smaller than a lost node: a killed process, and a sample that always raises.

    make bench-ladder
    python benchmarks/ladder.py --times 3

Down = from the kill to the first step committed after it, less the median undisturbed step. With `shrink` the other
workers continue meanwhile, and are delayed again when the process returns. That delay is their longest step then, less
the median. With `hold` they wait for the process. All figures come from the jobs' event files.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from recovery import DENSE, DENSE_ARGS, format_spread
from standstill import SuspensionWatch

from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    NodeLeft,
    Recovered,
    RolledBack,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

NODES = 4
SETTLE_STEPS = 6
BAD_SAMPLE = Path(__file__).resolve().with_name("bad_sample.py")


@dataclass
class Costs:
    """Costs of killed processes, in seconds, and errors."""

    #: Seconds from the kill until the failure was detected.
    detected: list[float] = field(default_factory=list[float])
    #: Seconds without a committed step, less the median step.
    down: list[float] = field(default_factory=list[float])
    #: Longest step when the process returned, less the median step.
    stall: list[float] = field(default_factory=list[float])
    #: Seconds until all workers trained again.
    back: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    def print_table(self, policy: str, median: float) -> None:
        """Print a table."""
        print(f"a process is killed, --on-process-failure {policy}; median step {median * 1e3:.0f} ms; seconds:")
        print(f"  detected after                 {format_spread(self.detected)}")
        print(f"  down, less a step              {format_spread(self.down)}")
        if self.stall:
            print(f"  delay when it returns          {format_spread(self.stall)}")
            both = [sum(pair) for pair in zip(self.down, self.stall, strict=True)]
            print(f"  both                           {format_spread(both)}")
        print(f"  all train again after          {format_spread(self.back)}", flush=True)


def main() -> int:
    """Run the benchmark and print its tables; return 1 if anything was lost or misclassified."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="failures of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong: list[str] = []
    with SuspensionWatch() as watch:
        for policy in ("shrink", "hold"):
            wrong += kill_processes(policy, options.times, random.Random(options.seed))
        wrong += run_bad_samples(options.times)
        print(watch.report())
    print("lost: " + ("nothing" if not wrong else "; ".join(wrong)))
    return 1 if wrong else 0


def kill_processes(policy: str, times: int, rng: random.Random) -> list[str]:
    """Kill this many processes at random moments; print the cost and return the errors."""
    costs = Costs()
    options = ("--nodes", str(NODES), "--on-process-failure", policy, "--max-restarts", str(10 * times))
    with LocalJob(DENSE, DENSE_ARGS, options=options) as job:
        wait_steps(job, 20)
        for _ in range(times):
            time.sleep(rng.random() * median_step(job))
            kill_one(job, rng.choice(job.nodes()), costs)
            wait_steps(job, SETTLE_STEPS)
        costs.print_table(policy, median_step(job))
        failures = job.all(FailureDetected)
        costs.wrong += [f"{e.kind} {e.category} of severity {e.severity}" for e in failures if e.severity != 2]
        if len(failures) != times:
            costs.wrong.append(f"{times} kills, {len(failures)} failures")
        costs.wrong += [f"rolled back to {e.to_step}" for e in job.all(RolledBack)]
        costs.wrong += [f"{e.node} left: {e.reason}" for e in job.all(NodeLeft)]
    return costs.wrong


def kill_one(job: LocalJob, node: str, costs: Costs) -> None:
    """Kill a node's worker, and wait until all workers train again."""
    since, median = len(job.events), median_step(job)
    at = time.time()
    os.kill(job.pids(node)[1][0], signal.SIGKILL)
    costs.detected.append(job.wait(FailureDetected, since=since).time - at)
    generation = job.wait(GenerationStarted, since=since)
    place = job.events.index(generation)
    first = job.wait(StepCommitted, lambda e: e.time > generation.time, since=place)
    costs.down.append(first.time - at - median)
    whole = job.wait(GenerationStarted, since=place, world_size=NODES)
    joined = job.wait(Recovered, since=job.events.index(whole))
    costs.back.append(joined.time - at)
    if whole is generation:
        return
    wait_steps(job, 2)
    # The first step after the failure counts in `down`.
    steps = [e for e in job.events[job.events.index(first) + 1 :] if isinstance(e, StepCommitted)]
    costs.stall.append(max(e.step_s for e in steps) - median)


def run_bad_samples(times: int) -> list[str]:
    """Run this many jobs with a sample that always raises; print the time until they end and return the errors."""
    over: list[float] = []
    wrong: list[str] = []
    for _ in range(times):
        with TemporaryDirectory(prefix="holdfast-") as folder:
            options = ("--nodes", str(NODES), "--checkpoint-dir", folder, "--checkpoint-every", "1000")
            with LocalJob(BAD_SAMPLE, (), options=options) as job:
                job.wait_exit()
                (failed,) = job.all(JobFailed)
                over.append(failed.time - job.all(FailureDetected)[0].time)
                saved, committed = job.all(CheckpointSaved), job.all(StepCommitted)
                if not saved or saved[-1].step != committed[-1].step:
                    wrong.append(f"step {committed[-1].step} is not saved: {failed.why}")
                if f"step {committed[-1].step + 1}, micro-batch " not in failed.why or "line " not in failed.why:
                    wrong.append(f"not named: {failed.why}")
                wrong += [f"{e.node} left: {e.reason}" for e in job.all(NodeLeft) if e.reason == "quarantined"]
    print(f"a sample that always raises: the job ends and is saved {format_spread(over)} s after the first failure")
    return wrong


def wait_steps(job: LocalJob, steps: int) -> None:
    """Wait for this many more steps."""
    known = job.all(StepCommitted)
    wanted = (known[-1].step if known else 0) + steps
    job.wait(StepCommitted, lambda e: e.step >= wanted)


def median_step(job: LocalJob) -> float:
    """Return the median seconds of all steps so far; disturbed steps are too few to matter."""
    return statistics.median(e.step_s for e in job.all(StepCommitted)[3:])


if __name__ == "__main__":
    sys.exit(main())
