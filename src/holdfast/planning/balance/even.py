"""Evens out the nodes' work without changing which losses a pattern survives.

The threshold f can force more replicas on cold experts than their tokens need. A node full of cold experts then idles
while the few nodes of the hot experts work. A pattern survives a loss if each of its host sets keeps a node, whichever
expert has which set. So cold and hot experts can be mixed among host sets of one size, at no cost in recovery.

Axes: L layers, E experts, N nodes, S sets of nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, distinct_rows, take_rows


def compute_idleness(loads: FloatArray, replicas: IntArray, by_rank: IntArray) -> FloatArray:
    """Return the idleness `(E,)` of the expert of each rank: how much less work than average its replicas have.

    1 means no work, 0 the work of the average slot, and a negative value more than that. The result is the mean over
    the layers. `loads`, `replicas` and the experts `by_rank` are `(L, E)`.
    """
    per_replica = take_rows(loads / replicas, by_rank)
    average = loads.sum(axis=1) / replicas.sum(axis=1)
    return 1.0 - (per_replica / average[:, None]).mean(axis=0)


def balance_sets(pattern: BoolArray, idle: FloatArray, slots: IntArray) -> BoolArray:
    """Return `pattern` `(E, N)` with host sets assigned to its rows again, so that the nodes' idleness becomes even.

    A row gets a set of the same size that the pattern has already; sets may then occur more or less often. No node gets
    more rows than its `slots` `(N,)`. If the nodes do not become more even, the pattern is returned unchanged.

    Args:
        idle: `(E,)` the idleness of each row's expert, as from `compute_idleness`.
    """
    sets, set_of = distinct_rows(pattern)
    sizes = sets.sum(axis=1)
    evened = pattern
    for size in np.unique(sizes):
        choices = np.flatnonzero(sizes == size)
        rows = np.flatnonzero(np.isin(set_of, choices))
        if choices.size > 1:
            evened = _reassign_sets(evened, rows, sets[choices], idle, slots)
    return evened if _unevenness(evened, idle) < _unevenness(pattern, idle) else pattern


def _reassign_sets(pattern: BoolArray, rows: IntArray, sets: BoolArray, idle: FloatArray, slots: IntArray) -> BoolArray:
    """Return `pattern` with the `sets` `(S, N)`, all of one size, assigned to the `rows` again, the idlest row first.

    Each row gets the set of nodes with the least idleness so far; a set may go to several rows. If the slots do not
    suffice, the pattern is returned unchanged.
    """
    shared = pattern.copy()
    shared[rows] = False
    free = (slots - shared.sum(axis=0)).tolist()
    so_far = idle @ shared
    members, nodes_of = sets.astype(np.float64), [np.flatnonzero(nodes).tolist() for nodes in sets]
    size = len(nodes_of[0])
    fits = _find_fitting_sets(sets, free)
    fitting = members[fits]
    chosen: list[int] = []
    order = rows[np.argsort(-idle[rows], kind="stable")]
    for idle_row in idle[order].tolist():
        if not fits.size:
            return pattern
        # For a row with more work than average, this is the set with the most idleness.
        worth = idle_row * (fitting @ so_far) / size
        taken = int(fits[worth.argmin()])
        chosen.append(taken)
        so_far += idle_row * members[taken]
        for node in nodes_of[taken]:
            free[node] -= 1
        if not all(free[node] for node in nodes_of[taken]):
            fits = _find_fitting_sets(sets, free)
            fitting = members[fits]
    shared[order] = sets[chosen]
    return shared


def _find_fitting_sets(sets: BoolArray, free: list[int]) -> IntArray:
    """Return the indices of the `sets` `(S, N)` of which every node has `free` slots."""
    return np.flatnonzero((sets <= (np.array(free) > 0)).all(axis=1))


def _unevenness(pattern: BoolArray, idle: FloatArray) -> float:
    """Return the difference between the idlest and the busiest node, by the sum of `idle` `(E,)` over their rows."""
    by_node = idle @ pattern
    return float(np.ptp(by_node).round(9))
