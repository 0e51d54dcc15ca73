"""The best pattern of hosts, by branch and bound, for clusters small enough to enumerate every loss of nodes.

The experts take their hosts one after the other, the rarest first. A loss that is fatal so far stays fatal. So a branch
is cut off if its fatal losses already cost more than a known whole pattern. Nodes that hold the same experts so far are
alike: only the number of them that an expert takes matters.

Axes: E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.planning.survival.objective import Objective
from holdfast.planning.survival.pattern import Room
from holdfast.planning.survival.search import Masks, NodeLosses

#: The least improvement of the cost.
_BETTER = 1e-12


class Branches:
    """Searches the room for patterns cheaper than a known one, until its budget of branches is spent."""

    def __init__(self, losses: NodeLosses, objective: Objective, room: Room, budget: int) -> None:
        """Prepare a search of at most about `budget` branches, experts with the fewest possible hosts first."""
        self._losses = losses
        self._objective = objective
        self._order = [int(expert) for expert in room.most.argsort(kind="stable")]
        self._most: list[int] = room.most.tolist()
        self._threshold = room.threshold
        self._budget = budget
        slots: list[int] = room.slots.tolist()
        self._slots = slots
        self._costs: dict[int, float] = {}
        self._best: Masks = ()
        self._cost = 0.0

    def improve(self, masks: Masks, cost: float) -> tuple[Masks, float, bool]:
        """Search from the pattern `masks` of this `cost`.

        Returns:
            The cheapest pattern found, its cost, and whether it is proven that no pattern is cheaper.
        """
        self._best, self._cost = masks, cost
        kinds: dict[tuple[int, int], int] = {}
        for node, slots in enumerate(self._slots):
            kinds[0, slots] = kinds.get((0, slots), 0) | 1 << node
        self._descend(0, kinds, 0, ())
        return self._best, self._cost, self._budget > 0

    def _descend(self, place: int, kinds: dict[tuple[int, int], int], fatal: int, chosen: Masks) -> None:
        """Place the experts from this `place` in the order on, and keep each whole pattern that is the cheapest so far.

        Branches that cost no less than it are cut off, and no more are tried if the budget is spent. `fatal` are the
        losses that are fatal to the hosts already `chosen`.
        `kinds` maps (held experts, free slots) to the nodes of that kind, as bits.
        """
        self._budget -= 1
        if place == len(self._order):
            masks = [0] * len(chosen)
            for expert, mask in zip(self._order, chosen, strict=True):
                masks[expert] = mask
            self._best, self._cost = tuple(masks), self._cost_of(fatal)
            return
        spare = sum(left * nodes.bit_count() for (_, left), nodes in kinds.items())
        spare -= (len(self._order) - place - 1) * self._threshold
        most = min(self._most[self._order[place]], spare)
        branches: list[tuple[float, int, int, int]] = []
        for mask in _candidate_sets(kinds, most):
            if mask.bit_count() >= self._threshold:
                dead = fatal | self._losses.fatal(mask)
                price = self._cost_of(dead)
                if price < self._cost - _BETTER:
                    branches.append((price, -mask.bit_count(), mask, dead))
        for price, _, mask, dead in sorted(branches):
            if self._budget <= 0 or price >= self._cost - _BETTER:
                return
            self._descend(place + 1, _add_expert(kinds, mask, 1 << place), dead, (*chosen, mask))

    def _cost_of(self, fatal: int) -> float:
        """Return the cost of these fatal losses, from the cache if known."""
        known = self._costs.get(fatal)
        if known is None:
            known = self._costs[fatal] = self._objective.cost(self._losses.share(fatal))
        return known


def _candidate_sets(kinds: dict[tuple[int, int], int], most: int) -> Iterator[int]:
    """Yield one set of up to `most` nodes with room for each combination of numbers of nodes per kind."""
    found = [0]
    for (_, left), nodes in kinds.items():
        if left:
            firsts = [0]
            while nodes:
                lowest = nodes & -nodes
                firsts.append(firsts[-1] | lowest)
                nodes ^= lowest
            found = [mask | first for mask in found for first in firsts if (mask | first).bit_count() <= most]
    yield from found


def _add_expert(kinds: dict[tuple[int, int], int], mask: int, expert: int) -> dict[tuple[int, int], int]:
    """Return the kinds of nodes after the nodes of `mask` got one more `expert`, a bit."""
    after: dict[tuple[int, int], int] = {}
    for (held, left), nodes in kinds.items():
        if nodes & ~mask:
            after[held, left] = nodes & ~mask
        if nodes & mask:
            after[held | expert, left - 1] = nodes & mask
    return after
