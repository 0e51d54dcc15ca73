"""Deals the remaining replicas to the free slots.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray, indices, nonzero_indices, sum_over_nodes, take_rows


def deal_replicas(counts: IntArray, replicas: IntArray, slots: IntArray) -> IntArray:
    """Fill the contiguous `counts` `(L, E, N)` up to `replicas` `(L, E)` and `slots` `(N,)`, in place; return them.

    Free slots are taken round by round over the nodes, and replicas expert by expert. So the replicas of an expert are
    on as many nodes as a round has.
    """
    deal_remaining(counts, replicas - sum_over_nodes(counts), slots - counts.sum(axis=1))
    return counts


def deal_remaining(counts: IntArray, in_hand: IntArray, free: IntArray) -> None:
    """Add the replicas `in_hand` `(L, E)` to `counts` `(L, E, N)` in place, round by round, as `deal_replicas` does.

    In a round, each node that still has a free slot gets the next replica, expert by expert. In each layer, `free` `(L,
    N)` must sum to the replicas in hand.
    """
    if not in_hand.any():
        return
    layers, experts, nodes = counts.shape
    rounds = indices(int(free.max()))[None, :, None] < free[:, None, :]
    node = nonzero_indices(rounds)[2]
    # Both are in the order of layers, and each layer has as many free slots as replicas in hand.
    row = np.repeat(indices(layers * experts), in_hand.ravel())
    np.add.at(counts.reshape(-1), row * nodes + node, 1)


def deal_by_work(counts: IntArray, in_hand: IntArray, free: IntArray, work: FloatArray) -> None:
    """Add the replicas `in_hand` `(L, E)` to `counts` `(L, E, N)`, in place, so that the nodes' work is even.

    The first round gives one replica to each node with the most `free` `(L, N)` slots, the last round to each node with
    any. In a round, the replica with the most `work` `(L, E)` goes to the node with the least work so far. So the
    replicas of an expert are on as many nodes as a round has.
    """
    if not in_hand.any():
        return
    layers, experts, nodes = counts.shape
    order = np.argsort(-work, axis=1, kind="stable")
    row = np.repeat((order + indices(layers)[:, None] * experts).ravel(), take_rows(in_hand, order).ravel())
    row = np.concatenate((row, np.zeros(nodes, dtype=np.int64)))
    number = in_hand.sum(axis=1)
    flat, flat_work = counts.reshape(-1), work.reshape(-1)
    # Work in float32 is exact enough for a choice, and takes half the memory.
    load = np.matmul(work[:, None, :].astype(np.float32), counts.astype(np.float32))[:, 0, :].astype(np.float64)
    position, layer = indices(nodes), indices(layers)[:, None]
    next_row = np.cumsum(number) - number
    for least in range(int(free.max()), 0, -1):
        takes = free >= least
        number = takes.sum(axis=1)
        node = np.where(takes, load, np.inf).argsort(axis=1, kind="stable")
        chosen = row[np.minimum(next_row[:, None] + position, row.size - 1)]
        taken = position < number[:, None]
        np.add.at(flat, chosen[taken] * nodes + node[taken], 1)
        load[np.broadcast_to(layer, node.shape)[taken], node[taken]] += flat_work[chosen[taken]]
        next_row += number


def pack_nodes(replicas: IntArray, slots: IntArray) -> IntArray:
    """Return replicas `(L, E, N)` with one node filled after the other, expert by expert."""
    layers, experts = replicas.shape
    node = np.tile(np.repeat(indices(slots.size), slots), layers)
    row = np.repeat(indices(layers * experts), replicas.ravel())
    size = layers * experts * slots.size
    return np.bincount(row * slots.size + node, minlength=size).reshape(layers, experts, slots.size)
