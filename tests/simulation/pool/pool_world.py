"""The shared world of a simulated pool: time, randomness, network and disks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from holdfast.planner.fleet.timeline import Timeline
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import PoolRecord
from holdfast.protocol.pool.sharing import JobStanding
from tests.simulation.pool.pool_plans import PoolPlan

BEGIN = 1_000_000.0


class Crash(Exception):
    """The process dies before its write."""


@dataclass(frozen=True, slots=True)
class NodeComes:
    """A node's first message to a job, with its grant."""

    node: str
    grant: int


class LineEnd(Protocol):
    """A process at one end of a line."""

    up: bool

    def on_message(self, line: Line, message: Any) -> None: ...

    def lost(self, line: Line) -> None: ...


@dataclass(slots=True)
class PoolDisk:
    """The pool's store and journal."""

    version: int = 0
    record: PoolRecord | None = None
    journal: list[AnyPoolEvent] = field(default_factory=list[AnyPoolEvent])


@dataclass(slots=True)
class JobDisk:
    """The durable state of one job."""

    spec: JobSpec
    held: Held
    #: The completed work, in seconds of one node.
    done_s: float = 0.0
    begun_at: float = 0.0
    #: The joining standbys, and the node that each replaces.
    joining: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def standing(self) -> JobStanding:
        """The job's state in its record."""
        return self.held.standing


class PoolWorld:
    """Time, randomness, partitions, disks and the number of writes of each process."""

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan
        self.timeline = Timeline(BEGIN)
        self.rng = Random(f"pool world {plan.seed}")
        self.disk = PoolDisk()
        self.job_disks: dict[tuple[str, int], JobDisk] = {}
        #: The number of current faults that separate each pair.
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._writes: Counter[str] = Counter()
        self.quiet = False
        self.story: list[str] = []

    @property
    def now(self) -> float:
        """Virtual unix seconds."""
        return self.timeline.now

    def later(self, least: float, most: float, action: Callable[..., object], *args: Any) -> None:
        """Run an action after a random delay between `least` and `most`."""
        self.timeline.after(self.rng.uniform(least, most), action, *args)

    def writing(self, who: str) -> None:
        """Count a write that is about to happen.

        Raises:
            Crash: The process dies before this write.
        """
        self._writes[who] += 1
        if not self.quiet and self._writes[who] in self.plan.crashes.get(who, ()):
            self.note(f"{who} dies before its write {self._writes[who]}")
            raise Crash(who)

    def block(self, one: str, other: str, by: int = 1) -> None:
        """Add a fault that separates a pair, or remove one if `by` is -1."""
        self._blocked[one, other] += by

    def reaches(self, one: str, other: str) -> bool:
        """Return whether a pair can reach each other."""
        return self._blocked[one, other] <= 0

    def note(self, what: str) -> None:
        """Add a line to the story of this run."""
        self.story.append(f"{self.now - BEGIN:9.3f} {what}")


class Line:
    """A connection, FIFO in each direction; if its ends cannot reach each other, it breaks and both notice."""

    def __init__(self, world: PoolWorld, names: tuple[str, str], ends: tuple[LineEnd, LineEnd]) -> None:
        self._world = world
        self._names = names
        self._ends = ends
        self._arrives = [0.0, 0.0]
        self.open = True

    def send(self, sender: LineEnd, message: Any) -> None:
        """Send a message to the other end; it may be lost."""
        if self.open:
            to = 1 if sender is self._ends[0] else 0
            timeline = self._world.timeline
            at = max(self._arrives[to], timeline.now + self._world.rng.uniform(0.001, 0.05))
            self._arrives[to] = at
            timeline.at(at, self._arrive, to, message)

    def cut(self) -> None:
        """Break the connection and lose its messages; each end notices after its own delay."""
        if self.open:
            self.open = False
            for end in self._ends:
                self._world.later(0.01, 4.0 if self._world.rng.random() < 0.3 else 0.1, self._notice, end)

    def _arrive(self, to: int, message: Any) -> None:
        if self.open and not (self._world.reaches(*self._names) and self._ends[to].up):
            self.cut()
        if self.open:
            self._ends[to].on_message(self, message)

    def _notice(self, end: LineEnd) -> None:
        if end.up:
            end.lost(self)
