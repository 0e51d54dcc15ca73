"""Measure the cost of losing and adding a node: real processes, killed at random moments and phase boundaries.

    make bench-recovery            everything, and torchrun (benchmarks/peers.py) for comparison
    python benchmarks/recovery.py --kills 5 --no-phases

Down = from the kill to the first step committed in the generation after it, less the median undisturbed step. A node is
added after each kill, so each kill hits a job of four nodes. All figures come from the job's event file.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ending import end_in_order
from standstill import SuspensionWatch

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodesJoined,
    Recovered,
    RolledBack,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
#: About 4.6 M parameters: a step of 150-200 ms on 4 workers that share 2 cores.
DENSE_ARGS = ("--steps", "1000000", "--layers", "6", "--dim", "256", "--heads", "4", "--context", "16")
PHASES = ("compute", "reducing", "ready", "voted", "passed", "applying")
SETTLE_STEPS = 4
#: Number of last steps with which a disturbed step is compared. Most of them are undisturbed.
NEIGHBOURS = 40
#: Steps until a fault, so that several nodes receive the command before it.
FORWARD_AHEAD = 10
#: If a joining node delays the others for more seconds than this, the job's last events are printed.
LONG_STALL_S = 2.0


@dataclass
class KillCosts:
    """Costs of one kind of kill, in seconds, and errors."""

    down: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


def main() -> int:
    """Run the benchmark and print its tables; return 1 if anything was lost."""
    end_in_order()
    options = _options()
    run = LocalJob(options.script, options.args or DENSE_ARGS, options=("--nodes", "4", "--allow-faults"))
    with SuspensionWatch() as watch, run as job:
        bench = RecoveryBench(job, watch, random.Random(options.seed))
        bench.wait_steps(since=0, steps=20)
        for number in range(options.kills):
            bench.kill_at_random(number)
        if not options.no_phases:
            for phase in PHASES:
                bench.kill_at_phase(phase)
            bench.kill_two()
            bench.kill_while_recovering()
            bench.kill_in_forward()
            bench.kill_while_joining()
        return bench.report()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--no-phases", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class RecoveryBench:
    """One job that is harmed and restored repeatedly."""

    def __init__(self, job: LocalJob, watch: SuspensionWatch, rng: random.Random) -> None:
        self.job = job
        self.watch = watch
        self.rng = rng
        self.tallies: dict[str, KillCosts] = {}
        self.stalls: list[float] = []
        #: Seconds from a kill at a random moment until the coordinator reported it.
        self.detected_s: list[float] = []
        self.killed: set[str] = set()

    # ---- the kinds of harm ----

    def kill_at_random(self, number: int) -> None:
        """Kill one node with SIGKILL at a uniformly random moment of a step."""
        time.sleep(self.rng.random() * self.median_step())
        victim = self.rng.choice(self.job.nodes())
        since, at = len(self.job.events), self.kill(victim)
        self.detected_s.append(self.job.wait(FailureDetected, node=victim, since=since).time - at)
        self.measure_recovery("random moment", at, since, lost=1)

    def kill_at_phase(self, phase: str) -> None:
        """Kill a node when its step reaches the phase."""
        victim = self.rng.choice(self.job.nodes())
        since = len(self.job.events)
        step = self._last_step() + 3
        self.killed.add(victim)
        self.job.inject("kill", victim, step=step, phase=phase)
        failure = self.job.wait(FailureDetected, node=victim, since=since)
        self.measure_recovery(f"phase {phase}", failure.time - failure.after_s, since, lost=1)

    def kill_two(self) -> None:
        """Kill two nodes at once."""
        since = len(self.job.events)
        victims = self._two_nodes()
        at = self.kill(victims[0])
        self.kill(victims[1])
        self.measure_recovery("two nodes at once", at, since, lost=2)

    def kill_while_recovering(self) -> None:
        """Kill a second node as soon as the failure of the first one is detected."""
        since = len(self.job.events)
        first, second = self._two_nodes()
        at = self.kill(first)
        self.job.wait(FailureDetected, since=since)
        self.kill(second)
        self.measure_recovery("during a recovery", at, since, lost=2)

    def kill_in_forward(self) -> None:
        """Kill a node after its commit operation has passed, and a second one during the FORWARD that follows.

        The other nodes have passed too, but are stopped before they apply: otherwise no FORWARD would be needed.
        """
        since = len(self.job.events)
        first, second = self._two_nodes()
        others = [node for node in self.job.nodes() if node not in (first, second)]
        step = self._last_step() + FORWARD_AHEAD
        self.killed |= {first, second}
        with self.job.client() as client:
            for survivor in (second, *others):
                client.inject("hold", survivor, step=step, phase="passed")
            client.inject("kill", second, step=step, phase="forward")
            client.inject("kill", first, step=step, phase="passed")
        failure = self.job.wait(FailureDetected, node=first, since=since)
        self.job.wait(FailureDetected, node=second, since=since)
        self.measure_recovery("during FORWARD", failure.time - failure.after_s, since, lost=2)

    def kill_while_joining(self) -> None:
        """Kill an old member while it sends its state to a joining node."""
        since = len(self.job.events)
        victim = self.job.nodes()[0]
        self.killed.add(victim)
        self.job.inject("kill", victim, phase="transfer")
        self.job.call("scale", "+1")
        failure = self.job.wait(FailureDetected, node=victim, since=since)
        self.measure_recovery("during a transfer", failure.time - failure.after_s, since, lost=0)

    def _two_nodes(self) -> list[str]:
        """Return two random nodes such that, in a model with experts, a copy of each expert remains.

        f = 2 guarantees this for one lost node; for two it depends on the pair.
        """
        pairs = [list(pair) for pair in itertools.combinations(self.job.nodes(), 2)]
        with self.job.client() as client:
            experts = client.status()["experts"]
        layers: list[Any] = experts["layers"] if experts else []
        return self.rng.choice([pair for pair in pairs if all(keeps_all_experts(layer, pair) for layer in layers)])

    # ---- measuring ----

    def kill(self, victim: str) -> float:
        self.killed.add(victim)
        return self.job.signal_node(victim)

    def measure_recovery(self, kind: str, at: float, since: int, *, lost: int) -> None:
        """Wait for the recovery, record its cost, and restore the job to four nodes."""
        gone = [name for name in self.killed if name in self._members_before(since)]

        generation = self.job.wait(GenerationStarted, lambda e: not set(e.members) & set(gone), since=since)
        # A step completed before the failure may be announced after it. It does not count.
        place = self.job.events.index(generation)
        first = self.job.wait(StepCommitted, lambda e: e.time > generation.time, since=place)
        tally = self.tallies.setdefault(kind, KillCosts())
        tally.down.append(first.time - at - self.median_step())
        print(f"{kind:20s} down {first.time - at:6.3f} s, less the step {tally.down[-1]:6.3f} s", flush=True)
        for _ in range(lost):
            self.add_node()
        self.wait_steps(since=len(self.job.events), steps=SETTLE_STEPS)

    def add_node(self) -> None:
        since = len(self.job.events)
        self.job.call("scale", "+1")
        joined = self.job.wait(NodesJoined, since=since)
        node = joined.names[0]
        generation = self.job.wait(GenerationStarted, lambda e: node in e.members, since=since)
        self.wait_steps(since=self.job.events.index(generation), steps=2)
        steps = [e for e in self.job.events[self.job.events.index(joined) :] if isinstance(e, StepCommitted)]
        self.stalls.append(max(e.step_s for e in steps) - self.median_step())
        if self.stalls[-1] > LONG_STALL_S:
            still = self.watch.gaps(since=joined.time)
            print(f"{node} delayed the others for {self.stalls[-1]:.3f} s; the machine was suspended for {still} s")
            print(self.job.story(), flush=True)

    def wait_steps(self, *, since: int, steps: int) -> None:
        """Wait for this many steps."""
        wanted = self._last_step() + steps
        self.job.wait(StepCommitted, lambda e: e.step >= wanted, since=since)

    def median_step(self) -> float:
        """Return the median seconds of the last steps: the speed of a shared machine changes within minutes."""
        steps = [e.step_s for e in self.job.all(StepCommitted)[3:]]
        return statistics.median(steps[-NEIGHBOURS:])

    def _last_step(self) -> int:
        steps = self.job.all(StepCommitted)
        return steps[-1].step if steps else 0

    def _members_before(self, since: int) -> tuple[str, ...]:
        generations = [e for e in self.job.events[:since] if isinstance(e, GenerationStarted)]
        return generations[-1].members

    # ---- the result ----

    def report(self) -> int:
        """Print the tables; return 1 if a step, a sample or a survivor was lost."""
        everything = [value for tally in self.tallies.values() for value in tally.down]
        print(f"\nmedian step {self.median_step() * 1e3:.0f} ms; down less the median step, seconds:")
        for kind, tally in self.tallies.items():
            print(f"  {kind:20s} {format_spread(tally.down)}")
        print(f"  {'all':20s} {format_spread(everything)}")
        print(f"  joiner's stall       {format_spread(self.stalls)}")
        recoveries = [e for e in self.job.all(Recovered) if e.action == "shrink"]
        print("parts of a recovery, seconds:")
        print(f"  detected after       {format_spread(self.detected_s)}")
        for part in ("decide_s", "regroup_s", "redo_s"):
            print(f"  {part[:-2]:20s} {format_spread([getattr(each, part) for each in recoveries])}")
        print(self.watch.report())
        wrong = self.find_losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0

    def find_losses(self) -> list[str]:
        """Check that no step, sample or survivor was lost."""
        steps = self.job.all(StepCommitted)
        wrong = [f"steps {a.step} -> {b.step}" for a, b in itertools.pairwise(steps) if b.step != a.step + 1]
        wrong += [f"step {e.step} has {e.samples} samples" for e in steps if e.samples != steps[0].samples]
        wrong += [f"rolled back to {e.to_step}" for e in self.job.all(RolledBack)]
        wrong += [
            f"survivor {e.node} failed: {e.kind} {e.detail}"
            for e in self.job.all(FailureDetected)
            if e.node not in self.killed
        ]
        return wrong


def keeps_all_experts(layer: dict[str, list[int]], lost: list[str]) -> bool:
    """Return whether every expert of a layer has a copy on a remaining node."""
    everywhere = {expert for held in layer.values() for expert in held}
    return everywhere == {expert for node, held in layer.items() if node not in lost for expert in held}


def format_spread(values: list[float]) -> str:
    """Format median, extremes and count."""
    if not values:
        return "not measured"
    return f"median {statistics.median(values):.3f} (min {min(values):.3f}..max {max(values):.3f}), {len(values)} runs"


if __name__ == "__main__":
    sys.exit(main())
