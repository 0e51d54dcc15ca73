"""The best placement: at least as good as MRO and spread, jointly over all layers, and steady as loads drift.

It looks for one pattern of hosts that fits every layer (`pattern.py`): node groups in every arrangement worth a try
and, where the experts do not fill whole groups (there MRO is not optimal: ERRATA, Lazarus 1), patterns improved by
hill climbing (`search.py`). Each layer then maps its experts to the pattern's rows, and what replicas are left fill the
free slots. MRO and spread compete on equal terms. Among patterns that survive alike, the one is taken that gives the
nodes the most even work (`even.py`).
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices, put_rows
from holdfast.planning.even import even_rows, idleness
from holdfast.planning.fill import deal
from holdfast.planning.keep import deal_keeping, rows_for_experts
from holdfast.planning.migration import assign_roles, node_kinds
from holdfast.planning.mro import Mro
from holdfast.planning.objective import Objective, default_weights
from holdfast.planning.pattern import Room, common_pattern, complete, group_patterns, trim
from holdfast.planning.placement import PlacementProblem
from holdfast.planning.racks import over_racks
from holdfast.planning.recovery import RecoveryCurve, recovery_curve
from holdfast.planning.search import SEARCH_UP_TO_NODES, Climber, Losses, as_masks, as_pattern
from holdfast.planning.spread import Spread

#: Patterns tried per search (few on larger clusters, to stay near 10 ms), patterns it starts from, and restarts.
_BUDGET_SMALL, _BUDGET = 3000, 300
_SMALL_NODES = 6
_STARTS = 6
_KICKS = 6
#: Random orders of loss where recovery cannot be computed exactly; enough to tell strategies apart.
_SAMPLES = 2000
#: Recovery of equal worth may differ by this.
_ROUNDING = 1e-9
#: Weighted recovery that is not worth a search.
_NEGLIGIBLE = 2e-3


class Best:
    """Pattern search, with MRO and spread as its floor."""

    name = "best"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`."""
        losses = Losses(problem.nodes) if problem.nodes <= SEARCH_UP_TO_NODES else None
        bound = np.ones(problem.nodes + 1) if losses is None else _upper_bound(problem, losses)
        rivals = [Mro().place(problem)]
        curves = [recovery_curve(rivals[0], samples=_SAMPLES)]
        if (curves[0].probability < bound - _ROUNDING).any():
            rivals.append(Spread().place(problem))
            curves.append(recovery_curve(rivals[1], samples=_SAMPLES))
        objective = _objective(problem, curves)
        pattern, value = _best_pattern(problem, rivals, objective, losses, bound)
        if problem.racks is not None:
            pattern = over_racks(pattern, problem.slots, problem.racks, problem.fault_threshold)
        pattern = trim(pattern, problem.fault_threshold)
        if problem.loads is not None:
            pattern = even_rows(pattern, idleness(problem.loads, problem.replicas, problem.by_rank), problem.slots)
        own = build(problem, pattern)
        if problem.racks is not None:
            # Racks come before nodes, and the rivals know none.
            return own
        values = [objective.value(curve.probability) for curve in curves]
        if losses is None:
            # Sampled, patterns and placements are compared on their own samples.
            value = objective.value(recovery_curve(own, samples=_SAMPLES).probability)
        # Own hosts all that the pattern does. Recovery of equal worth differs by rounding only.
        if value >= max(values) - _ROUNDING:
            return own
        return rivals[int(np.argmax(values))]


def _objective(problem: PlacementProblem, rivals: list[RecoveryCurve]) -> Objective:
    """Never below a rival where it matters: at all weighted counts if users weigh, else below f + 2 lost nodes."""
    floor = np.max([curve.low for curve in rivals], axis=0)
    weights = problem.failure_weights
    if weights is None:
        weights = default_weights(problem.nodes)
        matters = indices(problem.nodes + 1) < problem.fault_threshold + 2
    else:
        matters = weights > 0
    return Objective(weights=weights, floor=np.where(matters, floor, 0.0))


