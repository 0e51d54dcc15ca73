"""Survival against balance: the placements worth a choice, and the choice by a weight.

The fewer groups of nodes share the experts, the fewer losses are fatal. The more nodes share the hot experts, the less
busy is the busiest node. Placements in between have more groups with fewer experts each, and their nodes keep slots for
the hot experts.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.balance.swaps import swap_replicas
from holdfast.planning.balance.work import busiest_over_mean
from holdfast.planning.placement.allocation import Allocation, allocate
from holdfast.planning.placement.best import Best
from holdfast.planning.placement.build import build_placement
from holdfast.planning.placement.fill import deal_by_work
from holdfast.planning.placement.guarantee import enforce_guarantee
from holdfast.planning.placement.racks import spread_over_racks
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.pattern import Room, complete_pattern, disjoint_groups, trim_pattern
from holdfast.planning.survival.recovery_probability import fatal_share

#: The most numbers of groups that are tried.
_MOST_NUMBERS = 12
#: The approximate size of all counts together.
_MOST_CELLS = 1 << 26
#: Differences up to this are rounding errors.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A placement with its fatal losses and the work of its busiest node."""

    name: str
    #: `(L, E, N)` replicas per node.
    counts: IntArray
    #: `(N + 1,)` upper bound of the share of fatal losses of 0..N nodes.
    fatal: FloatArray
    #: The busiest node's work over the mean node's, as the mean over the layers.
    busiest: float

    def fatal_losses(self, weights: FloatArray) -> float:
        """Return the share of losses that are fatal, weighted by the probability of each number of lost nodes."""
        return float(self.fatal @ weights)

    def is_no_worse(self, other: Option) -> bool:
        """Return whether this option survives no less at any number of lost nodes, and is not busier."""
        rounding = _ROUNDING * (1 + other.fatal)
        return self.busiest <= other.busiest + _ROUNDING and bool((self.fatal <= other.fatal + rounding).all())


def find_options(problem: PlacementProblem) -> list[Option]:
    """Return placements from the one that survives most, as found by `Best`, to the one with the most even work.

    They are computed once with the problem's replicas, and once with the replicas that give the busiest replica the
    least work.
    """
    return [
        option
        for replicas in _replica_choices(problem)
        for option in find_options_for_replicas(replace(problem, replicas=replicas))
    ]


def find_options_for_replicas(problem: PlacementProblem) -> list[Option]:
    """Return the placements of `find_options` for the problem's own replicas, most survival first.

    They are that of `Best`, those with more and more node groups, and, without racks, the one with the most even work.
    """
    found = [_make_option("survives most", problem, Best().place(problem))]
    for number, pattern in _find_group_patterns(problem):
        if problem.racks is not None:
            pattern = spread_over_racks(pattern, problem.slots, problem.racks, problem.fault_threshold)
        found.append(_make_option(f"{number} groups", problem, build_placement(problem, pattern)))
    if problem.racks is None:
        found.append(_make_option("even", problem, _place_by_work(problem)))
    return found


def rate_placement(name: str, counts: IntArray, loads: FloatArray, rates: FloatArray | None = None) -> Option:
    """Return a placement `counts` `(L, E, N)` as an option, with its figures for `loads` `(L, E)`.

    `rates` `(N,)` are the failure rates of the nodes; None if nodes are alike.
    """
    fatal = fatal_share(counts > 0, rates).most
    return Option(name=name, counts=counts, fatal=fatal, busiest=float(busiest_over_mean(counts, loads).mean()))


def select_pareto(found: list[Option]) -> list[Option]:
    """Return the options that no other option beats, the least busy first.

    An option beats another one if it is nowhere worse and somewhere better. Of equal options, the first one stays.
    """
    kept: list[Option] = []
    for place, option in enumerate(found):
        beaten = (
            other.is_no_worse(option) and not (option.is_no_worse(other) and place < rival)
            for rival, other in enumerate(found)
            if rival != place
        )
        if not any(beaten):
            kept.append(option)
    return sorted(kept, key=lambda option: option.busiest)


