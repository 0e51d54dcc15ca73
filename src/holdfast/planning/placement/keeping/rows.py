"""Fills slots so that few experts move: held replicas stay as far as replicas and slots allow.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    distinct_rows,
    nonzero_indices,
)
from holdfast.planning.placement.fill import deal_by_work
from holdfast.planning.solvers import best_assignment

#: The gain of a row for which an expert has too few replicas.
_IMPOSSIBLE = -1e6
#: Layers x experts x rows up to which the optimal assignments take less than 50 ms on one core.
_OPTIMAL_UP_TO = 1_000_000


def rows_for_experts(pattern: BoolArray, replicas: IntArray, held: BoolArray) -> IntArray:
    """Return the row of the `pattern` `(E, N)` that each expert takes, `(L, E)`, so that few experts move.

    `held` `(L, E, N)` says which nodes hold which experts; empty nodes have no preference. An expert takes a row only
    if it has `replicas` `(L, E)` for all its hosts. Rows by rank always satisfy this.

    If one optimal assignment of all experts would take too long, experts that all hosts of a row already hold take that
    row first. The others are then assigned so that the fewest move.
    """
    kinds, kind_of = distinct_rows(pattern)
    needed = kinds.sum(axis=1)
    # [L, E, kinds] counts the hosts of a row of this kind that hold the expert.
    table = held.reshape(-1, held.shape[2])
    kept = (table.astype(np.float32) @ kinds.T.astype(np.float32)).reshape(*replicas.shape, len(kinds))
    there = kinds[:, table.any(axis=0)].sum(axis=1)
    np.copyto(kept, _IMPOSSIBLE, where=replicas[:, :, None] < needed)
    if replicas.size * replicas.shape[1] <= _OPTIMAL_UP_TO:
        return np.stack([best_assignment(gain[:, kind_of]) for gain in kept])
    content = (kept == there) & (replicas[:, :, None] >= needed)
    rows = _assign_others(kept, kind_of, _assign_content(content, kind_of, np.argsort(-needed, kind="stable")))
    gains = np.take_along_axis(kept, kind_of[rows][:, :, None], axis=2)
    for layer in np.flatnonzero(gains.min(axis=(1, 2)) <= _IMPOSSIBLE):
        rows[layer] = best_assignment(kept[layer][:, kind_of])
    return rows


def _assign_content(content: BoolArray, kind_of: IntArray, order: IntArray) -> IntArray:
    """Return a row `(L, E)` for each expert that is `content` `(L, E, kinds)` with its kind of row, else -1.

    `order` is the order of the kinds. Kinds with many hosts should come first: experts held by all of these hosts often
    fit small kinds by chance.
    """
    settled = np.full(content.shape[:2], -1, dtype=np.int64)
    still_open = np.ones(content.shape[:2], dtype=np.bool_)
    for kind in order.tolist():
        rows = np.flatnonzero(kind_of == kind)
        waiting = content[:, :, kind] & still_open
        place = np.cumsum(waiting, axis=1, dtype=np.int32)
        taken = waiting & (place <= rows.size)
        experts = np.flatnonzero(taken)
        settled.reshape(-1)[experts] = rows[place.reshape(-1)[experts] - 1]
        still_open ^= taken
    return settled


def _assign_others(kept: NDArray[np.float32], kind_of: IntArray, settled: IntArray) -> IntArray:
    """Return the row of each expert `(L, E)`: as in `settled`, and the remaining rows for the experts that are -1
    there.

    In each layer, they are assigned so that the sum of the gains `kept` `(L, E, kinds)` is greatest; `kind_of` is the
    kind of each row.
    """
    waiting = settled < 0
    # The additional last column collects the experts without a row (-1).
    taken = np.zeros((settled.shape[0], settled.shape[1] + 1), dtype=np.bool_)
    np.put_along_axis(taken, settled, True, axis=1)
    left = ~taken[:, :-1]
    rows = settled.copy()
    # If all gains are equal, as for experts without a holder, every assignment is equally good.
    rows[waiting] = nonzero_indices(left)[1]
    for layer in np.flatnonzero(_layers_with_choice(kept, waiting)):
        experts, open_rows = np.flatnonzero(waiting[layer]), np.flatnonzero(left[layer])
        gain = kept[layer][experts].take(kind_of[open_rows], axis=1)
        rows[layer, experts] = open_rows[best_assignment(gain)]
    return rows


def _layers_with_choice(kept: NDArray[np.float32], waiting: BoolArray) -> BoolArray:
    """Return in which layers, `(L,)`, the gains `kept` `(L, E, kinds)` of the `waiting` `(L, E)` experts differ.

    False for a layer in which no expert waits.
    """
    low = kept.min(axis=(1, 2), initial=np.inf, where=waiting[:, :, None])
    high = kept.max(axis=(1, 2), initial=-np.inf, where=waiting[:, :, None])
    return low < high


def deal_keeping(
    pattern: BoolArray, rows: IntArray, replicas: IntArray, slots: IntArray, held: IntArray, work: FloatArray
) -> IntArray:
    """Return a placement `(L, E, N)` of `replicas` `(L, E)` in `slots` `(N,)`, moving few experts.

    Each expert has the hosts of its row, `rows` `(L, E)`, of the `pattern` `(E, N)`. Its other replicas stay on nodes
    that hold them, `held` `(L, E, N)`, as far as replicas and slots allow. The rest even out the nodes' `work` `(L, E)`
    per replica.
    """
    hosts = pattern[rows]
    in_hand = (replicas - pattern.sum(axis=1)[rows]).astype(np.int32)
    free = np.repeat((slots - pattern.sum(axis=0))[None, :], len(rows), axis=0).astype(np.int32)
    stay = held.astype(np.int32)
    np.subtract(stay, hosts, out=stay)
    np.maximum(stay, 0, out=stay)
    stay = _limit_to_room(stay, in_hand[:, :, None], axis=2)
    stay = _limit_to_room(stay, free[:, None, :], axis=1)
    in_hand -= stay.sum(axis=2, dtype=np.int32)
    free -= stay.sum(axis=1, dtype=np.int32)
    counts = stay.astype(np.int64)
    counts += hosts
    deal_by_work(counts, in_hand.astype(np.int64), free.astype(np.int64), work)
    return counts


def _limit_to_room(wanted: NDArray[np.int32], room: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return `wanted` with its total along the axis limited to `room`: the first units stay, the last ones are cut."""
    before = np.cumsum(wanted, axis=axis, dtype=np.int32)
    before -= wanted
    left = np.subtract(room, before, out=before)
    np.maximum(left, 0, out=left)
    return np.minimum(left, wanted, out=left)
