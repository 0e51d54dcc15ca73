"""Dealing the replicas that are still in hand to the slots that are still free.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, indices, sum_over_nodes, true_places


def deal(counts: IntArray, replicas: IntArray, slots: IntArray) -> IntArray:
    """Complete `counts` `(L, E, N)`, contiguous, to `replicas` `(L, E)` and `slots` `(N,)`, in place; return them.

    Free slots are taken round by round over the nodes, replicas expert by expert: so the replicas of one expert fall on
    as many nodes as a round has.
    """
    deal_rest(counts, replicas - sum_over_nodes(counts), slots - counts.sum(axis=1))
    return counts


def deal_rest(counts: IntArray, in_hand: IntArray, free: IntArray) -> None:
    """Add the replicas `in_hand` `(L, E)` to `counts` `(L, E, N)`, in place, as `deal`; `free` `(L, N)` slots."""
    if not in_hand.any():
        return
    layers, experts, nodes = counts.shape
    rounds = indices(int(free.max()))[None, :, None] < free[:, None, :]
    node = true_places(rounds)[2]
    # Both go layer by layer, and each layer has as many free slots as replicas in hand.
    row = np.repeat(indices(layers * experts), in_hand.ravel())
    np.add.at(counts.reshape(-1), row * nodes + node, 1)


def pack(replicas: IntArray, slots: IntArray) -> IntArray:
    """Return replicas `(L, E, N)` with node after node filled to the brim, expert by expert."""
    layers, experts = replicas.shape
    node = np.tile(np.repeat(indices(slots.size), slots), layers)
    row = np.repeat(indices(layers * experts), replicas.ravel())
    size = layers * experts * slots.size
    return np.bincount(row * slots.size + node, minlength=size).reshape(layers, experts, slots.size)