def choose_by_weight(found: list[Option], balance_weight: float, weights: FloatArray | None) -> Option:
    """Return the option with the lowest price; of equals the least busy one, then the first.

    The price is the fatal losses plus `balance_weight` times the busiest node's work over the mean. `weights`
    `(N + 1,)` weight the fatal losses; None for the default weights.
    """
    if weights is None:
        weights = default_weights(found[0].counts.shape[2])

    def price(option: Option) -> tuple[float, float]:
        return round(option.fatal_losses(weights) + balance_weight * option.busiest, 12), option.busiest

    return min(found, key=price)


def choice_weight_ranges(found: list[Option], weights: FloatArray) -> list[tuple[float, float | None] | None]:
    """Return the range of balance weights for which `choose_by_weight` chooses each option.

    An entry is (from, to); `to` is None without an upper limit. The entry is None if no weight chooses the option.
    `weights` `(N + 1,)` weight the numbers of lost nodes.
    """
    reaches: list[tuple[float, float | None] | None] = []
    for option in found:
        low, high = 0.0, np.inf
        for other in found:
            lost = option.fatal_losses(weights) - other.fatal_losses(weights)
            gained = other.busiest - option.busiest
            if gained > 0:
                low = max(low, lost / gained)
            elif gained < 0:
                high = min(high, lost / gained)
        reaches.append(None if low > high else (low, None if np.isinf(high) else float(high)))
    return reaches


def _replica_choices(problem: PlacementProblem) -> list[IntArray]:
    """Return the problem's replicas `(L, E)` and, if the loads are known, the replicas with the least busy replica."""
    if problem.loads is None:
        return [problem.replicas]
    other = allocate(problem.loads, problem.slots, fault_threshold=problem.fault_threshold, least_busy=True)
    assert isinstance(other, Allocation)  # The problem's own replicas fit.
    return [problem.replicas, other.replicas]


def _make_option(name: str, problem: PlacementProblem, counts: IntArray) -> Option:
    """Return an option for `counts` `(L, E, N)`, rated by the problem's work and failure rates."""
    return rate_placement(name, counts, problem.work * problem.replicas, problem.failure_rates)


def _find_group_patterns(problem: PlacementProblem) -> list[tuple[int, BoolArray]]:
    """Return (number of groups, pattern `(E, N)`), rows by rank, with more and more groups of fewer experts.

    It ends before a group would have fewer than f nodes (the fault threshold). Some numbers are left out if there are
    many, and those for which an expert would have fewer hosts.
    """
    profile = np.minimum(problem.ranked_replicas.min(axis=0), problem.nodes)
    room = Room(most=profile, threshold=problem.fault_threshold, slots=problem.slots)
    fewest, most = -(-profile.size // int(problem.slots.max())), problem.nodes // problem.fault_threshold
    most = min(most, profile.size)
    tried = max(min(_MOST_NUMBERS, _MOST_CELLS // (problem.replicas.size * problem.nodes)), 2)
    step = max(most - fewest, 0) / (tried - 1)
    numbers = sorted({fewest + round(turn * step) for turn in range(tried)})
    found: list[tuple[int, BoolArray]] = []
    for number in numbers:
        starts = indices(number) * profile.size // number
        pattern = complete_pattern(disjoint_groups(profile, starts, problem.slots), room)
        if pattern is not None:
            found.append((number, trim_pattern(pattern, problem.fault_threshold)))
    return found


def _place_by_work(problem: PlacementProblem) -> IntArray:
    """Return a placement `(L, E, N)` that evens out the nodes' work, whatever this means for the survival of failures.

    Each expert still is on `fault_threshold` distinct nodes.
    """
    counts = np.zeros((*problem.replicas.shape, problem.nodes), dtype=np.int64)
    free = np.repeat(problem.slots[None, :], len(counts), axis=0)
    deal_by_work(counts, problem.replicas, free, problem.work)
    counts = enforce_guarantee(counts, problem.slots, problem.fault_threshold)
    return swap_replicas(counts, np.zeros(counts.shape, dtype=np.bool_), problem.work, np.zeros(len(counts)))
