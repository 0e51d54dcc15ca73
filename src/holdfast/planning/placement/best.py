"""The best placement: at least as good as MRO and spread, jointly over all layers, and steady as loads drift.

It looks for one pattern of hosts that fits every layer (`pattern.py`): node groups in every arrangement worth a try
and, where the experts do not fill whole groups (there MRO is not optimal: ERRATA, Lazarus 1), patterns improved by
hill climbing (`search.py`). Each layer then maps its experts to the pattern's rows, and what replicas are left fill the
free slots. MRO and spread compete on equal terms. Among patterns that survive alike, the one is taken that gives the
nodes the most even work (`even.py`).

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.balance.even import even_sets, idleness
from holdfast.planning.placement.build import build
from holdfast.planning.placement.groups import best_groups
from holdfast.planning.placement.mro import Mro
from holdfast.planning.placement.racks import over_racks
from holdfast.planning.placement.spread import Spread
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.branches import Branches
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.objective import Objective, default_weights, no_worse
from holdfast.planning.survival.pattern import Room, common_pattern, complete, group_patterns, trim
from holdfast.planning.survival.recovery_probability import FatalShare, fatal_share
from holdfast.planning.survival.search import SEARCH_UP_TO_NODES, Climber, NodeLosses, as_masks, as_pattern

#: Patterns tried per search (few on larger clusters, to stay near 10 ms), patterns it starts from, and restarts.
_BUDGET_SMALL, _BUDGET = 3000, 300
_SMALL_NODES = 6
_STARTS = 6
_KICKS = 6
#: Branches looked at after that. Up to so many nodes they are all there are but for large tables (8 ms on average).
_BRUTE_UP_TO_NODES = 7
_BRANCHES_SMALL, _BRANCHES = 3000, 300
#: Equal shares of fatal losses may differ by this, on few nodes.
_ROUNDING = 1e-9
#: Weighted losses that are not worth a search.
_NEGLIGIBLE = 1e-6


class Best:
    """Pattern search, with MRO and spread as its floor."""

    name = "best"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`."""
        groups = best_groups(problem) if problem.nodes > SEARCH_UP_TO_NODES else None
        if groups is not None:
            return build(problem, _evened(problem, groups))
        losses = NodeLosses(problem.nodes) if problem.nodes <= SEARCH_UP_TO_NODES else None
        least = np.zeros(problem.nodes + 1) if losses is None else _least_fatal(problem, losses)
        rivals = [_Rival.of(Mro().place(problem), losses)]
        if (rivals[0].fatal.most > least + _ROUNDING).any():
            rivals.append(_Rival.of(Spread().place(problem), losses))
        objective = _objective(problem, rivals)
        pattern, cost = _best_pattern(problem, rivals, objective, losses, least)
        if problem.racks is not None:
            pattern = over_racks(pattern, problem.slots, problem.racks, problem.fault_threshold)
        own = build(problem, _evened(problem, trim(pattern, problem.fault_threshold)))
        if problem.racks is not None or problem.failure_rates is not None:
            # The rivals know neither racks nor rates.
            return own
        if losses is None and not _no_worse_than(rivals, objective, cost):
            # Its replicas beyond the pattern may make up for what the pattern lacks.
            cost = objective.cost(fatal_share(own > 0).most)
        if _no_worse_than(rivals, objective, cost):
            return own
        return _better(rivals, objective).counts


def _evened(problem: PlacementProblem, pattern: BoolArray) -> BoolArray:
    """Return the pattern `(E, N)` with each of its host sets for as many experts as evens out the nodes' work."""
    if problem.loads is None:
        return pattern
    return even_sets(pattern, idleness(problem.loads, problem.replicas, problem.by_rank), problem.slots)


@dataclass(frozen=True, slots=True)
class _Rival:
    """A placement `(L, E, N)` that the best one must not be worse than."""

    counts: IntArray
    fatal: FatalShare

    @classmethod
    def of(cls, counts: IntArray, losses: NodeLosses | None) -> _Rival:
        if losses is None:
            return cls(counts, fatal_share(counts > 0))
        share = losses.share_of(smallest_sets(counts > 0))
        return cls(counts, FatalShare(least=share, most=share))


