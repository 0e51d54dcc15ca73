"""New placements that keep what GPUs hold as far as possible.

They choose which GPU gets which part, which slots keep their expert, and which layers change.

Axes: L layers, E experts, G GPUs, S slots of a GPU, R slots.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices


def match_parts_to_gpus(counts: IntArray, held: IntArray, blocks: list[IntArray]) -> IntArray:
    """Return `counts` `(L, E, G)` with parts exchanged between GPUs, per layer, so that few copies move.

    A part is the replicas of one GPU. GPUs exchange parts within their block only. The pair of part and GPU that keeps
    the most experts is matched first.

    Args:
        held: `(L, E, G)` the replicas that each GPU holds now.
        blocks: lists of GPUs that may exchange parts.
    """
    found = counts.copy()
    for block in blocks:
        new, old = counts[:, :, block], held[:, :, block]
        kept = np.minimum(new, 1).transpose(0, 2, 1).astype(np.float32) @ np.minimum(old, 1).astype(np.float32)
        # Of equals, a GPU keeps its own part.
        kept += 0.5 * np.eye(block.size, dtype=np.float32)
        part = _match_greedily(kept)
        found[:, :, block] = np.take_along_axis(new, part[:, None, :], axis=2)
    return found


def _match_greedily(kept: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> IntArray:
    """Return the part for each GPU, `(L, G)`, by greedy matching.

    `kept` `(L, parts, GPUs)` is the number of experts that a GPU would keep with a part. The largest is matched first.
    """
    layers, gpus = kept.shape[0], kept.shape[2]
    left = kept.copy()
    layer = indices(layers)
    part = np.empty((layers, gpus), dtype=np.int64)
    for _ in range(gpus):
        place = left.reshape(layers, -1).argmax(axis=1)
        row, column = place // gpus, place % gpus
        part[layer, column] = row
        left[layer, row] = -1.0
        left[layer, :, column] = -1.0
    return part


def keep_slots(slots: IntArray, held: IntArray, per_gpu: int) -> IntArray:
    """Return `slots` `(L, R)` reordered on each GPU, so that experts in `held` `(L, R)` stay in their slots."""
    new, old = slots.reshape(-1, per_gpu), held.reshape(-1, per_gpu)
    same = _make_slot_keys(new)[:, :, None] == _make_slot_keys(old)[:, None, :]
    stays = same.any(axis=2)
    place = np.where(stays, same.argmax(axis=2), -1)
    taken = same.any(axis=1)
    # New experts fill the remaining slots in order.
    coming = np.argsort(stays, axis=1, kind="stable")
    free = np.argsort(taken, axis=1, kind="stable")
    number = (~stays).sum(axis=1)
    first = indices(per_gpu) < number[:, None]
    row = np.broadcast_to(indices(len(new))[:, None], new.shape)
    place[row[first], coming[first]] = free[first]
    found = np.empty_like(new)
    np.put_along_axis(found, place, new, axis=1)
    return found.reshape(slots.shape)


def _make_slot_keys(slots: IntArray) -> IntArray:
    """Return keys for `slots` `(rows, S)` that distinguish the second replica of an expert on a GPU from the first."""
    order = np.argsort(slots, axis=1, kind="stable")
    in_order = np.take_along_axis(slots, order, axis=1)
    place = np.broadcast_to(indices(slots.shape[1]), slots.shape)
    starts = np.ones(slots.shape, dtype=np.bool_)
    starts[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    nth = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    keys = np.empty_like(slots)
    np.put_along_axis(keys, order, in_order * slots.shape[1] + nth, axis=1)
    return keys


def count_copies(counts: IntArray, held: IntArray) -> IntArray:
    """Return the number of copies, per layer `(L,)`, that lead from `held` to `counts`, both `(L, E, G)`."""
    return ((counts > 0) & (held == 0)).sum(axis=(1, 2))


def choose_within_budget(choices: list[IntArray], busiest: list[FloatArray], held: IntArray, budget: int) -> IntArray:
    """Return a placement `(L, E, G)` that takes each layer from one of the `choices`, within a budget of copies.

    All layers start with the first choice, even if its copies exceed the budget. Then, again and again, the layer
    changes whose busiest GPU improves most per copy, as long as the copies of all layers stay within the budget.

    Args:
        choices: placements `(L, E, G)`.
        busiest: `(L,)` the busiest GPU's load, for each choice.
        held: `(L, E, G)` the replicas that each GPU holds now.
        budget: largest number of copies.
    """
    price = np.stack([count_copies(choice, held) for choice in choices])
    gain = np.stack(busiest)
    layer = indices(price.shape[1])
    now = np.zeros(price.shape[1], dtype=np.int64)
    while True:
        further = price - price[now, layer]
        better = gain[now, layer] - gain
        possible: BoolArray = (better > 0) & (price[now, layer].sum() + further <= budget)
        if not possible.any():
            return np.stack(choices)[now, layer]
        worth = np.where(possible, better / np.maximum(further, 0.5), -np.inf)
        choice, where = np.unravel_index(int(worth.argmax()), worth.shape)
        now[int(where)] = int(choice)
