"""Faults of a node, or between nodes, while all processes live: late messages, bad disks, a partitioned data plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from holdfast.planner.fleet.timeline import Timeline

#: factors by which the workers of a slow node take longer; the least one does not count as slow
SLOWER = (1.05, 1.2, 1.5, 2.0)


@dataclass(slots=True)
class Troubles:
    """The faults of one node, with the times until which they last, in seconds. They outlive the node's processes."""

    #: its workers' listener threads do not run
    deaf_until: float = 0.0
    #: its messages to the coordinator are delayed, and those from the coordinator
    up_until: float = 0.0
    down_until: float = 0.0
    #: how far its wall clock was set
    wall_off_s: float = 0.0
    #: no checkpoint can be written
    full_until: float = 0.0
    #: no part of a snapshot can be written
    memory_full_until: float = 0.0
    #: writes and renames of checkpoints end no sooner
    slow_until: float = 0.0
    #: until when its workers compute more slowly, and by which factor
    work_until: float = 0.0
    work_times: float = 1.0

    def slowed(self, times: float, until: float) -> None:
        """Slow its workers down by this factor until the given time."""
        self.work_times, self.work_until = times, until

    def longer(self, now: float) -> float:
        """Return the factor by which its workers take longer than others."""
        return self.work_times if now < self.work_until else 1.0


@dataclass(slots=True)
class Partition:
    """A partition: no data passes between the nodes of `side` and the nodes of `other`."""

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
    """Connections from some nodes to others fail: they are refused, or get no answer. Process groups still form."""

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
    """Which nodes reach each other with collectives and state. All nodes reach the coordinator at all times."""

    #: increases whenever a partition begins or heals
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
        """Whether any connections fail in one direction."""
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
        """Call `action` after the next partition has healed."""
        self._waiting.append(action)

    def _heal(self, partition: Partition) -> None:
        self._partitions.remove(partition)
        self.version += 1
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