def _no_worse_than(rivals: list[_Rival], objective: Objective, cost: float) -> bool:
    """Whether this `cost`, at the most, is no greater than any rival's at the least."""
    return all(no_worse(cost, objective.cost(rival.fatal.least)) for rival in rivals)


def _better(rivals: list[_Rival], objective: Objective) -> _Rival:
    """Return the first rival, MRO, unless a later one is surely better."""
    chosen = rivals[0]
    for rival in rivals[1:]:
        if not no_worse(objective.cost(chosen.fatal.least), objective.cost(rival.fatal.most)):
            chosen = rival
    return chosen


def _objective(problem: PlacementProblem, rivals: list[_Rival]) -> Objective:
    """Never worse than a rival where it matters: at all weighted counts if users weigh, else below f + 2 lost nodes."""
    ceiling = np.min([rival.fatal.most for rival in rivals], axis=0)
    weights = problem.failure_weights
    if weights is None:
        weights = default_weights(problem.nodes)
        matters = indices(problem.nodes + 1) < problem.fault_threshold + 2
    else:
        matters = weights > 0
    return Objective(weights=weights, ceiling=np.where(matters, ceiling, 1.0))


def _best_pattern(
    problem: PlacementProblem, rivals: list[_Rival], objective: Objective, losses: NodeLosses | None, least: FloatArray
) -> tuple[BoolArray, float]:
    """Return the pattern `(E, N)` of the lowest cost, rows by rank, and that cost.

    No placement has a smaller share of fatal losses than `least` `(N + 1,)`. Without `losses` to look at, the cost is
    what the pattern has at the most.
    """
    profile = np.minimum(problem.ranked_replicas.min(axis=0), problem.nodes)
    room = Room(most=profile, threshold=problem.fault_threshold, slots=problem.slots)
    fatal_of = _most_fatal if losses is None else losses.share_of
    # MRO comes first: among equals it stays.
    starts = [common_pattern(rival.counts, problem.by_rank) for rival in rivals]
    starts += group_patterns(profile, problem.slots)
    whole = [complete(start, room) for start in starts]
    costed = [(objective.cost(fatal_of(pattern)), pattern) for pattern in whole if pattern is not None]
    costed.sort(key=lambda pair: pair[0])
    cost, pattern = costed[0]
    if losses is None or cost - objective.cost(least) < _NEGLIGIBLE:
        return pattern, cost
    budget = _BUDGET_SMALL if problem.nodes <= _SMALL_NODES else _BUDGET
    climber = Climber(losses, objective, room, budget)
    climbed = [climber.climb(as_masks(start)) for _, start in costed[:_STARTS]]
    best = min(climbed, key=lambda pair: pair[1])
    masks, cost = climber.explore(*best, kicks=_KICKS)
    if cost > 1:
        # Worse than a rival where it matters (seen with uneven slots only): worth the time of a longer search.
        masks, cost = Climber(losses, objective, room, _BUDGET_SMALL).explore(masks, cost, kicks=10 * _KICKS)
    budget = _BRANCHES_SMALL if problem.nodes <= _BRUTE_UP_TO_NODES else _BRANCHES
    masks, cost, _ = Branches(losses, objective, room, budget).improve(masks, cost)
    return as_pattern(masks, problem.nodes), cost


def _most_fatal(pattern: BoolArray) -> FloatArray:
    return fatal_share(pattern).most


def _least_fatal(problem: PlacementProblem, losses: NodeLosses) -> FloatArray:
    """Return a share of fatal losses `(N + 1,)` that no placement goes below: that of the full groups alone.

    MRO is optimal for experts that fill whole groups, and more experts only make it harder. A model is no better than
    its worst layer.
    """
    slots = int(problem.slots.max())
    full = problem.replicas.shape[1] // slots * slots
    if not full or (problem.slots != slots).any():
        return np.zeros(problem.nodes + 1)
    rarest = np.unique(problem.ranked_replicas[:, :full:slots], axis=0)
    ends = np.cumsum(rarest, axis=1)[:, :, None]
    position = indices(problem.nodes)
    patterns = (position >= ends - rarest[:, :, None]) & (position < ends)
    return np.max([losses.share_of(pattern) for pattern in patterns], axis=0)