def _best_pattern(
    problem: PlacementProblem, rivals: list[IntArray], objective: Objective, losses: Losses | None, bound: FloatArray
) -> tuple[BoolArray, float]:
    """Return the pattern `[E, N]` of the highest value, rows by rank, and that value; no recovery exceeds *bound*."""
    profile = np.minimum(problem.ranked_replicas.min(axis=0), problem.nodes)
    room = Room(most=profile, threshold=problem.fault_threshold, slots=problem.slots)
    curve_of = _pattern_curve if losses is None else losses.curve_of
    # MRO comes first: among equals it stays.
    starts = [common_pattern(counts, problem.by_rank) for counts in rivals] + group_patterns(profile, problem.slots)
    whole = [complete(start, room) for start in starts]
    valued = [(objective.value(curve_of(pattern)), pattern) for pattern in whole if pattern is not None]
    valued.sort(key=lambda pair: -pair[0])
    value, pattern = valued[0]
    if losses is None or objective.value(bound) - value < _NEGLIGIBLE:
        return pattern, value
    budget = _BUDGET_SMALL if problem.nodes <= _SMALL_NODES else _BUDGET
    climber = Climber(losses, objective, room, budget)
    climbed = [climber.climb(as_masks(start)) for _, start in valued[:_STARTS]]
    best = max(climbed, key=lambda pair: pair[1])
    masks, value = climber.explore(*best, kicks=_KICKS)
    if value < 0:
        # Below a rival where it matters (seen with uneven slots only): worth the time of a longer search.
        masks, value = Climber(losses, objective, room, _BUDGET_SMALL).explore(masks, value, kicks=10 * _KICKS)
    return as_pattern(masks, problem.nodes), value


def _pattern_curve(pattern: BoolArray) -> FloatArray:
    return recovery_curve(pattern.astype(np.int64), samples=_SAMPLES).probability


def _upper_bound(problem: PlacementProblem, losses: Losses) -> FloatArray:
    """Return a recovery curve `[N + 1]` that no placement exceeds: that of the full groups alone.

    MRO is optimal for experts that fill whole groups, and more experts only make it harder. A model is no better than
    its worst layer.
    """
    slots = int(problem.slots.max())
    full = problem.replicas.shape[1] // slots * slots
    if not full or (problem.slots != slots).any():
        return np.ones(problem.nodes + 1)
    rarest = np.unique(problem.ranked_replicas[:, :full:slots], axis=0)
    ends = np.cumsum(rarest, axis=1)[:, :, None]
    position = indices(problem.nodes)
    patterns = (position >= ends - rarest[:, :, None]) & (position < ends)
    return np.min([losses.curve_of(pattern) for pattern in patterns], axis=0)


def build(problem: PlacementProblem, pattern: BoolArray) -> IntArray:
    """Return a placement `[L, E, N]` in which every layer follows the *pattern* `[E, N]`, rows by rank.

    Where nodes hold experts already, the pattern's columns go to the nodes, and its rows to the experts, that
    have to move the fewest.
    """
    hosts = np.empty((problem.replicas.shape[0], *pattern.shape), dtype=np.bool_)
    put_rows(hosts, problem.by_rank, pattern)
    held = problem.previous_hosts
    if held is None:
        return deal(hosts.astype(np.int64), problem.replicas, problem.slots)
    kinds = node_kinds(problem.slots, problem.racks)
    roles = assign_roles(held, hosts, kinds=kinds)
    pattern = np.take(pattern, roles, axis=1)
    rows = rows_for_experts(pattern, problem.replicas, held)
    roles = assign_roles(held, pattern[rows], kinds=kinds)
    if (roles != indices(problem.nodes)).any():
        pattern = np.take(pattern, roles, axis=1)
        rows = rows_for_experts(pattern, problem.replicas, held)
    return deal_keeping(pattern, rows, problem.replicas, problem.slots, held)
