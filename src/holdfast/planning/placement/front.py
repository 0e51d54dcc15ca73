"""Survival against balance: the placements worth a choice, and the choice by a weight.

The fewer groups of nodes share the experts, the fewer losses are fatal; the more nodes share the hot experts, the less
busy is the busiest. Between the two lie groups of fewer experts each, whose nodes keep slots for the hot ones.

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
from holdfast.planning.placement.build import build
from holdfast.planning.placement.fill import deal_by_work
from holdfast.planning.placement.guarantee import with_guarantee
from holdfast.planning.placement.racks import over_racks
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.pattern import Room, complete, disjoint_groups, trim
from holdfast.planning.survival.recovery_probability import fatal_share

#: Numbers of groups that are tried, at the most.
_MOST_NUMBERS = 12
#: Counts of all options together, about.
_MOST_CELLS = 1 << 26
#: Differences that are none.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A placement, what it does not survive, and how busy its busiest node is."""

    name: str
    #: `(L, E, N)` replicas per node.
    counts: IntArray
    #: `(N + 1,)` share of fatal losses of 0..N nodes, at the most.
    fatal: FloatArray
    #: The busiest node's work over the mean node's; the mean over the layers.
    busiest: float

    def fatal_losses(self, weights: FloatArray) -> float:
        """Return the share of losses, weighted by how likely each number of lost nodes is, that are fatal."""
        return float(self.fatal @ weights)

    def no_worse(self, other: Option) -> bool:
        """Whether it is no worse at any number of lost nodes, and no busier."""
        rounding = _ROUNDING * (1 + other.fatal)
        return self.busiest <= other.busiest + _ROUNDING and bool((self.fatal <= other.fatal + rounding).all())


def options(problem: PlacementProblem) -> list[Option]:
    """Return placements from the one that survives most, as `Best` finds it, to the one with the most even work.

    Once with the problem's replicas, and once with those of which the busiest has the least work.
    """
    return [option for replicas in _replicas(problem) for option in options_of(replace(problem, replicas=replicas))]


def options_of(problem: PlacementProblem) -> list[Option]:
    """Return these placements of the problem's own replicas."""
    found = [_option("survives most", problem, Best().place(problem))]
    for number, pattern in _more_groups(problem):
        if problem.racks is not None:
            pattern = over_racks(pattern, problem.slots, problem.racks, problem.fault_threshold)
        found.append(_option(f"{number} groups", problem, build(problem, pattern)))
    if problem.racks is None:
        found.append(_option("even", problem, _even(problem)))
    return found


def rated(name: str, counts: IntArray, loads: FloatArray, rates: FloatArray | None = None) -> Option:
    """Return a placement `(L, E, N)` with its figures for `loads` `(L, E)`, on nodes that fail at these `rates`."""
    fatal = fatal_share(counts > 0, rates).most
    return Option(name=name, counts=counts, fatal=fatal, busiest=float(busiest_over_mean(counts, loads).mean()))


def pareto(found: list[Option]) -> list[Option]:
    """Return those that no other one beats: no worse anywhere, better somewhere; the first of equals; by balance."""
    kept: list[Option] = []
    for place, option in enumerate(found):
        beaten = (
            other.no_worse(option) and not (option.no_worse(other) and place < rival)
            for rival, other in enumerate(found)
            if rival != place
        )
        if not any(beaten):
            kept.append(option)
    return sorted(kept, key=lambda option: option.busiest)


def weighed(found: list[Option], balance_weight: float, weights: FloatArray | None) -> Option:
    """Return the option with the least sum of fatal losses, by `weights` `(N + 1,)` (None: the default ones), and
    `balance_weight` times what the busiest node has above the mean. Of equals the least busy, then the first."""
    if weights is None:
        weights = default_weights(found[0].counts.shape[2])

    def price(option: Option) -> tuple[float, float]:
        return round(option.fatal_losses(weights) + balance_weight * option.busiest, 12), option.busiest

    return min(found, key=price)


def weights_of_choice(found: list[Option], weights: FloatArray) -> list[tuple[float, float | None] | None]:
    """Return from which to which balance weight each option is the one that `weighed` takes; None: at none, or without
    an end. `weights` `(N + 1,)` of the numbers of lost nodes."""
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


def _replicas(problem: PlacementProblem) -> list[IntArray]:
    if problem.loads is None:
        return [problem.replicas]
    other = allocate(problem.loads, problem.slots, fault_threshold=problem.fault_threshold, least_busy=True)
    assert isinstance(other, Allocation)  # the problem's own replicas fit
    return [problem.replicas, other.replicas]


def _option(name: str, problem: PlacementProblem, counts: IntArray) -> Option:
    return rated(name, counts, problem.work * problem.replicas, problem.failure_rates)


def _more_groups(problem: PlacementProblem) -> list[tuple[int, BoolArray]]:
    """Return patterns `(E, N)`, rows by rank, of ever more groups of ever fewer experts, up to where the nodes do not
    suffice for f each."""
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
        pattern = complete(disjoint_groups(profile, starts, problem.slots), room)
        if pattern is not None:
            found.append((number, trim(pattern, problem.fault_threshold)))
    return found


def _even(problem: PlacementProblem) -> IntArray:
    """Return a placement `(L, E, N)` that looks at the nodes' work alone, and keeps f."""
    counts = np.zeros((*problem.replicas.shape, problem.nodes), dtype=np.int64)
    free = np.repeat(problem.slots[None, :], len(counts), axis=0)
    deal_by_work(counts, problem.replicas, free, problem.work)
    counts = with_guarantee(counts, problem.slots, problem.fault_threshold)
    return swap_replicas(counts, np.zeros(counts.shape, dtype=np.bool_), problem.work, np.zeros(len(counts)))
