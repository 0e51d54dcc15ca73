"""What it costs that a node's part moves to another machine: planned, and after a kill; and that it only goes.

    make bench-move                              everything, and benchmarks/stragglers.py
    python benchmarks/move.py --rounds 5 --only one

  one      each round, on a job of four nodes with one warm standby:
             move        `holdfast move`: the standby takes the node's place, and the node is the standby then
             replaced    SIGKILL: the standby takes the node's place
             shrunk      SIGKILL without a standby: the others go on; then a node joins
             leave       `holdfast drain` without a standby: the others go on; then a node joins
  several  one, two and three of eight nodes move at once
  every    a move every 20 steps: the time of 400 steps, against so many times the median of the steps between
Cost = the longest step around it, or the time from the kill to the first step after it, less the median step. A standby
is started for each that is used up. All figures come from the job's own event file.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from recovery import DENSE, DENSE_ARGS, SETTLE_STEPS, Bench, Tally, spread
from standstill import Watch

from holdfast.protocol.events import GenerationStarted, NodeMoved, Recovered, StandbyReady, StepCommitted
from holdfast.testing.local_job import LocalJob

SECTIONS = ("one", "several", "every")
#: how fast state may be taken to travel where two cores carry every stream, and what a move may cost beside that
BYTES_PER_S, SEVERAL_S = 0.8e9, 0.03
EVERY, STEPS = 20, 400


def main() -> int:
    """Run the benchmark and print its tables; 1 if anything was lost."""
    options = _options()
    sections = {"one": (4, _one), "several": (8, _several), "every": (4, _every)}
    return max(_section(options, *sections[name]) for name in options.only or SECTIONS)


def _section(options: argparse.Namespace, nodes: int, act: Callable[[MoveBench, argparse.Namespace], None]) -> int:
    args = options.args or DENSE_ARGS
    run = LocalJob(options.script, args, options=("--nodes", str(nodes), "--allow-faults"))
    with Watch() as watch, run as job:
        bench = MoveBench(job, watch, random.Random(options.seed), [str(options.script), *args])
        try:
            bench.settle(since=0, steps=20)
            act(bench, options)
            return bench.report()
        finally:
            bench.end_agents()


def _one(bench: MoveBench, options: argparse.Namespace) -> None:
    bench.standby()
    for _ in range(options.rounds):
        bench.move()
        bench.replaced()
        bench.shrunk()
        bench.leave()
        bench.standby()


def _several(bench: MoveBench, options: argparse.Namespace) -> None:
    for _ in range(3):
        bench.standby()
    for _ in range(options.rounds):
        for count in (1, 2, 3):
            bench.move(count, f"{count} of 8 at once")


def _every(bench: MoveBench, options: argparse.Namespace) -> None:
    bench.standby()
    bench.keep_moving()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section; again for more")
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class MoveBench(Bench):
    """One job whose nodes are moved, killed and drained, and which is four nodes again after each."""

    def __init__(self, job: LocalJob, watch: Watch, rng: random.Random, script: list[str]) -> None:
        super().__init__(job, watch, rng)
        self._script = script
        self._agents: list[subprocess.Popen[bytes]] = []
        #: the parts of recoveries, and what several moves at once may have cost
        self._parts: dict[str, list[Recovered]] = {}
        self._allowed: dict[str, list[float]] = {}

    def move(self, count: int = 1, kind: str = "move") -> None:
        """Nodes give their places to standbys, and are standbys then."""
        victims, since = self.rng.sample(self.job.nodes(), count), len(self.job.events)
        with self.job.client() as client:
            client.move(victims)
        first = self.job.wait(GenerationStarted, since=since)  # (the standbys join beside those that go)
        place = self.job.events.index(self.job.wait(GenerationStarted, reason="move", since=since))
        self._note_longest(kind, place, since=self.job.events.index(first))
        moved = [self.job.wait(NodeMoved, from_node=victim, since=place) for victim in victims]
        for victim in victims:
            self.job.wait(StandbyReady, node=victim, since=place)
        self._note_parts("leaving, of a move", place)
        self._allowed.setdefault(kind, []).append(SEVERAL_S + moved[0].moved_bytes / BYTES_PER_S)
        self.settle(since=len(self.job.events), steps=SETTLE_STEPS)

    def keep_moving(self) -> None:
        """A node moves every so many steps."""
        first = len(self.job.all(StepCommitted))
        for done in range(0, STEPS, EVERY):
            victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
            with self.job.client() as client:
                client.move([victim])
            self.job.wait(NodeMoved, from_node=victim, since=since)
            self.job.wait(StandbyReady, node=victim, since=since)
            self.settle(since=0, steps=first + done + EVERY - len(self.job.all(StepCommitted)))
        steps = [event.step_s for event in self.job.all(StepCommitted)[first : first + STEPS]]
        efficiency = len(steps) * statistics.median(steps) / sum(steps)
        print(
            f"a move every {EVERY} of {len(steps)} steps: efficiency {efficiency:.3f} (>= 0.97 is wanted)", flush=True
        )

    def replaced(self) -> None:
        """A node is killed, and a standby takes its place."""
        since = len(self.job.events)
        self._killed("replaced", lost=0)
        self._note_parts("replaced", since)

    def shrunk(self) -> None:
        """A node is killed, and nobody takes its place."""
        self._killed("shrunk", lost=1)

    def leave(self) -> None:
        """A node leaves, nobody takes its place, and another one joins."""
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        with self.job.client() as client:
            client.drain([victim])
        begun = self.job.wait(GenerationStarted, reason="drain", since=since)
        self._note_longest("leave", self.job.events.index(begun))
        self.settle(since=len(self.job.events), steps=SETTLE_STEPS)
        self.add_node()

    def end_agents(self) -> None:
        """End the agents that were started here."""
        for agent in self._agents:
            agent.kill()
            agent.wait()

    def standby(self) -> None:
        """Start a standby, and wait until it is warm."""
        name, since = f"standby-{len(self._agents)}", len(self.job.events)
        options = ("agent", "--standby", "--node-name", name, "--address", self.job.url)
        command = [sys.executable, "-m", "holdfast", *options, *self._script]
        quiet = subprocess.DEVNULL
        self._agents.append(subprocess.Popen(command, env=self.job.environment, stdout=quiet, stderr=quiet))
        self.job.wait(StandbyReady, node=name, since=since)
        self.settle(since=len(self.job.events), steps=2)

    def _note_parts(self, kind: str, since: int) -> None:
        self._parts.setdefault(kind, []).append(self.job.wait(Recovered, action="replace", since=since))

    def _note_longest(self, kind: str, place: int, since: int | None = None) -> None:
        """Note the longest step from `since` on (else `place`) until three after `place`."""
        self.settle(since=place, steps=3)
        steps = [event for event in self.job.events[since or place :] if isinstance(event, StepCommitted)]
        self._note(kind, max(event.step_s for event in steps) - self.median_step())

    def _killed(self, kind: str, *, lost: int) -> None:
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        at = self.kill(victim)
        self.measure(kind, at, since, lost=lost)

    def _note(self, kind: str, cost_s: float) -> None:
        self.tallies.setdefault(kind, Tally()).down.append(cost_s)
        print(f"{kind:20s} less the step {cost_s:6.3f} s", flush=True)

    def report(self) -> int:
        """Print the table; return 1 if a step, a sample or a survivor was lost."""
        print(f"\nmedian step {self.median_step() * 1e3:.0f} ms; costs less the median step, seconds:")
        for kind, tally in self.tallies.items():
            print(f"  {kind:20s} {spread(tally.down)}")
            if kind in self._allowed and kind != "move":
                print(f"  {'  wanted, at most':20s} {spread(self._allowed[kind])}")
        print(f"  {'joiner':20s} {spread(self.stalls)}")
        for kind, recovered in self._parts.items():
            print(f"parts of what was {kind}, seconds:" if kind == "replaced" else f"parts of {kind}, seconds:")
            for part in ("detect_s", "decide_s", "regroup_s", "transfer_s", "redo_s"):
                print(f"  {part[:-2]:20s} {spread([getattr(each, part) for each in recovered])}")
        print(self.watch.report())
        wrong = self.losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
