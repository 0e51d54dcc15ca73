"""Evening out the nodes' work without touching what survives.

Where f forces more replicas on cold experts than their tokens ask for, a node full of them idles while the hot experts'
few nodes work. A pattern survives a loss if each of its host sets keeps a node: which expert has which of the sets does
not matter. So cold and hot experts can be shared evenly among host sets of one size, at no cost in recovery.

Axes: L layers, E experts, N nodes, S sets of nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, distinct_rows, take_rows


def idleness(loads: FloatArray, replicas: IntArray, by_rank: IntArray) -> FloatArray:
    """Return by how much a replica of the expert of each rank has less work than the average slot, `(E,)`.

    1: none at all; 0: as much; below 0: more. The mean over the layers, from loads, replicas and the experts `by_rank`,
    `(L, E)` each.
    """
    per_replica = take_rows(loads / replicas, by_rank)
    average = loads.sum(axis=1) / replicas.sum(axis=1)
    return 1.0 - (per_replica / average[:, None]).mean(axis=0)


def even_sets(pattern: BoolArray, idle: FloatArray, slots: IntArray) -> BoolArray:
    """Return `pattern` `(E, N)` with its rows' host sets traded so that idleness `(E,)` is even over the nodes.

    Only sets of the same size change hands, and no node gets more rows than `slots` `(N,)`. Where that leads nowhere
    the pattern comes back as it was.
    """
    sets, set_of = distinct_rows(pattern)
    sizes = sets.sum(axis=1)
    evened = pattern
    for size in np.unique(sizes):
        choices = np.flatnonzero(sizes == size)
        rows = np.flatnonzero(np.isin(set_of, choices))
        if choices.size > 1:
            evened = _share(evened, rows, sets[choices], idle, slots)
    return evened if _unevenness(evened, idle) < _unevenness(pattern, idle) else pattern


def _share(pattern: BoolArray, rows: IntArray, sets: BoolArray, idle: FloatArray, slots: IntArray) -> BoolArray:
    """Deal the `sets`, all of one size, anew to the `rows`, the idlest row first, each to where the least idleness is
    so far."""
    shared = pattern.copy()
    shared[rows] = False
    free = (slots - shared.sum(axis=0)).tolist()
    so_far = idle @ shared
    members, nodes_of = sets.astype(np.float64), [np.flatnonzero(nodes).tolist() for nodes in sets]
    size = len(nodes_of[0])
    fits = _fitting(sets, free)
    fitting = members[fits]
    chosen: list[int] = []
    order = rows[np.argsort(-idle[rows], kind="stable")]
    for idle_row in idle[order].tolist():
        if not fits.size:
            return pattern
        # A row that works more than the average goes to where the most idleness is.
        worth = idle_row * (fitting @ so_far) / size
        taken = int(fits[worth.argmin()])
        chosen.append(taken)
        so_far += idle_row * members[taken]
        for node in nodes_of[taken]:
            free[node] -= 1
        if not all(free[node] for node in nodes_of[taken]):
            fits = _fitting(sets, free)
            fitting = members[fits]
    shared[order] = sets[chosen]
    return shared


def _fitting(sets: BoolArray, free: list[int]) -> IntArray:
    """Return which of the `sets` `(S, N)` have only nodes with `free` slots."""
    return np.flatnonzero((sets <= (np.array(free) > 0)).all(axis=1))


def _unevenness(pattern: BoolArray, idle: FloatArray) -> float:
    by_node = idle @ pattern
    return float(np.ptp(by_node).round(9))
