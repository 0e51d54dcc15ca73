"""Failure domains above the node: replicas are spread over racks before nodes.

Axes: E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.recovery_probability import fatal_share

#: The most swaps of two nodes that are tried.
_BUDGET = 2000


def spread_over_racks(pattern: BoolArray, slots: IntArray, racks: IntArray, threshold: int) -> BoolArray:
    """Return `pattern` `(E, N)` with its columns assigned to other nodes, so that lost racks cause the least damage.

    First, every expert should be in as many racks as the threshold and the racks allow. Then recovery from lost racks
    counts. Recovery from lost nodes stays the same, since only nodes with the same slots swap columns.

    Columns are dealt to the racks in turn: to all of them, or to one block of racks after the other. Node groups in the
    same racks die together, which leaves fewer fatal losses (maximum overlap, one level up). Swaps then improve the
    best deal.
    """
    number = int(racks.max()) + 1
    goal = min(threshold, number)

    def value(columns: IntArray) -> tuple[int, float]:
        return _rate_pattern(pattern[:, columns], racks, goal)

    deals = [_deal_in_turn(slots, racks, block) for block in range(goal, number + 1)]
    return pattern[:, _improve_by_swaps(max(deals, key=value), value, _swap_pairs(slots, racks))]


def _improve_by_swaps(
    columns: IntArray, value: Callable[[IntArray], tuple[int, float]], swaps: list[tuple[int, int]]
) -> IntArray:
    """Return `columns` `(N,)` improved by `swaps` of two nodes, each kept if it raises the `value`.

    It ends when no swap helps, or after 2000 tries.
    """
    best = value(columns)
    tried = since = 0
    while swaps and since < len(swaps) and tried < _BUDGET:
        first, second = swaps[tried % len(swaps)]
        candidate = columns.copy()
        candidate[[first, second]] = candidate[[second, first]]
        found = value(candidate)
        tried, since = tried + 1, since + 1
        if found > best:
            columns, best, since = candidate, found, 0
    return columns


def _deal_in_turn(slots: IntArray, racks: IntArray, block: int) -> IntArray:
    """Return the column of each node, `(N,)`.

    Columns go to the racks of one `block` in turn, then to the racks of the next block. Only nodes with the same slots
    exchange columns.
    """
    columns = np.empty_like(racks)
    for kind in np.unique(slots):
        nodes = np.flatnonzero(slots == kind)
        # turn[i] is the number of nodes of the same rack before node i.
        turn = np.array([int((racks[nodes[:place]] == racks[node]).sum()) for place, node in enumerate(nodes)])
        columns[nodes[np.lexsort((racks[nodes], turn, racks[nodes] // block))]] = nodes
    return columns


def _swap_pairs(slots: IntArray, racks: IntArray) -> list[tuple[int, int]]:
    """Return the pairs of nodes in different racks with the same slots, at most as many as can be tried."""
    pairs = (
        (first, int(second))
        for first in range(slots.size)
        for second in first + np.flatnonzero((slots[first:] == slots[first]) & (racks[first:] != racks[first]))
    )
    return list(islice(pairs, _BUDGET))


def _rate_pattern(pattern: BoolArray, racks: IntArray, goal: int) -> tuple[int, float]:
    """Return the value of a pattern: first the racks that experts lack, negative, then the recovery from lost racks."""
    by_rack = _hosts_by_rack(pattern, racks)
    lacking = np.maximum(goal - by_rack.sum(axis=1), 0).sum()
    return -int(lacking), -float(fatal_share(by_rack).most @ default_weights(by_rack.shape[1]))


def _hosts_by_rack(hosts: BoolArray, racks: IntArray) -> BoolArray:
    """Return the racks with a host of each expert, `(..., racks)`, from hosts `(..., N)`."""
    return np.stack([hosts[..., racks == rack].any(axis=-1) for rack in range(int(racks.max()) + 1)], axis=-1)
