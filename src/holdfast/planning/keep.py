"""Filling slots so that few experts move: what nodes hold already stays, where replicas and slots allow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import (
    BoolArray,
    IntArray,
    put_rows,
    stable_order,
    sum_over_nodes,
    take_rows,
    true_places,
)
from holdfast.planning.fill import deal
from holdfast.planning.solvers import best_assignment

#: Gain of giving an expert a row that it has too few replicas for.
_IMPOSSIBLE = -1e6
#: Layers x experts x rows up to which the optimal assignments stay under 50 ms on one core.
_OPTIMAL_UP_TO = 1_000_000


def rows_for_experts(pattern: BoolArray, replicas: IntArray, held: IntArray) -> IntArray:
    """Return which row of the *pattern* `[E, N]` each expert takes, `[L, E]`, so that few experts move.

    An expert takes a row only if it has replicas `[L, E]` for all its hosts; by rank every expert can. Experts that all
    hosts of some row hold already settle there first where one optimal assignment of all would take too long; the
    others are assigned so that the fewest move.
    """
    kinds, kind_of = np.unique(pattern, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    needed = kinds.sum(axis=1)
    # [L, E, kinds of rows]: how many hosts of such a row hold the expert.
    having = (held > 0).reshape(-1, held.shape[2]).astype(np.float32)
    kept = (having @ kinds.T.astype(np.float32)).reshape(*replicas.shape, len(kinds))
    np.copyto(kept, _IMPOSSIBLE, where=replicas[:, :, None] < needed)
    if replicas.size * replicas.shape[1] <= _OPTIMAL_UP_TO:
        return np.stack([best_assignment(gain[:, kind_of]) for gain in kept])
    rows = _assign_others(kept, kind_of, _settle(kept == needed, kind_of))
    gains = np.take_along_axis(kept, kind_of[rows][:, :, None], axis=2)
    for layer in np.flatnonzero(gains.min(axis=(1, 2)) <= _IMPOSSIBLE):
        rows[layer] = best_assignment(kept[layer][:, kind_of])
    return rows


def _settle(content: BoolArray, kind_of: IntArray) -> IntArray:
    """Return a row `[L, E]` for each expert that is *content* `[L, E, kinds]` with its kind of row, else -1."""
    settled = np.full(content.shape[:2], -1, dtype=np.int64)
    for kind in range(content.shape[2]):
        rows = np.flatnonzero(kind_of == kind)
        waiting = content[:, :, kind] & (settled < 0)
        place = np.cumsum(waiting, axis=1) - 1
        taken = waiting & (place < rows.size)
        settled[taken] = rows[place[taken]]
    return settled


def _assign_others(kept: NDArray[np.float32], kind_of: IntArray, settled: IntArray) -> IntArray:
    """Give the experts without a row, -1 in *settled* `[L, E]`, the rows that are left."""
    waiting = settled < 0
    # One place more: that of those who have none yet.
    taken = np.zeros((settled.shape[0], settled.shape[1] + 1), dtype=np.bool_)
    np.put_along_axis(taken, settled, True, axis=1)
    left = ~taken[:, :-1]
    rows = settled.copy()
    # Where it is all the same, as for experts that nobody holds any more, every assignment is as good.
    rows[waiting] = true_places(left)[1]
    for layer in np.flatnonzero(_differ(kept, waiting)):
        experts, open_rows = np.flatnonzero(waiting[layer]), np.flatnonzero(left[layer])
        gain = kept[layer][experts].take(kind_of[open_rows], axis=1)
        rows[layer, experts] = open_rows[best_assignment(gain)]
    return rows


def _differ(kept: NDArray[np.float32], waiting: BoolArray) -> BoolArray:
    """Return for which layers the gains *kept* `[L, E, kinds]` of the *waiting* `[L, E]` experts are not all one."""
    low = kept.min(axis=(1, 2), initial=np.inf, where=waiting[:, :, None])
    high = kept.max(axis=(1, 2), initial=-np.inf, where=waiting[:, :, None])
    return low < high


def deal_keeping(counts: IntArray, replicas: IntArray, slots: IntArray, held: IntArray) -> IntArray:
    """Return *counts* `[L, E, N]` completed to *replicas* `[L, E]` and *slots* `[N]`, moving few experts.

    First copies that nodes hold, then doubles on nodes that host the expert anyway (which cost no move), then the rest.
    Experts with the most replicas in hand choose first.
    """
    excess = sum_over_nodes(counts) - replicas
    # Only experts with replicas in hand take part: the first of each layer, [L, M].
    order = stable_order(excess)[:, : int((excess < 0).sum(axis=1).max())]
    in_hand = -take_rows(excess, order)
    # One contiguous table [L, M] per node.
    by_node = np.ascontiguousarray(take_rows(counts, order).transpose(2, 0, 1))
    had = np.ascontiguousarray((take_rows(held, order) > 0).transpose(2, 0, 1))
    free = slots[:, None] - counts.sum(axis=1).T
    for doubles in (False, True):
        for node, here in enumerate(by_node):
            wanted = np.where(here > 0, in_hand, 0) if doubles else (had[node] & (here == 0) & (in_hand > 0))
            if not wanted.any():
                continue
            put = _first(wanted.astype(np.int64), free[node])
            here += put
            in_hand -= put
            free[node] -= put.sum(axis=1)
    kept = counts.copy()
    put_rows(kept, order, by_node.transpose(1, 2, 0))
    return deal(kept, replicas, slots)


def _first(wanted: IntArray, free: IntArray) -> IntArray:
    """Return the first *free* `[L]` units of *wanted* `[L, E]`."""
    before = np.cumsum(wanted, axis=1) - wanted
    return np.minimum(np.maximum(free[:, None] - before, 0), wanted)
