"""Measure how well T(t, x) is predicted for numbers of nodes that were not measured, with real jobs.

    make bench-pace

A dense job and one with experts train with 1 to 8 nodes in turn, with an emulated accelerator: each micro-batch takes a
stated time. The time of a step is compared with predictions of the pool's planner (`planning/waf/pace.py`) from every
subset of these numbers of nodes. Everything except the micro-batches is real: sums of gradients, exchange of tokens,
and commits, with up to eight workers on this machine's cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.planning.waf.pace import StepTimes
from holdfast.protocol.events import StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
#: Micro-batches of a step.
MICRO_BATCHES = 24
SAMPLES = 2
#: The first steps of a run include one-time initialization and are not counted.
WARM = 3
#: Allowed relative error for numbers of nodes that were not measured.
WITHIN = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A measured job."""

    name: str
    script: str
    args: tuple[str, ...]
    options: tuple[str, ...] = ()


_SMALL = ("--dim", "64", "--heads", "4", "--layers", "2", "--context", "16")
JOBS = (
    Job(name="dense", script="dense_gpt.py", args=_SMALL),
    Job(
        name="experts",
        script="moe_gpt.py",
        args=(*_SMALL, "--hidden", "64", "--experts", "8"),
        options=("--expert-slots", "8", "--rebalance-every", "0"),
    ),
    Job(
        name="large sums",
        script="dense_gpt.py",
        args=("--dim", "384", "--heads", "4", "--layers", "2", "--context", "4"),
    ),
)


def main() -> int:
    """Measure and print both tables; return 1 if a prediction exceeds the allowed error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=8, help="largest number of nodes")
    parser.add_argument("--steps", type=int, default=9, help="measured steps for each number of nodes")
    parser.add_argument("--seconds", type=float, default=0.15, help="seconds that a micro-batch takes")
    parser.add_argument(
        "--job", choices=[job.name for job in JOBS], action="append", help="measure only this job (default: all)"
    )
    parser.add_argument("--output", type=Path, help="write the measurements to this file, as JSON")
    parser.add_argument("--measured", type=Path, help="compare the measurements in this file, and run nothing")
    options = parser.parse_args()
    if options.measured:
        read = json.loads(options.measured.read_text())
        found = {name: {int(nodes): seconds for nodes, seconds in known.items()} for name, known in read.items()}
    else:
        numbers = range(1, options.most + 1)
        found = {
            job.name: {nodes: measure(job, nodes, options.steps, options.seconds) for nodes in numbers}
            for job in JOBS
            if not options.job or job.name in options.job
        }
    if options.output:
        options.output.write_text(json.dumps(found))
    print(f"{MICRO_BATCHES} micro-batches a step, of {options.seconds:g} s each (emulated)")
    good = [compare(name, step_s) for name, step_s in found.items()]
    return 0 if all(good) else 1


def measure(job: Job, nodes: int, steps: int, seconds: float) -> float:
    """Return the median seconds of a step with this many nodes."""
    batch = ("--global-batch", str(MICRO_BATCHES * SAMPLES), "--micro-batch", str(SAMPLES))
    args = (*job.args, *batch, "--steps", str(WARM + steps))
    emulated = ("--nodes", str(nodes), "--emulate-compute", f"{seconds}/micro-batch", "--stragglers", "off")
    with LocalJob(ROOT / "examples" / job.script, args, options=(*emulated, *job.options)) as run:
        if run.wait_exit(timeout=600) != 0:
            raise SystemExit(run.story())
        took = [event.step_s for event in run.all(StepCommitted) if event.step > WARM]
    assert len(took) == steps, took
    print(f"{job.name}, {nodes} nodes: {statistics.median(took):.4f} s a step, {min(took):.4f} to {max(took):.4f}")
    return statistics.median(took)


def compare(name: str, step_s: Mapping[int, float]) -> bool:
    """Print the prediction errors by the number of measured node counts, over every subset of that size.

    Returns:
        Whether all errors are within the bound if two or more node counts were measured.
    """
    most, good = max(step_s), True
    print(f"\n{name}: predicted for numbers of nodes that were not measured, error of the seconds of a step")
    for count in range(1, len(step_s)):
        errors: list[tuple[float, tuple[int, ...], int]] = []
        for chosen in itertools.combinations(sorted(step_s), count):
            times = StepTimes(
                step_s={nodes: step_s[nodes] for nodes in chosen}, micro_batches=MICRO_BATCHES, workers=1, flop=1.0
            )
            predicted = times.predicted_s(most)
            errors += [
                (float(predicted[nodes - 1]) / step_s[nodes] - 1, chosen, nodes)
                for nodes in step_s
                if nodes not in chosen
            ]
        worst = max(errors, key=lambda one: abs(one[0]))
        within = sum(abs(error) <= WITHIN for error, _, _ in errors) / len(errors)
        middle = statistics.median(abs(error) for error, _, _ in errors)
        print(
            f"  {count} measured: median {middle:.1%}, {within:.0%} within {WITHIN:.0%}; "
            f"worst {worst[0]:+.1%} for {worst[2]} nodes from {', '.join(map(str, worst[1]))}"
        )
        good = good and (count < 2 or abs(worst[0]) <= WITHIN)
    return good


if __name__ == "__main__":
    raise SystemExit(main())
