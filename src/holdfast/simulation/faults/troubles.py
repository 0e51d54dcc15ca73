"""What can be wrong with a node, or between nodes, while all processes live: late messages, a bad disk,
and a data plane that is parted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.simulation.clock import Timeline


@dataclass(slots=True)
class Troubles:
    """One node's: times until which something is wrong with it, in seconds; it outlives the node's processes."""

    #: its workers' listener threads get no turn
    deaf_until: float = 0.0
    #: what it says to the coordinator, and what it is told, is held up
    up_until: float = 0.0
    down_until: float = 0.0
    #: no checkpoint can be written
    full_until: float = 0.0
    #: writing and renaming a checkpoint end no sooner
    slow_until: float = 0.0


@dataclass(slots=True)
class Partition:
    """Nodes that others cannot reach: no data passes between a side and all others, or only one other."""

    side: frozenset[str]
    #: None: everybody else
    other: frozenset[str] | None

    def parts(self, one: str, two: str) -> bool:
        """Tell whether two nodes are kept apart."""
        return self._across(one, two) or self._across(two, one)

    def _across(self, one: str, two: str) -> bool:
        return one in self.side and (two not in self.side if self.other is None else two in self.other)


@dataclass(slots=True)
class DataPlane:
    """Who reaches whom with collectives and state. The coordinator is reached by everybody all the time."""

    _partitions: list[Partition] = field(default_factory=list[Partition])
    _waiting: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    def part(self, timeline: Timeline, partition: Partition, heals_after_s: float | None) -> None:
        """Keep nodes apart, for a time or for good."""
        self._partitions.append(partition)
        if heals_after_s is not None:
            timeline.after(heals_after_s, self._heal, partition)

    def parted(self, nodes: Iterable[str]) -> bool:
        """Tell whether some of these nodes cannot reach each other."""
        if not self._partitions:
            return False
        names = sorted(set(nodes))
        return any(
            partition.parts(one, two)
            for partition in self._partitions
            for place, one in enumerate(names)
            for two in names[place + 1 :]
        )

    def reaches(self, one: str, others: Iterable[str]) -> bool:
        """Tell whether a node reaches all others."""
        return not any(partition.parts(one, other) for partition in self._partitions for other in others)

    def when_healed(self, action: Callable[[], object]) -> None:
        """Try again what could not get through, once something has healed."""
        self._waiting.append(action)

    def _heal(self, partition: Partition) -> None:
        self._partitions.remove(partition)
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
