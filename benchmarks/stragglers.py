"""Measure the cost of a rank that becomes a fifth slower, over a hundred steps (TrainMover, Figures 13, 14).

    make bench-move                              runs this too
    python benchmarks/stragglers.py --rounds 3
    python benchmarks/stragglers.py --moments 20 70          really runs all responses at these moments: half an hour

A job of four nodes with emulated accelerators has a warm standby and uses `--stragglers move`. Each round slows a node
and waits until it is detected and replaced, and steps are as long as before. The cost is the additional time of these
steps, up to the end of the hundred steps. At one moment all hundred steps really run, too. Responses of other systems:

nothing the rest of the hundred steps is slow defer-N slow until the next checkpoint (every N steps), then a restart
(none at the end of the hundred) restart-N a restart from the last checkpoint: its steps since then are repeated
save-and-restart saves at once, and restarts per-iteration saves at every step, and restarts

Their hundred steps really run (benchmarks/straggler_ways.py), each response at one moment or all at the moments given
by `--moments`. Losses at other moments, in brackets, are composed of measurements of the same run: a slowed step; the
time from a stop, with and without saving, to the first step after a start; and a step that saves. In their favour, they
know the slow rank at once, and in composed losses regular checkpoints cost nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import asked
from asked import Figure
from ending import end_in_order
from moving import MoveBench
from recovery import DENSE, DENSE_ARGS
from standstill import SuspensionWatch
from straggler_ways import NAMES, NEVER, OURS, STEPS, TIMES, RealRuns, plan, plans_to_run

from holdfast.protocol.events import NodeMoved, StandbyReady, StepCommitted, StragglerFound
from tests.harness.local_job import LocalJob

EVERY = 10
#: The last moment of the hundred that leaves time for a restart.
LAST = 95
#: The moment at which all hundred steps really run with a move by default.
OURS_AT = 70
#: Allowed loss of a hundred steps, at any moment.
MOST_LOST = 0.03
#: Undisturbed steps before a rank is slowed, and after it was replaced.
BEFORE, AFTER = 12, 3
#: Seconds that the job runs before: nodes report every five seconds, and are compared from the ninth report on.
FIRST_S = 50.0
#: Losses by response and moment.
Lost = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Parts:
    """Measurements of one job in seconds: a step, the additional time of a slowed one, and parts of other responses."""

    step: float
    slower: float
    restart: float = 0.0
    save_and_restart: float = 0.0
    save_each: float = 0.0

    def lost_share(self, name: str, moment: int) -> float:
        """Return the share of the time that a response loses if a rank becomes slow at a step of the hundred."""
        one = plan(name, moment)
        slow = (STEPS if one.stop_at is None else one.stop_at) - moment if name.startswith(("nothing", "defer")) else 0
        seconds = slow * self.slower
        if one.stop_at is not None:
            seconds += self.save_and_restart if name == "save-and-restart" else self.restart
        if name.startswith("restart"):
            seconds += moment % int(name.rpartition("-")[2]) * self.step
        if name == "per-iteration":
            seconds += STEPS * self.save_each
        return share_of_time(seconds, self.step)


def share_of_time(seconds: float, step: float) -> float:
    """Return additional seconds of a hundred steps as a share of all their time."""
    return seconds / (STEPS * step + seconds)


def main() -> int:
    """Run the benchmark and print its table; return 1 if a move lost more than allowed, or anything else was lost."""
    end_in_order()
    options = _options()
    args = options.args or DENSE_ARGS[2:]
    launch = ("--nodes", "4", "--emulate-compute", options.emulate_compute, "--allow-faults")
    with SuspensionWatch() as watch:
        moved, parts, wrong = _measure_moves(options, watch, (*launch, "--stragglers", "move"), args)
        lost = _run_responses(options, launch, args, parts.step)
        ours = {moment: share_of_time(cost, parts.step) for moment, cost in moved.items()}
        asked.write_figures(options.figures, figures(ours, lost))
        return report(ours, parts, lost, wrong, watch)


def _run_responses(
    options: argparse.Namespace, launch: Sequence[str], args: Sequence[str], step: float
) -> dict[tuple[str, int], float]:
    """Run the hundred steps of all responses; return their losses."""
    real = RealRuns(options.script, args, launch, random.Random(options.seed))
    lost: dict[tuple[str, int], float] = {}

    def note(names: Sequence[str], moment: int, seconds: float) -> None:
        part = share_of_time(seconds - (STEPS - 1) * step, step)
        lost.update({(name, moment): part for name in names})
        print(f"{', '.join(names)}, at step {moment}: {part:.2%} lost", flush=True)

    for moment in options.moments or (OURS_AT,):
        note([OURS], moment, real.seconds_of_ours(moment, FIRST_S))
    for one, names in plans_to_run(options.moments).items():
        note(names, one.moment, real.seconds_of(one))
    return lost


def _measure_moves(
    options: argparse.Namespace, watch: SuspensionWatch, launch: Sequence[str], args: Sequence[str]
) -> tuple[dict[int, float], Parts, list[str]]:
    """Slow one node after the other; return the losses in seconds by moment, the parts, and errors."""
    args = (*args, "--steps", str(NEVER))
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        saves = ("--checkpoint-dir", f"{name}/checkpoints", "--checkpoint-every", str(NEVER))
        launch = (*launch, *saves)
        script = ["--emulate-compute", options.emulate_compute, *saves, str(options.script), *args]
        with LocalJob(options.script, args, options=launch) as job:
            bench = StragglerBench(job, watch, random.Random(options.seed), script)
            try:
                moved = bench.run_rounds(options.rounds)
                wrong = bench.find_losses()
                last, saved_at = bench.stop("--no-wait")
            finally:
                bench.end_agents()
        with LocalJob(options.script, args, options=(*launch[:-1], "1")) as job:
            save_and_restart = job.wait(StepCommitted).time - saved_at
            steps = bench.step_seconds(job, last + 2, BEFORE)
            _, at = bench.stop("--now", "--no-wait", job=job)
        with LocalJob(options.script, args, options=launch) as job:
            restart = job.wait(StepCommitted).time - at
    step, slower = bench.undisturbed_step(), statistics.median(bench.slowed)
    save_each = max(0.0, statistics.median(steps) - step)
    parts = Parts(step, slower, max(0.0, restart - step), max(0.0, save_and_restart - step), save_each)
    return moved, parts, wrong


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=STEPS // EVERY, help="number of moments, from step 0 on")
    parser.add_argument(
        "--moments", type=int, nargs="+", help="moments at which all other responses really run (default: one each)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulate-compute", default="0.5/micro-batch")
    parser.add_argument("--script", type=Path, default=DENSE)
    asked.add_figures_option(parser)
    parser.add_argument("args", nargs="*", help="arguments of the script except its steps, after --")
    options = parser.parse_args()
    if any(not 0 <= moment <= LAST for moment in options.moments or ()):
        parser.error(f"--moments {options.moments}: each must be from 0 to {LAST}")
    return options


class StragglerBench(MoveBench):
    """One job in which one node after the other becomes slow."""

    def __init__(self, job: LocalJob, watch: SuspensionWatch, rng: random.Random, script: Sequence[str]) -> None:
        super().__init__(job, watch, rng, script)
        self._calm: list[float] = []
        #: Additional seconds of the steps, from the second one after a rank was slowed until it was detected.
        self.slowed: list[float] = []

    def run_rounds(self, count: int) -> dict[int, float]:
        """Slow a rank at every tenth step of a hundred; return the loss at each moment, in seconds."""
        self.job.wait(StepCommitted)
        self.start_standby()
        begun = self.job.all(StepCommitted)[0].time
        self.job.wait(StepCommitted, lambda e: e.time > begun + FIRST_S)
        return {number * EVERY: self._slow_rank_at(number * EVERY) for number in range(count)}

    def undisturbed_step(self) -> float:
        """Return the median seconds of the steps before ranks were slowed."""
        return statistics.median(self._calm)

    def stop(self, *how: str, job: LocalJob | None = None) -> tuple[int, float]:
        """Stop a job and wait for its process; return its last step and the time of that step."""
        job = job or self.job
        job.call("stop", *how)
        job.wait_exit()
        last = job.all(StepCommitted)[-1]
        return last.step, last.time

    def step_seconds(self, job: LocalJob, since: int, count: int) -> list[float]:
        """Wait for this many steps, and return the seconds of each."""
        job.wait(StepCommitted, lambda e: e.step >= since + count)
        return [event.step_s for event in job.all(StepCommitted) if since <= event.step < since + count]

    def _slow_rank_at(self, moment: int) -> float:
        """Slow a rank; return the additional seconds of the steps until it was replaced, within the hundred steps."""
        self.wait_steps(since=len(self.job.events), steps=BEFORE)
        self._calm += [event.step_s for event in self.job.all(StepCommitted)[-BEFORE + 2 :]]
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        first = self._last_step() + 2
        self.job.inject("slow", victim, step=first, times=TIMES)
        found = self.job.wait(StragglerFound, since=since)
        if found.node != victim:
            raise SystemExit(f"{found.node} was reported as slow instead of {victim}: {found.why}")
        self.job.wait(NodeMoved, from_node=victim, since=since)
        self.wait_steps(since=len(self.job.events), steps=AFTER)
        slow = [event for event in self.job.events[since:] if isinstance(event, StepCommitted) and event.step >= first]
        self.slowed += [event.step_s - self.undisturbed_step() for event in slow[1:] if event.time < found.time]
        counted = slow[: STEPS - moment]
        cost = sum(event.step_s - self.undisturbed_step() for event in counted)
        after_s, steps = found.time - slow[0].time + slow[0].step_s, sum(event.time < found.time for event in slow)
        print(f"step {moment:3d}: detected after {steps} steps, {after_s:.1f} s, {found.factor:.2f} times;", end=" ")
        print(f"{cost:.2f} s lost, {share_of_time(cost, self.undisturbed_step()):.2%}", flush=True)
        self.job.wait(StandbyReady, node=victim, since=since)
        with self.job.client() as client:
            client.drain([victim])
        self.start_standby()
        return cost


def figures(ours: Mapping[int, float], lost: Lost) -> list[Figure]:
    """Return the figures of moves with their limit, and of the other responses that really ran."""
    real = [
        Figure(
            name=f"{'' if name == OURS else '  '}{name}, at step {moment}: lost of all {STEPS} as they ran",
            values=(100 * value,),
            asked=100 * MOST_LOST if name == OURS else None,
            unit="%",
        )
        for (name, moment), value in lost.items()
    ]
    name = f"lost of {STEPS} steps if a rank becomes {TIMES:g} times as slow"
    values = tuple(100 * value for value in ours.values())
    return [Figure(name=name, values=values, asked=100 * MOST_LOST, each=True, unit="%"), *real]


def table(ours: Mapping[int, float], parts: Parts, lost: Lost) -> list[str]:
    """Return the lines of the losses at each moment by response; composed losses are in brackets."""
    lines = [f"  {'step':>5s} " + " ".join(f"{name:>17s}" for name in (OURS, *NAMES))]
    for moment in sorted({*ours, *(moment for _, moment in lost)}):
        row = [f"{ours[moment]:.1%}" if moment in ours else "not measured"]
        for name in NAMES:
            real = lost.get((name, moment))
            row.append(f"({parts.lost_share(name, moment):.1%})" if real is None else f"{real:.1%}")
        lines.append(f"  {moment:5d} " + " ".join(f"{cell:>17s}" for cell in row))
    return lines


def report(ours: Mapping[int, float], parts: Parts, lost: Lost, wrong: list[str], watch: SuspensionWatch) -> int:
    """Print the table; return 1 if a move lost more than allowed, or a step, a sample or a survivor was lost."""
    print(f"\nemulated: a step {parts.step:.3f} s, slowed {parts.slower:+.3f} s; restart {parts.restart:.2f} s,")
    print(f"save and restart {parts.save_and_restart:.2f} s, a step that saves {parts.save_each:+.3f} s")
    print(f"lost of {STEPS} steps if a rank becomes {TIMES:g} times as slow at step (in brackets: composed)")
    print("\n".join(table(ours, parts, lost)))
    worst = max([*ours.values(), *(value for (name, _), value in lost.items() if name == OURS)])
    print(f"move: at most {worst:.2%} (limit {MOST_LOST:.0%})")
    print(watch.report())
    if worst > MOST_LOST:
        wrong.append(f"a move lost {worst:.2%} of the hundred steps")
    print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
