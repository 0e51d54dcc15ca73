"""Dealing the replicas that are still in hand to the slots that are still free."""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, indices, sum_over_nodes, true_places


def deal(counts: IntArray, replicas: IntArray, slots: IntArray) -> IntArray:
    """Return *counts* `[L, E, N]` completed to *replicas* `[L, E]` and *slots* `[N]`, in all layers at once.

    Free slots are taken round by round over the nodes, replicas expert by expert: so the replicas of one expert fall on
    as many nodes as a round has.
    """
    layers, experts = replicas.shape
    in_hand = replicas - sum_over_nodes(counts)
    free = slots - counts.sum(axis=1)
    if not in_hand.any():
        return counts
    rounds = indices(int(free.max()))[None, :, None] < free[:, None, :]
    layer, _, node = true_places(rounds)
    expert = np.repeat(np.tile(indices(experts), layers), in_hand.ravel())
    return counts + _tally(layer, expert, node, counts.shape)


def pack(replicas: IntArray, slots: IntArray) -> IntArray:
    """Return replicas `[L, E, N]` with node after node filled to the brim, expert by expert."""
    layers, experts = replicas.shape
    node = np.tile(np.repeat(indices(slots.size), slots), layers)
    layer = np.repeat(indices(layers), int(slots.sum()))
    expert = np.repeat(np.tile(indices(experts), layers), replicas.ravel())
    return _tally(layer, expert, node, (layers, experts, slots.size))


def _tally(layer: IntArray, expert: IntArray, node: IntArray, shape: tuple[int, ...]) -> IntArray:
    """Count how often each (layer, expert, node) occurs."""
    flat = (layer * shape[1] + expert) * shape[2] + node
    return np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)
