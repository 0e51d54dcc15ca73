"""The best placement: at least as good as MRO and spread, computed jointly over all layers, and stable as loads drift.

It searches for one pattern of hosts that fits every layer (`pattern.py`). The candidates are node groups in every
arrangement worth a try. If the experts do not fill whole groups, MRO is not optimal (ERRATA, Lazarus 1), and patterns
are improved by hill climbing (`search.py`). Each layer then maps its experts to the pattern's rows, and the remaining
replicas fill the free slots. MRO and spread compete on equal terms. Among patterns that survive equally, the one with
the most even work wins (`even.py`).

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.balance.even import balance_sets, compute_idleness
from holdfast.planning.placement.build import build_placement
from holdfast.planning.placement.groups import best_groups
from holdfast.planning.placement.mro import Mro
from holdfast.planning.placement.racks import spread_over_racks
from holdfast.planning.placement.spread import Spread
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.branches import Branches
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.objective import Objective, default_weights, is_no_worse
from holdfast.planning.survival.pattern import Room, common_pattern, complete_pattern, group_patterns, trim_pattern
from holdfast.planning.survival.recovery_probability import FatalShare, fatal_share
from holdfast.planning.survival.search import SEARCH_UP_TO_NODES, Climber, NodeLosses, as_masks, as_pattern

#: Patterns tried per search: many up to `_SMALL_NODES` nodes, and few on larger clusters, to stay near 10 ms.
_BUDGET_SMALL, _BUDGET = 3000, 300
_SMALL_NODES = 6
#: Patterns that the search starts from.
_STARTS = 6
#: Restarts of the search.
_KICKS = 6
#: Up to this many nodes, branch and bound examines all branches, except in large tables (8 ms on average).
_BRUTE_UP_TO_NODES = 7
#: Branches examined after the search: up to `_BRUTE_UP_TO_NODES` nodes, and with more nodes.
_BRANCHES_SMALL, _BRANCHES = 3000, 300
#: The rounding difference of equal shares of fatal losses, on few nodes.
_ROUNDING = 1e-9
#: Weighted losses that are too small for a search.
_NEGLIGIBLE = 1e-6


class Best:
    """Pattern search with MRO and spread as lower bound."""

    name = "best"

    def place(self, problem: PlacementProblem) -> IntArray:
        """Return the best placement `(L, E, N)` found; see `Strategy.place`.

        It builds on node groups if their sizes prove that these are best on many nodes; else on a searched pattern,
        unless MRO or spread survive more. That comparison is left out with racks or failure rates.
        """
        groups = best_groups(problem) if problem.nodes > SEARCH_UP_TO_NODES else None
        if groups is not None:
            return build_placement(problem, _balance_pattern(problem, groups))
        losses = NodeLosses(problem.nodes) if problem.nodes <= SEARCH_UP_TO_NODES else None
        least = np.zeros(problem.nodes + 1) if losses is None else _fatal_lower_bound(problem, losses)
        rivals = [_Rival.of(Mro().place(problem), losses)]
        if (rivals[0].fatal.most > least + _ROUNDING).any():
            rivals.append(_Rival.of(Spread().place(problem), losses))
        objective = _make_objective(problem, rivals)
        pattern, cost = _search_pattern(problem, rivals, objective, losses, least)
        if problem.racks is not None:
            pattern = spread_over_racks(pattern, problem.slots, problem.racks, problem.fault_threshold)
        own = build_placement(problem, _balance_pattern(problem, trim_pattern(pattern, problem.fault_threshold)))
        if problem.racks is not None or problem.failure_rates is not None:
            # The rivals consider neither racks nor failure rates.
            return own
        if losses is None and not _no_worse_than(rivals, objective, cost):
            # Replicas beyond the pattern may lower the cost: rate the whole placement.
            cost = objective.cost(fatal_share(own > 0).most)
        if _no_worse_than(rivals, objective, cost):
            return own
        return _choose_rival(rivals, objective).counts


def _balance_pattern(problem: PlacementProblem, pattern: BoolArray) -> BoolArray:
    """Return the pattern `(E, N)` with its host sets assigned to experts so that the nodes' work is even.

    Without loads, it is returned unchanged.
    """
    if problem.loads is None:
        return pattern
    return balance_sets(pattern, compute_idleness(problem.loads, problem.replicas, problem.by_rank), problem.slots)


@dataclass(frozen=True, slots=True)
class _Rival:
    """A placement `(L, E, N)` that the best one must not be worse than."""

    counts: IntArray
    fatal: FatalShare

    @classmethod
    def of(cls, counts: IntArray, losses: NodeLosses | None) -> _Rival:
        """Return a placement `(L, E, N)` with its fatal share: exact with `losses`, else only bounds."""
        if losses is None:
            return cls(counts, fatal_share(counts > 0))
        share = losses.share_of(smallest_sets(counts > 0))
        return cls(counts, FatalShare(least=share, most=share))


def _no_worse_than(rivals: list[_Rival], objective: Objective, cost: float) -> bool:
    """Return whether this `cost`, an upper bound, is at most the lower bound of every rival."""
    return all(is_no_worse(cost, objective.cost(rival.fatal.least)) for rival in rivals)


def _choose_rival(rivals: list[_Rival], objective: Objective) -> _Rival:
    """Return the first rival, MRO, unless a later one is certainly better."""
    chosen = rivals[0]
    for rival in rivals[1:]:
        if not is_no_worse(objective.cost(chosen.fatal.least), objective.cost(rival.fatal.most)):
            chosen = rival
    return chosen


def _make_objective(problem: PlacementProblem, rivals: list[_Rival]) -> Objective:
    """Return an objective that penalizes placements worse than a rival, for the numbers of lost nodes that matter.

    If users give weights, these are all numbers with a weight; else all up to `fault_threshold` + 1.
    """
    ceiling = np.min([rival.fatal.most for rival in rivals], axis=0)
    weights = problem.failure_weights
    if weights is None:
        weights = default_weights(problem.nodes)
        matters = indices(problem.nodes + 1) < problem.fault_threshold + 2
    else:
        matters = weights > 0
    return Objective(weights=weights, ceiling=np.where(matters, ceiling, 1.0))


def _search_pattern(
    problem: PlacementProblem, rivals: list[_Rival], objective: Objective, losses: NodeLosses | None, least: FloatArray
) -> tuple[BoolArray, float]:
    """Return the pattern `(E, N)` of the lowest cost found, rows by rank, and that cost.

    The rivals' patterns and node groups are the candidates. With `losses`, the best ones are improved by hill climbing,
    then by branch and bound, unless one already costs as little as `least`.

    `least` `(N + 1,)` is a lower bound of the fatal share of any placement. Without `losses`, the cost is an upper
    bound.
    """
    profile = np.minimum(problem.ranked_replicas.min(axis=0), problem.nodes)
    room = Room(most=profile, threshold=problem.fault_threshold, slots=problem.slots)
    fatal_of = _fatal_upper_bound if losses is None else losses.share_of
    # MRO comes first, so that it wins among equals.
    starts = [common_pattern(rival.counts, problem.by_rank) for rival in rivals]
    starts += group_patterns(profile, problem.slots)
    whole = [complete_pattern(start, room) for start in starts]
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
        # The pattern is worse than a rival, which was seen only with uneven slots. A longer search is worth its time.
        masks, cost = Climber(losses, objective, room, _BUDGET_SMALL).explore(masks, cost, kicks=10 * _KICKS)
    budget = _BRANCHES_SMALL if problem.nodes <= _BRUTE_UP_TO_NODES else _BRANCHES
    masks, cost, _ = Branches(losses, objective, room, budget).improve(masks, cost)
    return as_pattern(masks, problem.nodes), cost


def _fatal_upper_bound(pattern: BoolArray) -> FloatArray:
    """Return an upper bound of the share of fatal losses `(N + 1,)`."""
    return fatal_share(pattern).most


def _fatal_lower_bound(problem: PlacementProblem, losses: NodeLosses) -> FloatArray:
    """Return a lower bound of the fatal share `(N + 1,)` of any placement: the share of the full groups alone. 0 if no
    group is full, or if nodes differ in slots.

    MRO is optimal for experts that fill whole groups, and more experts only reduce survival. A model survives no more
    than its worst layer.
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
