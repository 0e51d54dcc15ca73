"""Evens out the nodes' work by swaps: of the rows of two experts in a pattern, or of two replicas.

Each swap involves the busiest node of a layer. It is the swap that minimises the sum of the squared loads of the nodes.
The placement with the least busy busiest node on the way is kept.

Axes: L layers, E experts, N nodes, S distinct host sets, C the most experts on a busiest node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, distinct_rows, indices, stable_argsort

#: The work of a busiest node, over the mean, up to which a layer is even enough.
_EVEN = 1.001
#: The least improvement, as a share of the sum of squares.
_BETTER = 1e-9
#: Layers x experts x nodes up to which replicas are swapped. In larger tables each replica matters little.
MOST_CELLS = 1 << 21
#: The most swaps per layer.
MOST_SWAPS = 64
#: The most pairs of experts compared: in each round layers x experts x experts on a node, about 50 ns each.
_MOST_PAIRS = 8_000_000


def swap_rows(
    pattern: BoolArray, rows: IntArray, replicas: IntArray, work: FloatArray, base: FloatArray, goal: FloatArray
) -> IntArray:
    """Swap experts' rows to reduce the work of each layer's busiest node; return the row of each expert `(L, E)`.

    The same losses are survived as with the given `rows` `(L, E)` of the `pattern` `(E, N)`. An expert may take a row
    only if it has `replicas` `(L, E)` for all its hosts. The nodes have `base` `(L, N)` in addition to the `work` `(L,
    E)` of each of the pattern's replicas. Layers with a busiest node of at most the `goal` `(L,)` stay.
    """
    sets, set_of = distinct_rows(pattern)
    members, size = sets.astype(np.float64), sets.sum(axis=1)
    fits = replicas[:, :, None] >= size
    mine = set_of[rows]
    by_set: FloatArray = np.zeros((len(rows), len(sets)))
    np.add.at(by_set, (indices(len(rows))[:, None], mine), work)
    load = base + by_set @ members
    apart = size[:, None] + size - 2.0 * (members @ members.T)
    best, best_load = mine.copy(), load.max(axis=1)
    goal = np.maximum(goal, _EVEN * load.mean(axis=1))
    layer = indices(len(rows))
    pairs = _MOST_PAIRS
    for _ in range(MOST_SWAPS):
        here = sets[mine, load.argmax(axis=1)[:, None]]
        on_it = _experts_on_busiest(here, best_load > goal)
        pairs -= here.size * on_it.shape[1]
        if not on_it.size or pairs < 0:
            break
        their = mine[layer[:, None], on_it]
        value = np.take_along_axis(load @ members.T, mine, axis=1)
        less = np.take_along_axis(work, on_it, axis=1)[:, :, None] - work[:, None, :]
        drop = np.take_along_axis(value, on_it, axis=1)[:, :, None] - value[:, None, :]
        gain = less * (2.0 * drop - less * apart[their[:, :, None], mine[:, None, :]])
        allowed = np.take_along_axis(here, on_it, axis=1)[:, :, None] & ~here[:, None, :] & (less > 0)
        allowed &= fits[layer[:, None, None], on_it[:, :, None], mine[:, None, :]]
        allowed &= fits[layer[:, None, None], indices(rows.shape[1])[None, None, :], their[:, :, None]]
        allowed &= (best_load > goal)[:, None, None]
        first, second, found = _find_best_pair(np.where(allowed, gain, 0.0), load)
        if not found.any():
            break
        one, other, at = on_it[layer, first][found], second[found], layer[found]
        shift = work[at, one] - work[at, other]
        load[at] += shift[:, None] * (members[mine[at, other]] - members[mine[at, one]])
        mine[at, one], mine[at, other] = mine[at, other], mine[at, one]
        better = load.max(axis=1) < best_load
        best[better], best_load[better] = mine[better], load.max(axis=1)[better]
    return assign_rows_to_sets(best, set_of)


def swap_replicas(
    counts: IntArray, needed: BoolArray, work: FloatArray, goal: FloatArray, most: int = MOST_SWAPS
) -> IntArray:
    """Return `counts` `(L, E, N)` after swaps of replicas between nodes that relieve the busiest node of each layer.

    A replica that is `needed` `(L, E, N)` on its node stays there. An expert gets no second replica on a node, unless
    the swapped replica was a second one already. Large tables are returned unchanged.

    Args:
        counts: Replicas per node.
        needed: Nodes that must keep a replica of an expert.
        work: `(L, E)` work of one replica.
        goal: `(L,)`; layers with a busiest node of at most this work stay.
        most: The most swaps in a layer.
    """
    if counts.size > MOST_CELLS:
        return counts
    best = counts.copy()
    load = np.matmul(work[:, None, :], counts.astype(np.float64))[:, 0, :]
    best_load = load.max(axis=1)
    goal = np.maximum(goal, _EVEN * load.mean(axis=1))
    # Only layers that improved in the last round are considered again.
    at = np.flatnonzero(best_load > goal)
    now, pairs = counts[at], _MOST_PAIRS
    for _ in range(most):
        pairs -= now.size
        if not at.size or pairs < 0:
            break
        step = _find_best_swap(now, needed[at], work[at], load[at])
        found = step.found
        now, at = now[found], at[found]
        row = indices(at.size)
        one, other, source, target = (each[found] for each in (step.one, step.other, step.source, step.target))
        for expert, change in ((one, 1), (other, -1)):
            now[row, expert, source] -= change
            now[row, expert, target] += change
        shift = work[at, one] - work[at, other]
        load[at, source] -= shift
        load[at, target] += shift
        better = load[at].max(axis=1) < best_load[at]
        best[at[better]], best_load[at[better]] = now[better], load[at].max(axis=1)[better]
        going = best_load[at] > goal[at]
        now, at = now[going], at[going]
    return best


@dataclass(frozen=True, slots=True)
class _Swap:
    """A swap in each layer: the expert `one` on the node `source` with the expert `other` on `target`, if `found`."""

    one: IntArray
    other: IntArray
    source: IntArray
    target: IntArray
    found: BoolArray


def _find_best_swap(counts: IntArray, needed: BoolArray, work: FloatArray, load: FloatArray) -> _Swap:
    """Return the swap of each layer that reduces the sum of the squares of the nodes' `load` `(L, N)` most.

    A replica of the busiest node that is not `needed` is swapped for one with less work, of an expert that the busiest
    node lacks, on a node that lacks the first. `found` is False in layers without a noticeable improvement.
    """
    layer = indices(len(counts))
    busiest = load.argmax(axis=1)
    free = counts > needed
    here, there = free[layer, :, busiest], counts[layer, :, busiest]
    on_it = _experts_on_busiest(here, np.ones(len(counts), dtype=np.bool_))
    if not on_it.size:
        return _Swap(busiest, busiest, busiest, busiest, np.zeros(len(counts), dtype=np.bool_))
    # Each expert that the busiest node does not hold offers its replica on the node with the least load.
    load_there = np.where(free, load[:, None, :], np.inf)
    node = load_there.argmin(axis=2)
    value = np.where(there == 0, np.take_along_axis(load_there, node[:, :, None], axis=2)[:, :, 0], np.inf)
    less = np.take_along_axis(work, on_it, axis=1)[:, :, None] - work[:, None, :]
    drop = (load[layer, busiest][:, None] - value)[:, None, :]
    absent = counts[layer[:, None, None], on_it[:, :, None], node[:, None, :]] == 0
    allowed = np.take_along_axis(here, on_it, axis=1)[:, :, None] & (less > 0) & absent & (drop > less)
    gain = np.where(allowed, less * (np.where(np.isfinite(drop), drop, 0.0) - less), 0.0)
    first, second, found = _find_best_pair(gain, load)
    return _Swap(on_it[layer, first], second, busiest, node[layer, second], found)


def _experts_on_busiest(here: BoolArray, open_layers: BoolArray) -> IntArray:
    """Return the experts `(L, C)` that are `here` `(L, E)`, padded with others; C is 0 if no layer is open."""
    width = int(here[open_layers].sum(axis=1).max(initial=0))
    return np.argsort(~here, axis=1, kind="stable")[:, :width]


def _find_best_pair(gain: FloatArray, load: FloatArray) -> tuple[IntArray, IntArray, BoolArray]:
    """Return, for each layer, the two indices of the greatest `gain` `(L, C, E)`, and whether it is noticeable.

    It is noticeable if it is more than a tiny share of the sum of the squares of the nodes' `load` `(L, N)`.
    """
    flat = gain.reshape(len(gain), -1)
    place = flat.argmax(axis=1)
    found = flat.max(axis=1) > _BETTER * (load**2).sum(axis=1)
    return place // gain.shape[2], place % gain.shape[2], found


def assign_rows_to_sets(sets: IntArray, set_of: IntArray) -> IntArray:
    """Return a different row `(L, E)` for each expert, with the expert's host set.

    Args:
        sets: `(L, E)` the number of each expert's set. Each layer has each set as often as the rows have it.
        set_of: `(E,)` the number of each row's set.
    """
    rows = np.empty_like(sets)
    np.put_along_axis(rows, stable_argsort(sets), np.broadcast_to(np.argsort(set_of, kind="stable"), rows.shape), 1)
    return rows
