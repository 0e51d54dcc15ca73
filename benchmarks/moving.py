"""A job whose nodes are moved, killed and drained, for `benchmarks/move.py`: the cost of each and its parts."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from measured_gpt import Attempt, attempts_of, find_first_real
from recovery import SETTLE_STEPS, KillCosts, RecoveryBench, format_spread
from standstill import SuspensionWatch

from holdfast.protocol.events import (
    GenerationStarted,
    NodeMoved,
    NodesJoined,
    Recovered,
    StandbyReady,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

PARTS = ("decide_s", "regroup_s", "transfer_s", "redo_s")
#: Time limit in seconds for a joining node's first recorded step with micro-batches.
FIRST_STEP_S = 30.0
#: Suffix of kinds that are measured by all their steps, less as many median steps, instead of by the longest step.
TOGETHER = ", all steps together"


class FirstStep(msgspec.Struct, frozen=True, kw_only=True):
    """Time per micro-batch in a joining node's first step, relative to the members' median: wall and processor time."""

    own: float
    processor: float


class MoveBench(RecoveryBench):
    """One job whose nodes are moved, killed and drained, and restored to the same number of nodes after each.

    Args:
        script: the training script with its arguments, also used to start standbys.
        folder: of the computation times recorded by `measured_gpt.py`, if that is the script.
    """

    def __init__(
        self,
        job: LocalJob,
        watch: SuspensionWatch,
        rng: random.Random,
        script: Sequence[str],
        folder: Path | None = None,
    ) -> None:
        super().__init__(job, watch, rng)
        self._script = script
        self._folder = folder
        self._agents: list[subprocess.Popen[bytes]] = []
        #: By kind: the parts of recoveries in seconds, the transferred bytes, and the first steps of joining nodes.
        self.parts: dict[str, list[dict[str, float]]] = {}
        self.moved_bytes: dict[str, list[int]] = {}
        self.first_steps: dict[str, list[FirstStep]] = {}
        #: Violations in addition to the losses that are checked for every job.
        self._wrong: list[str] = []

    # ---- events ----

    def move(self, count: int = 1, kind: str = "move") -> None:
        """Replace nodes by standbys; they become standbys."""
        victims, since, at = self.rng.sample(self.job.nodes(), count), len(self.job.events), time.time()
        with self.job.client() as client:
            client.move(victims)
        before = self.job.nodes()
        moved = self._wait_moves(victims, since)
        self._check_places(before, moved)
        self._record_longest(kind, since)
        self._record_parts(kind, since)
        self._record_first_step("warmed", moved[0].to_node, at)

    def replace(self) -> None:
        """Kill a node that has a standby."""
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        before, at = self.job.nodes(), self.kill(victim)
        self.measure_recovery("replaced", at, since, lost=0)
        moved = self.job.wait(NodeMoved, from_node=victim, since=since)
        self._check_places(before, [moved])
        self._record_parts("replaced", since)
        self._record_first_step("warmed", moved.to_node, at)

    def shrink(self) -> None:
        """Kill a node without a standby; then add another one."""
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        at = self.kill(victim)
        self.measure_recovery("shrunk", at, since, lost=1)
        self._record_cold_step(since)

    def drain(self) -> None:
        """Drain a node without a standby; then add another one."""
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        with self.job.client() as client:
            client.drain([victim])
        begun = self.job.wait(GenerationStarted, lambda e: victim not in e.members, since=since)
        self.wait_steps(since=self.job.events.index(begun), steps=3)
        self._record_longest("leave", since)
        self.wait_steps(since=len(self.job.events), steps=SETTLE_STEPS)
        self.add_node()
        self._record_cold_step(since)

    def keep_moving(self, every: int, steps: int) -> float:
        """Move a node every few steps; return the time of as many median steps, as a share of the total time."""
        first = len(self.job.all(StepCommitted))
        for done in range(0, steps, every):
            self.move_once()
            self.wait_steps(since=0, steps=first + done + every - len(self.job.all(StepCommitted)))
        taken = [event.step_s for event in self.job.all(StepCommitted)[first : first + steps]]
        return len(taken) * statistics.median(taken) / sum(taken)

    def move_once(self) -> None:
        """Move a node, and wait until it is a warm standby."""
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        with self.job.client() as client:
            client.move([victim])
        self._wait_moves([victim], since)

    def start_standby(self) -> None:
        """Start a standby, and wait until it is warm."""
        name, since = f"standby-{len(self._agents)}", len(self.job.events)
        options = ("agent", "--standby", "--node-name", name, "--address", self.job.url)
        command = [sys.executable, "-m", "holdfast", *options, *self._script]
        quiet = subprocess.DEVNULL
        self._agents.append(subprocess.Popen(command, env=self.job.environment, stdout=quiet, stderr=quiet))
        self.job.wait(StandbyReady, node=name, since=since)
        self.wait_steps(since=len(self.job.events), steps=2)

    def end_agents(self) -> None:
        """End the agents that were started here."""
        for agent in self._agents:
            agent.kill()
            agent.wait()

    # ---- costs ----

    def _wait_moves(self, leavers: Sequence[str], since: int) -> list[NodeMoved]:
        moved = [self.job.wait(NodeMoved, from_node=leaver, since=since) for leaver in leavers]
        for leaver in leavers:
            self.job.wait(StandbyReady, node=leaver, since=since)
        self.wait_steps(since=len(self.job.events), steps=SETTLE_STEPS)
        return moved

    def _check_places(self, before: Sequence[str], moved: Sequence[NodeMoved]) -> None:
        """Check that all ranks are unchanged, and that each new node has the rank of the node that it replaced."""
        takes = {event.from_node: event.to_node for event in moved}
        wanted, found = tuple(takes.get(node, node) for node in before), self.job.nodes()
        if found != wanted:
            self._wrong.append(f"the nodes by rank are {found}, expected {wanted}")

    def find_losses(self) -> list[str]:
        """Check that no step, sample, survivor or rank was lost."""
        return [*super().find_losses(), *self._wrong]

    def _record_longest(self, kind: str, since: int) -> None:
        """Record the longest step from a request until three steps after it was completed, over all its generations."""
        events = self.job.events[since:]
        ends = [place for place, event in enumerate(events) if isinstance(event, GenerationStarted | NodeMoved)]
        place, left = ends[-1], 3
        while left:
            place += 1
            left -= isinstance(events[place], StepCommitted)
        steps = [event.step_s for event in events[: place + 1] if isinstance(event, StepCommitted)]
        usual = self.median_step()
        self._record(kind, max(steps) - usual)
        # On a noisy machine, the figure above is positive even for undisturbed steps. This one is not.
        self._record(f"{kind}{TOGETHER}", sum(steps) - len(steps) * usual)

    def _record_parts(self, kind: str, since: int) -> None:
        """Record the parts of recoveries since a moment, summed if there were several."""
        found = [event for event in self.job.events[since:] if isinstance(event, Recovered)]
        sums = {part: sum((float(getattr(event, part)) for event in found), 0.0) for part in PARTS}
        self.parts.setdefault(kind, []).append(sums)
        self.moved_bytes.setdefault(kind, []).append(sum(event.moved_bytes for event in found))

    def _record_cold_step(self, since: int) -> None:
        joined = [event for event in self.job.events[since:] if isinstance(event, NodesJoined)][-1]
        self._record_first_step("cold", joined.names[0], joined.time)

    def _record_first_step(self, kind: str, node: str, since: float) -> None:
        """Record a joining node's first step with micro-batches, relative to the median of all members' last ones."""
        if self._folder is None:
            return
        deadline = time.monotonic() + FIRST_STEP_S
        while (first := find_first_real(attempts_of(self._folder, node), since)) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{node} recorded no step with micro-batches within {FIRST_STEP_S:g} s")
            time.sleep(0.05)
        usual = self._usual_attempts()
        own = first.each_s / statistics.median(one.each_s for one in usual)
        processor = first.each_processor_s / statistics.median(one.each_processor_s for one in usual)
        ratios = FirstStep(own=own, processor=processor)
        self.first_steps.setdefault(kind, []).append(ratios)
        print(f"  {kind} joiner's first step with a share: {ratios.own:.2f} times the median", flush=True)

    def _usual_attempts(self) -> list[Attempt]:
        """Return the members' last attempts at steps with micro-batches."""
        assert self._folder is not None
        real: list[Attempt] = []
        for node in self.job.nodes():
            real += [one for one in attempts_of(self._folder, node) if one.micro_batches and not one.shadow][-20:]
        return real

    def _record(self, kind: str, cost_s: float) -> None:
        self.tallies.setdefault(kind, KillCosts()).down.append(cost_s)
        print(f"{kind:20s} less the step {cost_s:6.3f} s", flush=True)

    def costs(self, kind: str) -> tuple[float, ...]:
        """Return the costs of a kind, less the median step, in seconds."""
        return tuple(self.tallies.get(kind, KillCosts()).down)

    # ---- the result ----

    def report(self) -> int:
        """Print the table; return 1 if a step, a sample or a survivor was lost."""
        print(f"\nmedian step {self.median_step() * 1e3:.0f} ms; costs less the median step, seconds:")
        for kind, tally in self.tallies.items():
            print(f"  {kind:20s} {format_spread(tally.down)}")
        print(f"  {'joiner':20s} {format_spread(self.stalls)}")
        for kind, parts in self.parts.items():
            print(f"parts of '{kind}', seconds:")
            for part in PARTS:
                print(f"  {part[:-2]:20s} {format_spread([each[part] for each in parts])}")
        for kind, steps in self.first_steps.items():
            print(f"a {kind} joiner's first step with a share, times the median:")
            print(f"  {'wall time':20s} {format_spread([each.own for each in steps])}")
            print(f"  {'processor time':20s} {format_spread([each.processor for each in steps])}")
        print(self.watch.report())
        wrong = self.find_losses()
        print("lost: " + ("nothing (steps 0, samples 0, survivors 0)" if not wrong else "; ".join(wrong)))
        return 1 if wrong else 0


def remaining_rate(steps: Sequence[StepCommitted], at: float, seconds: float) -> float:
    """Return the samples per second after a moment, relative to the undisturbed rate before it.

    The time runs from the last step before the moment to the first step at least this many seconds after it. It
    consists of full steps and includes the disturbed one. The undisturbed rate uses the median of the last ten steps
    before.
    """
    before = [event for event in steps if event.time <= at]
    end = next(place for place, event in enumerate(steps) if event.time >= at + seconds)
    counted = steps[len(before) : end + 1]
    usual = before[-1].samples / statistics.median(event.step_s for event in before[-10:])
    return sum(event.samples for event in counted) / (counted[-1].time - before[-1].time) / usual
