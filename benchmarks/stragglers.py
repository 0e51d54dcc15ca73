"""What a rank that becomes a fifth slower costs a hundred steps (TrainMover, Figures 13, 14), by what is done about it.

    make bench-move                              this too
    python benchmarks/stragglers.py --rounds 3

A job of four nodes whose accelerators are emulated, each with a warm standby beside it, and `--stragglers move`. Each
round slows a node and waits until it is found, moved away, and steps are as long as before: what these steps took more
than the undisturbed ones is the cost, cut off where the hundred steps end. What others would lose is laid together from
what the same run has measured: a slowed step, and, of the same job, a stop with and without saving until its first step
after a start, and a step that saves. In their favour they know at once who is slow, and scheduled saves cost nothing:
  nothing          the rest of the hundred steps is slow
  defer-N          slow until the next checkpoint (every N steps), then a restart (none at the end of the hundred)
  restart-N        a restart from the last checkpoint: its steps since then are done again
  save-and-restart saves at once, and starts again
  per-iteration    saves at every step, and starts again
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery import DENSE, DENSE_ARGS, Bench
from standstill import Watch

from holdfast.protocol.events import NodeMoved, StandbyReady, StepCommitted, StragglerFound
from holdfast.testing.local_job import LocalJob

STEPS, EVERY = 100, 10
TIMES = 1.2
#: what may be lost of a hundred steps, at any of the moments
MOST_LOST = 0.03
#: undisturbed steps before a rank is slowed, and after it was moved away
BEFORE, AFTER = 12, 3
#: a node's words come every five seconds, and it is judged from the ninth on: so long the job runs before
FIRST_S = 50.0


@dataclass(frozen=True)
class Parts:
    """What was measured of one job, in seconds: a step, what a slowed one takes more, and what the others need."""

    step: float
    slower: float
    restart: float = 0.0
    save_and_restart: float = 0.0
    save_each: float = 0.0

    def lost(self, moment: int) -> dict[str, float]:
        """Return what each way loses where a rank becomes slow at a step of the hundred, as a part of all the time."""
        left = STEPS - moment
        seconds = {"nothing": left * self.slower}
        for every in (50, 100):
            next_save = (moment // every + 1) * every
            restart = self.restart if next_save < STEPS else 0.0
            seconds[f"defer-{every}"] = (next_save - moment) * self.slower + restart
        for every in (50, 100):
            seconds[f"restart-{every}"] = moment % every * self.step + self.restart
        seconds["save-and-restart"] = self.save_and_restart
        seconds["per-iteration"] = STEPS * self.save_each + self.restart
        return {name: share(each, self.step) for name, each in seconds.items()}


def share(seconds: float, step: float) -> float:
    """Return which part of all the time seconds are that a hundred steps took more."""
    return seconds / (STEPS * step + seconds)


def main() -> int:
    """Run the benchmark and print its table; 1 if a move lost more than it may, or anything else was lost."""
    options = _options()
    args = options.args or DENSE_ARGS
    with Watch() as watch, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        launch = (
            "--nodes",
            "4",
            "--emulate-compute",
            options.emulate_compute,
            "--stragglers",
            "move",
            "--allow-faults",
        )
        saves = ("--checkpoint-dir", f"{folder}/checkpoints", "--checkpoint-every", "1000000")
        launch += saves
        with LocalJob(options.script, args, options=launch, folder=Path(folder)) as job:
            bench = StragglerBench(job, watch, random.Random(options.seed), saves, [str(options.script), *args])
            try:
                moved = bench.rounds(options.rounds)
            finally:
                bench.end_agents()
            wrong = bench.losses()
            last, saved_at = bench.stop("--no-wait")
        saving = (*launch[:-1], "1")
        with LocalJob(options.script, args, options=saving, folder=Path(folder)) as job:
            save_and_restart = bench.first_step_after(job, last) - saved_at
            steps = bench.steps_of(job, last + 2, BEFORE)
            last, at = bench.stop("--now", "--no-wait", job=job)
        with LocalJob(options.script, args, options=launch, folder=Path(folder)) as job:
            restart = bench.first_step_after(job, last) - at
        step, slower = bench.undisturbed(), statistics.median(bench.slowed)
        save_each = max(0.0, statistics.median(steps) - step)
        parts = Parts(step, slower, max(0.0, restart - step), max(0.0, save_and_restart - step), save_each)
        return report(moved, parts, wrong, watch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=STEPS // EVERY, help="so many of the moments, from step 0 on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulate-compute", default="0.5/micro-batch")
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class StragglerBench(Bench):
    """One job, of which one node after the other becomes slow."""

    def __init__(
        self, job: LocalJob, watch: Watch, rng: random.Random, options: Sequence[str], script: Sequence[str]
    ) -> None:
        super().__init__(job, watch, rng)
        self._agent_options = options
        self._script = script
        self._agents: list[subprocess.Popen[bytes]] = []
        self._calm: list[float] = []
        #: what steps took more, from the second after a rank was slowed until it was found
        self.slowed: list[float] = []

    def rounds(self, count: int) -> dict[int, float]:
        """Slow a rank at every tenth step of a hundred; return what was lost at each moment, in seconds."""
        self.job.wait(StepCommitted)
        self._standby()
        begun = self.job.all(StepCommitted)[0].time
        self.job.wait(StepCommitted, lambda e: e.time > begun + FIRST_S)
        return {number * EVERY: self._slowed_at(number * EVERY) for number in range(count)}

    def end_agents(self) -> None:
        """End the agents that were started here."""
        for agent in self._agents:
            agent.kill()
            agent.wait()

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

    def first_step_after(self, job: LocalJob, step: int) -> float:
        """Wait for the first step of a job that was started again; return when it was.

        What was not saved is done again, and its steps have numbers that were there before: time tells them apart.
        """
        before = next(event.time for event in reversed(job.all(StepCommitted)) if event.step == step)
        return job.wait(StepCommitted, lambda e: e.time > before).time

    def steps_of(self, job: LocalJob, since: int, count: int) -> list[float]:
        """Wait for so many steps, and return how long each took."""
        job.wait(StepCommitted, lambda e: e.step >= since + count)
        return [event.step_s for event in job.all(StepCommitted) if since <= event.step < since + count]

    def _standby(self) -> None:
        """Have a standby that is warm."""
        name, since = f"standby-{len(self._agents)}", len(self.job.events)
        options = ("agent", "--standby", "--node-name", name, "--address", self.job.url)
        command = [sys.executable, "-m", "holdfast", *options, *self._agent_options, *self._script]
        quiet = subprocess.DEVNULL
        self._agents.append(subprocess.Popen(command, env=self.job.environment, stdout=quiet, stderr=quiet))
        self.job.wait(StandbyReady, node=name, since=since)

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
        self._standby()
        return cost


def report(moved: Mapping[int, float], parts: Parts, wrong: list[str], watch: Watch) -> int:
    """Print the table; return 1 if a move lost more than it may, or a step, a sample or a survivor was lost."""
    rows = {moment: {"move": share(cost, parts.step), **parts.lost(moment)} for moment, cost in moved.items()}
    names = list(next(iter(rows.values())))
    print(f"\nemulated: a step {parts.step:.3f} s, slowed {parts.slower:+.3f} s; restart {parts.restart:.2f} s,")
    print(f"save and restart {parts.save_and_restart:.2f} s, a step that saves {parts.save_each:+.3f} s")
    print(f"lost of {STEPS} steps where a rank becomes {TIMES:g} times as slow at step")
    print(f"  {'step':>5s} " + " ".join(f"{name:>17s}" for name in names))
    for moment, row in rows.items():
        print(f"  {moment:5d} " + " ".join(f"{row[name]:17.1%}" for name in names))
    worst = max(row["move"] for row in rows.values())
    print(f"move: at most {worst:.2%} (may be {MOST_LOST:.0%})")
    print(watch.report())
    if worst > MOST_LOST:
        wrong.append(f"a move lost {worst:.2%} of the hundred steps")
    print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
