"""Collectives that go level by level (see planning.levels), each level a group of its own with all that can befall it.

A rank carries what it has from one level to the next itself: who dies or leaves in between holds up those who need it
higher up, and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec.structs import replace

from holdfast.planner.fleet.timeline import Timeline
from holdfast.planning.levels import levels_of
from holdfast.protocol.plan import GenerationPlan
from tests.simulation.collectives import Group, Rank, Underway
from tests.simulation.faults.troubles import DataPlane

#: what adds up; experts travel from any rank to any other
_LEVELED = ("reduce", "vote")

Combine = Callable[[dict[str, Any]], Any]
#: A rank has a level behind it; True where it goes on to the next.
Climbs = Callable[[str, Underway], bool]


class Climb:
    """One rank's way through the levels of a collective, and down again where it waits to be told the result.

    On each level it stands for the rank.
    """

    def __init__(
        self,
        rank: Rank,
        groups: list[tuple[Group, int]],
        levels: int,
        kind: str,
        step: int,
        combine: Combine,
        climbs: Climbs,
    ) -> None:
        """Stand before the lowest level.

        Args:
            groups: the rank's groups, lowest level first, and how many owners each has.
            levels: how many there are; with fewer groups, the rank is no owner on its last level.
            combine: makes the result of everybody's payloads, by rank id.
        """
        self.id = rank.id
        self._rank = rank
        self._step = step
        self._combine = combine
        self._climbs = climbs
        up = [(group, kind, _united) for group, _ in groups]
        down = [(group, f"{kind}, told", _told) for group, owners in reversed(groups) if group.size > owners]
        self._stages = up + down
        self._highest = len(up) - 1
        self._reaches_all = len(groups) == levels
        self._number = 0
        self._current: Underway | None = None
        self._left = False

    def start(self, payload: Any) -> None:
        """Take part."""
        self._issue({self.id: payload})

    @property
    def value(self) -> Any:
        """The result, once it can be here; None before."""
        value = self._current.value if self._current is not None and self._is_last else None
        return None if value is None else self._made_of(value)

    def leave(self, worker: str) -> None:
        """The rank leaves the collective."""
        self._left = True
        if self._current is not None:
            self._current.leave(worker)

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        """Let something happen in the rank's process."""
        self._rank.deliver(action, *args)

    def operation_done(self, operation: Underway, value: Any) -> None:
        """A level is behind the rank."""
        if operation is not self._current or self._left:
            return
        known = self._made_of(value)
        if self._is_last:
            self._rank.operation_done(self, known)
        elif self._climbs(self.id, self):
            self._number += 1
            self._current = None
            self._rank.deliver(self._issue, known)

    def operation_failed(self, operation: Underway) -> None:
        """A level has ended with an error."""
        if operation is self._current and not self._left:
            self._rank.operation_failed(self)

    def _issue(self, known: Any) -> None:
        if not self._left:
            group, kind, together = self._stages[self._number]
            self._current = group.issue(self, kind, self._step, known, together)

    def _made_of(self, value: Any) -> Any:
        """Return what a level has brought the rank: others' payloads, or at last the result; None: it is to be told."""
        if self._number != self._highest:
            return value
        return self._combine(value) if self._reaches_all else None

    @property
    def _is_last(self) -> bool:
        return self._number + 1 == len(self._stages)


class LeveledGroup(Group):
    """The communicator of one generation, where what adds up goes level by level."""

    def __init__(
        self,
        plan: GenerationPlan,
        timeline: Timeline,
        rng: Random,
        duration: tuple[float, float],
        data_plane: DataPlane,
        *,
        fan_out: int,
        climbs: Climbs,
    ) -> None:
        super().__init__(plan, timeline, rng, duration, data_plane)
        self._climbs = climbs
        made: dict[tuple[int, tuple[int, ...]], Group] = {}
        nodes = [member.node for member in plan.members]
        #: of each worker, its groups, lowest level first, with their owners
        self._groups: dict[str, list[tuple[Group, int]]] = {}
        for rank, member in enumerate(plan.members):
            levels = levels_of(nodes, rank, flat_up_to=1, fan_out=fan_out)
            self._levels = len(levels.owners)
            own = self._groups[member.worker] = []
            for number, (ranks, owners) in enumerate(zip(levels.groups, levels.owners, strict=False)):
                if (number, ranks) not in made:
                    part = replace(plan, members=tuple(plan.members[other] for other in ranks))
                    made[number, ranks] = Group(part, timeline, rng, duration, data_plane)
                own.append((made[number, ranks], owners))

    def issue(
        self, rank: Rank, kind: str, step: int, payload: Any, combine: Callable[[Iterable[Any]], Any]
    ) -> Underway:
        if kind not in _LEVELED:
            return super().issue(rank, kind, step, payload, combine)

        def result(known: dict[str, Any]) -> Any:
            return combine(known[worker] for worker in self.plan.workers)

        climb = Climb(rank, self._groups[rank.id], self._levels, kind, step, result, self._climbs)
        climb.start(payload)
        return climb

    def fail(self, worker: str) -> None:
        super().fail(worker)
        for group, _ in self._groups[worker]:
            group.fail(worker)

    def glitch(self, worker: str) -> bool:
        struck = [group.glitch(worker) for group, _ in self._groups[worker]]
        return super().glitch(worker) or any(struck)

    def stall(self, worker: str) -> None:
        super().stall(worker)
        for group, _ in self._groups[worker]:
            group.stall(worker)

    def unstall(self, worker: str) -> None:
        super().unstall(worker)
        for group, _ in self._groups[worker]:
            group.unstall(worker)


def _united(shares: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {worker: payload for share in shares for worker, payload in share.items()}


def _told(results: Iterable[Any]) -> Any:
    return next(result for result in results if result is not None)
