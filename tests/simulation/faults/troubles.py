"""What can be wrong with a node, or between nodes, while all processes live: late messages, a bad disk,
and a data plane that is parted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from holdfast.planner.fleet.timeline import Timeline

#: how many times as long the workers of a slow node compute: from less than counts as slow to twice
SLOWER = (1.05, 1.2, 1.5, 2.0)


@dataclass(slots=True)
class Troubles:
    """One node's: times until which something is wrong with it, in seconds; it outlives the node's processes."""

    #: its workers' listener threads get no turn
    deaf_until: float = 0.0
    #: its messages to and from the coordinator are delayed
    up_until: float = 0.0
    down_until: float = 0.0
    #: how far its wall clock was set
    wall_off_s: float = 0.0
    #: no checkpoint can be written
    full_until: float = 0.0
    #: no part of a snapshot can be written
    memory_full_until: float = 0.0
    #: writing and renaming a checkpoint end no sooner
    slow_until: float = 0.0
    #: the factor by which its workers compute more slowly
    work_until: float = 0.0
    work_times: float = 1.0

    def slowed(self, times: float, until: float) -> None:
        """Slow its workers down by this factor until the given time."""
        self.work_times, self.work_until = times, until

    def longer(self, now: float) -> float:
        """Return how many times as long as others its workers compute."""
        return self.work_times if now < self.work_until else 1.0


@dataclass(slots=True)
class Partition:
    """Nodes that others cannot reach: no data passes between a side and all others, or only one other."""

    side: frozenset[str]
    #: None: all other nodes
    other: frozenset[str] | None

    def cuts_off(self, one: str, others: AbstractSet[str]) -> bool:
        """Return whether a node fails to reach some of the others; as fast for thousands of them as for two."""
        if one in self.side and not (others <= self.side if self.other is None else others.isdisjoint(self.other)):
            return True
        across = one not in self.side if self.other is None else one in self.other
        return across and not others.isdisjoint(self.side)

    def parts(self, nodes: AbstractSet[str]) -> bool:
        """Return whether the partition separates some of these nodes."""
        return any(self.cuts_off(one, nodes) for one in self.side & nodes)


@dataclass(frozen=True, eq=False, slots=True)
class OneWay:
    """Connections from some nodes to others fail: they are refused, or never answered. Groups stand nevertheless."""

    #: None: all other nodes
    senders: frozenset[str] | None
    receivers: frozenset[str] | None
    refused: bool

    def blocks(self, sender: str, receiver: str) -> bool:
        """Return whether a node cannot connect to another."""
        from_here = self.senders is None or sender in self.senders
        return from_here and (self.receivers is None or receiver in self.receivers)


@dataclass(slots=True)
class DataPlane:
    """Which nodes reach each other with collectives and state. All nodes reach the coordinator at all times.

    version: changes with every change.
    """

    version: int = 0
    _partitions: list[Partition] = field(default_factory=list[Partition])
    _waiting: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    _one_way: list[OneWay] = field(default_factory=list[OneWay])

    def block(self, timeline: Timeline, one_way: OneWay, heals_after_s: float | None) -> None:
        """Make connections in one direction fail, temporarily or permanently."""
        self._one_way.append(one_way)
        if heals_after_s is not None:
            timeline.after(heals_after_s, self._one_way.remove, one_way)

    @property
    def one_way(self) -> bool:
        """Whether connections in some direction fail."""
        return bool(self._one_way)

    def blocked(self, sender: str, receiver: str) -> OneWay | None:
        """Return why a node cannot connect to another, None if it can."""
        if sender == receiver:
            return None
        return next((one_way for one_way in self._one_way if one_way.blocks(sender, receiver)), None)

    def part(self, timeline: Timeline, partition: Partition, heals_after_s: float | None) -> None:
        """Separate nodes, temporarily or permanently."""
        self._partitions.append(partition)
        self.version += 1
        if heals_after_s is not None:
            timeline.after(heals_after_s, self._heal, partition)

    def parted(self, nodes: Iterable[str]) -> bool:
        """Return whether some of these nodes cannot reach each other."""
        if not self._partitions:
            return False
        names = frozenset(nodes)
        return any(partition.parts(names) for partition in self._partitions)

    def reaches(self, one: str, others: AbstractSet[str]) -> bool:
        """Return whether a node reaches all others."""
        return not any(partition.cuts_off(one, others) for partition in self._partitions)

    def when_healed(self, action: Callable[[], object]) -> None:
        """Try again what could not get through, once something has healed."""
        self._waiting.append(action)

    def _heal(self, partition: Partition) -> None:
        self._partitions.remove(partition)
        self.version += 1
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
