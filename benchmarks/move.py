"""What it costs that a node's part moves to another machine: planned, and after a kill; and that it only goes.

    make bench-move                              everything
    python benchmarks/move.py --rounds 5

Each round, on a job of four nodes with one warm standby:
  move        `holdfast drain`: the standby takes the node's place
  replaced    SIGKILL: the standby takes the node's place
  shrunk      SIGKILL without a standby: the others go on; then a node joins
  leave       `holdfast drain` without a standby: the others go on; then the node joins again
Cost = the longest step around it, or the time from the kill to the first step after it, less the median step. A standby
is started for each that is used up. All figures come from the job's own event file.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

from recovery import DENSE, DENSE_ARGS, SETTLE_STEPS, Bench, Tally, spread
from standstill import Watch

from holdfast.protocol.events import GenerationStarted, NodeMoved, StandbyReady, StepCommitted
from holdfast.testing.local_job import LocalJob


def main() -> int:
    """Run the benchmark and print its table; 1 if anything was lost."""
    options = _options()
    args = options.args or DENSE_ARGS
    run = LocalJob(options.script, args, options=("--nodes", "4", "--allow-faults"))
    with Watch() as watch, run as job:
        bench = MoveBench(job, watch, random.Random(options.seed), [str(options.script), *args])
        try:
            bench.settle(since=0, steps=20)
            for _ in range(options.rounds):
                bench.move()
                bench.replaced()
                bench.shrunk()
                bench.leave()
            return bench.report()
        finally:
            bench.end_agents()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class MoveBench(Bench):
    """One job whose nodes are moved, killed and drained, and which is four nodes again after each."""

    def __init__(self, job: LocalJob, watch: Watch, rng: random.Random, script: list[str]) -> None:
        super().__init__(job, watch, rng)
        self._script = script
        self._agents: list[subprocess.Popen[bytes]] = []

    def move(self) -> None:
        """A node leaves, and a standby takes its place."""
        self._standby()
        self._leaves("move")

    def replaced(self) -> None:
        """A node is killed, and a standby takes its place."""
        self._standby()
        self._killed("replaced", lost=0)

    def shrunk(self) -> None:
        """A node is killed, and nobody takes its place."""
        self._killed("shrunk", lost=1)

    def leave(self) -> None:
        """A node leaves, nobody takes its place, and another one joins."""
        self._leaves("leave")
        self.add_node()

    def end_agents(self) -> None:
        """End the agents that were started here."""
        for agent in self._agents:
            agent.kill()
            agent.wait()

    def _standby(self) -> None:
        name, since = f"standby-{len(self._agents)}", len(self.job.events)
        options = ("agent", "--standby", "--node-name", name, "--address", self.job.url)
        command = [sys.executable, "-m", "holdfast", *options, *self._script]
        quiet = subprocess.DEVNULL
        self._agents.append(subprocess.Popen(command, env=self.job.environment, stdout=quiet, stderr=quiet))
        self.job.wait(StandbyReady, node=name, since=since)
        self.settle(since=len(self.job.events), steps=2)

    def _leaves(self, kind: str) -> None:
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        with self.job.client() as client:
            client.drain([victim])
        begun = self.job.wait(GenerationStarted, reason="drain", since=since)
        place = self.job.events.index(begun)
        self.settle(since=place, steps=3)
        if kind == "move":
            self.job.wait(NodeMoved, since=place)
        steps = [event for event in self.job.events[place:] if isinstance(event, StepCommitted)]
        self._note(kind, max(event.step_s for event in steps) - self.median_step())
        self.settle(since=len(self.job.events), steps=SETTLE_STEPS)

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
        print(f"  {'joiner':20s} {spread(self.stalls)}")
        print(self.watch.report())
        wrong = self.losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
