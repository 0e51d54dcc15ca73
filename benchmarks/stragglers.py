"""What a rank that becomes a fifth slower costs a hundred steps (TrainMover, Figures 13, 14), by what is done about it.

    make bench-move                              this too
    python benchmarks/stragglers.py --rounds 3
    python benchmarks/stragglers.py --moments 20 70          all ways really run at these: half an hour

A job of four nodes whose accelerators are emulated, each with a warm standby beside it, and `--stragglers move`. Each
round slows a node and waits until it is found, moved away, and steps are as long as before: what these steps took more
than the undisturbed ones is the cost, cut off where the hundred steps end; at one moment all hundred really run, too.
What others would do about it:
  nothing          the rest of the hundred steps is slow
  defer-N          slow until the next checkpoint (every N steps), then a restart (none at the end of the hundred)
  restart-N        a restart from the last checkpoint: its steps since then are done again
  save-and-restart saves at once, and starts again
  per-iteration    saves at every step, and starts again
Their hundred steps really run (benchmarks/straggler_ways.py), each way at one moment or all at those of `--moments`; at
the other moments, in brackets, what they lose is put together of what the same run has measured: a slowed step; of the
same job a stop with and without saving until its first step after a start; and a step that saves. In their favour they
know at once who is slow, and in what is put together scheduled saves cost nothing.
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
from standstill import Watch
from straggler_ways import NAMES, NEVER, OURS, STEPS, TIMES, Real, plan, plans

from holdfast.protocol.events import NodeMoved, StandbyReady, StepCommitted, StragglerFound
from tests.harness.local_job import LocalJob

EVERY = 10
#: the last moment of the hundred that leaves room for a restart
LAST = 95
#: at which all hundred steps really run with a move, too, where nothing else is asked for
OURS_AT = 70
#: what may be lost of a hundred steps, at any of the moments
MOST_LOST = 0.03
#: undisturbed steps before a rank is slowed, and after it was moved away
BEFORE, AFTER = 12, 3
#: a node's words come every five seconds, and it is judged from the ninth on: so long the job runs before
FIRST_S = 50.0
#: what was lost at a moment, by what is done about it
Lost = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Parts:
    """What was measured of one job, in seconds: a step, what a slowed one takes more, and what the others need."""

    step: float
    slower: float
    restart: float = 0.0
    save_and_restart: float = 0.0
    save_each: float = 0.0

    def lost(self, name: str, moment: int) -> float:
        """Return what a way loses where a rank becomes slow at a step of the hundred, as a part of all the time."""
        one = plan(name, moment)
        slow = (STEPS if one.stop_at is None else one.stop_at) - moment if name.startswith(("nothing", "defer")) else 0
        seconds = slow * self.slower
        if one.stop_at is not None:
            seconds += self.save_and_restart if name == "save-and-restart" else self.restart
        if name.startswith("restart"):
            seconds += moment % int(name.rpartition("-")[2]) * self.step
        if name == "per-iteration":
            seconds += STEPS * self.save_each
        return share(seconds, self.step)


def share(seconds: float, step: float) -> float:
    """Return which part of all the time seconds are that a hundred steps took more."""
    return seconds / (STEPS * step + seconds)


def main() -> int:
    """Run the benchmark and print its table; 1 if a move lost more than it may, or anything else was lost."""
    end_in_order()
    options = _options()
    args = options.args or DENSE_ARGS[2:]
    launch = ("--nodes", "4", "--emulate-compute", options.emulate_compute, "--allow-faults")
    with Watch() as watch:
        moved, parts, wrong = _ours(options, watch, (*launch, "--stragglers", "move"), args)
        lost = _really(options, launch, args, parts.step)
        ours = {moment: share(cost, parts.step) for moment, cost in moved.items()}
        asked.write(options.figures, figures(ours, lost))
        return report(ours, parts, lost, wrong, watch)


def _really(
    options: argparse.Namespace, launch: Sequence[str], args: Sequence[str], step: float
) -> dict[tuple[str, int], float]:
    """Run the hundred steps of ours and of the others; return what was lost of them."""
    real = Real(options.script, args, launch, random.Random(options.seed))
    lost: dict[tuple[str, int], float] = {}

    def note(names: Sequence[str], moment: int, seconds: float) -> None:
        part = share(seconds - (STEPS - 1) * step, step)
        lost.update({(name, moment): part for name in names})
        print(f"{', '.join(names)}, at step {moment}: {part:.2%} lost", flush=True)

    for moment in options.moments or (OURS_AT,):
        note([OURS], moment, real.seconds_of_ours(moment, FIRST_S))
    for one, names in plans(options.moments).items():
        note(names, one.moment, real.seconds_of(one))
    return lost


def _ours(
    options: argparse.Namespace, watch: Watch, launch: Sequence[str], args: Sequence[str]
) -> tuple[dict[int, float], Parts, list[str]]:
    """Slow one node after the other; return what was lost at each moment in seconds, the parts, and what went wrong."""
    args = (*args, "--steps", str(NEVER))
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        saves = ("--checkpoint-dir", f"{name}/checkpoints", "--checkpoint-every", str(NEVER))
        launch = (*launch, *saves)
        script = ["--emulate-compute", options.emulate_compute, *saves, str(options.script), *args]
        with LocalJob(options.script, args, options=launch) as job:
            bench = StragglerBench(job, watch, random.Random(options.seed), script)
            try:
                moved = bench.rounds(options.rounds)
                wrong = bench.losses()
                last, saved_at = bench.stop("--no-wait")
            finally:
                bench.end_agents()
        with LocalJob(options.script, args, options=(*launch[:-1], "1")) as job:
            save_and_restart = job.wait(StepCommitted).time - saved_at
            steps = bench.steps_of(job, last + 2, BEFORE)
            _, at = bench.stop("--now", "--no-wait", job=job)
        with LocalJob(options.script, args, options=launch) as job:
            restart = job.wait(StepCommitted).time - at
    step, slower = bench.undisturbed(), statistics.median(bench.slowed)
    save_each = max(0.0, statistics.median(steps) - step)
    parts = Parts(step, slower, max(0.0, restart - step), max(0.0, save_and_restart - step), save_each)
    return moved, parts, wrong


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=STEPS // EVERY, help="so many of the moments, from step 0 on")
    parser.add_argument(
        "--moments", type=int, nargs="+", help="at which all other ways really run (default: each at one)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulate-compute", default="0.5/micro-batch")
    parser.add_argument("--script", type=Path, default=DENSE)
    asked.add_option(parser)
    parser.add_argument("args", nargs="*", help="arguments of the script but its steps, after --")
    options = parser.parse_args()
    if any(not 0 <= moment <= LAST for moment in options.moments or ()):
        parser.error(f"--moments {options.moments}: each must be from 0 to {LAST}")
    return options


class StragglerBench(MoveBench):
    """One job, of which one node after the other becomes slow."""

    def __init__(self, job: LocalJob, watch: Watch, rng: random.Random, script: Sequence[str]) -> None:
        super().__init__(job, watch, rng, script)
        self._calm: list[float] = []
        #: what steps took more, from the second after a rank was slowed until it was found
        self.slowed: list[float] = []

    def rounds(self, count: int) -> dict[int, float]:
        """Slow a rank at every tenth step of a hundred; return what was lost at each moment, in seconds."""
        self.job.wait(StepCommitted)
        self.standby()
        begun = self.job.all(StepCommitted)[0].time
        self.job.wait(StepCommitted, lambda e: e.time > begun + FIRST_S)
        return {number * EVERY: self._slowed_at(number * EVERY) for number in range(count)}

    def undisturbed(self) -> float:
        """The median seconds of the steps before ranks were slowed."""
        return statistics.median(self._calm)

    def stop(self, *how: str, job: LocalJob | None = None) -> tuple[int, float]:
        """Stop a job; return its last step and when that was, after its process has ended."""
        job = job or self.job
        job.call("stop", *how)
        job.wait_exit()
        last = job.all(StepCommitted)[-1]
        return last.step, last.time

    def steps_of(self, job: LocalJob, since: int, count: int) -> list[float]:
        """Wait for so many steps, and return how long each took."""
        job.wait(StepCommitted, lambda e: e.step >= since + count)
        return [event.step_s for event in job.all(StepCommitted) if since <= event.step < since + count]

    def _slowed_at(self, moment: int) -> float:
        """Slow a rank, and return what the steps until it was gone took more, as far as the hundred go."""
        self.settle(since=len(self.job.events), steps=BEFORE)
        self._calm += [event.step_s for event in self.job.all(StepCommitted)[-BEFORE + 2 :]]
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        first = self._last_step() + 2
        self.job.inject("slow", victim, step=first, times=TIMES)
        found = self.job.wait(StragglerFound, since=since)
        if found.node != victim:
            raise SystemExit(f"{found.node} was found to be slow in place of {victim}: {found.why}")
        self.job.wait(NodeMoved, from_node=victim, since=since)
        self.settle(since=len(self.job.events), steps=AFTER)
        slow = [event for event in self.job.events[since:] if isinstance(event, StepCommitted) and event.step >= first]
        self.slowed += [event.step_s - self.undisturbed() for event in slow[1:] if event.time < found.time]
        counted = slow[: STEPS - moment]
        cost = sum(event.step_s - self.undisturbed() for event in counted)
        after_s, steps = found.time - slow[0].time + slow[0].step_s, sum(event.time < found.time for event in slow)
        print(f"step {moment:3d}: found after {steps} steps, {after_s:.1f} s, {found.factor:.2f} times;", end=" ")
        print(f"{cost:.2f} s lost, {share(cost, self.undisturbed()):.2%}", flush=True)
        self.job.wait(StandbyReady, node=victim, since=since)
        with self.job.client() as client:
            client.drain([victim])
        self.standby()
        return cost


def figures(ours: Mapping[int, float], lost: Lost) -> list[Figure]:
    """Return what is asked of moves, and beside it what really ran."""
    real = [
        Figure(
            name=f"{'' if name == OURS else '  '}{name}, at step {moment}: lost of all {STEPS} as they ran",
            values=(100 * value,),
            asked=100 * MOST_LOST if name == OURS else None,
            unit="%",
        )
        for (name, moment), value in lost.items()
    ]
    name = f"lost of {STEPS} steps where a rank becomes {TIMES:g} times as slow"
    values = tuple(100 * value for value in ours.values())
    return [Figure(name=name, values=values, asked=100 * MOST_LOST, each=True, unit="%"), *real]


def table(ours: Mapping[int, float], parts: Parts, lost: Lost) -> list[str]:
    """Return the lines of what is lost at each moment, by what is done about it; in brackets: put together."""
    lines = [f"  {'step':>5s} " + " ".join(f"{name:>17s}" for name in (OURS, *NAMES))]
    for moment in sorted({*ours, *(moment for _, moment in lost)}):
        row = [f"{ours[moment]:.1%}" if moment in ours else "not measured"]
        for name in NAMES:
            real = lost.get((name, moment))
            row.append(f"({parts.lost(name, moment):.1%})" if real is None else f"{real:.1%}")
        lines.append(f"  {moment:5d} " + " ".join(f"{cell:>17s}" for cell in row))
    return lines


def report(ours: Mapping[int, float], parts: Parts, lost: Lost, wrong: list[str], watch: Watch) -> int:
    """Print the table; return 1 if a move lost more than it may, or a step, a sample or a survivor was lost."""
    print(f"\nemulated: a step {parts.step:.3f} s, slowed {parts.slower:+.3f} s; restart {parts.restart:.2f} s,")
    print(f"save and restart {parts.save_and_restart:.2f} s, a step that saves {parts.save_each:+.3f} s")
    print(f"lost of {STEPS} steps where a rank becomes {TIMES:g} times as slow at step (in brackets: put together)")
    print("\n".join(table(ours, parts, lost)))
    worst = max([*ours.values(), *(value for (name, _), value in lost.items() if name == OURS)])
    print(f"move: at most {worst:.2%} (may be {MOST_LOST:.0%})")
    print(watch.report())
    if worst > MOST_LOST:
        wrong.append(f"a move lost {worst:.2%} of the hundred steps")
    print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
