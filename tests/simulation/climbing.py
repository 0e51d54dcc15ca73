"""Simulated hierarchical collectives (see planning.levels); each level is a group that can fail separately.

A rank carries its partial result from one level to the next. If it dies or leaves between two levels, only the ranks
that depend on it at higher levels are blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec.structs import replace

from holdfast.planner.fleet.timeline import Timeline
from holdfast.planning.levels import compute_levels
from holdfast.protocol.plan import GenerationPlan
from tests.simulation.collectives import Group, Rank, Underway
from tests.simulation.faults.troubles import DataPlane

#: The kinds that are sums; an expert transfer can go from any rank to any other.
_LEVELED = ("reduce", "vote")

Combine = Callable[[dict[str, Any]], Any]
#: Returns whether a rank that completed a level goes on to the next.
Climbs = Callable[[str, Underway], bool]


class Climb:
    """One rank's path up through the levels of a collective, and down again until it receives the result.

    On each level it acts as the rank.
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
        """Start below the lowest level.

        Args:
            rank: The rank that takes part.
            groups: The rank's groups, lowest level first, with the number of owners of each.
            levels: The number of levels; with fewer groups, the rank is not an owner on its last level.
            kind: The kind of the collective.
            step: The step of the collective.
            combine: Computes the result from the payloads of all ranks, by rank id.
            climbs: Returns whether the rank goes on to the next level.
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
        """Join the collective with this rank's payload."""
        self._issue({self.id: payload})

    @property
    def value(self) -> Any:
        """The result, or None if it is not available yet."""
        value = self._current.value if self._current is not None and self._is_last else None
        return None if value is None else self._made_of(value)

    def leave(self, worker: str) -> None:
        """Leave the collective."""
        self._left = True
        if self._current is not None:
            self._current.leave(worker)

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        """Run an action in the rank's process."""
        self._rank.deliver(action, *args)

    def operation_done(self, operation: Underway, value: Any) -> None:
        """Handle the completion of a level."""
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
        """Handle the failure of a level."""
        if operation is self._current and not self._left:
            self._rank.operation_failed(self)

    def _issue(self, known: Any) -> None:
        if not self._left:
            group, kind, together = self._stages[self._number]
            self._current = group.issue(self, kind, self._step, known, together)

    def _made_of(self, value: Any) -> Any:
        """Return the payloads from a level, or the final result, or None if the rank must wait for the result."""
        if self._number != self._highest:
            return value
        return self._combine(value) if self._reaches_all else None

    @property
    def _is_last(self) -> bool:
        return self._number + 1 == len(self._stages)


class LeveledGroup(Group):
    """The communicator of one generation, with hierarchical sums."""

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
        #: The groups of each worker, lowest level first, with their number of owners.
        self._groups: dict[str, list[tuple[Group, int]]] = {}
        for rank, member in enumerate(plan.members):
            levels = compute_levels(nodes, rank, flat_up_to=1, fan_out=fan_out)
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
