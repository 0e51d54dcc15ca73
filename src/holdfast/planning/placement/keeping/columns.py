"""Which node takes which column of a pattern of disjoint node groups, so that few experts move.

Nodes of a group have equal columns: what counts is which group a node is of, and groups are few. What the nodes hold
already tells the groups that they were of: the smallest of the experts' host sets.

Axes: L layers, E experts, N nodes, K kinds of columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import BoolArray, IntArray, distinct_rows
from holdfast.planning.survival.hitting import smallest_sets


def columns_by_groups(pattern: BoolArray, replicas: IntArray, held: BoolArray) -> BoolArray | None:
    """Return the `pattern` `(E, N)` with its columns given to the nodes of the groups that they come from.

    Groups correspond by how many nodes their rarest expert has `replicas` `(L, E)` for, and by their size. `held`
    `(L, E, N)` who holds what. None where the host sets of either are not disjoint. Nodes may take any column.
    """
    nodes = held.shape[2]
    table = held.reshape(-1, nodes)
    now, then = smallest_sets(table[table.any(axis=1)]), smallest_sets(pattern)
    if any(int(sets.sum(axis=0).max(initial=0)) > 1 for sets in (now, then)):
        return None
    now = now[np.lexsort((now.sum(axis=1), _rarest(now, table, replicas.ravel())))]
    then = then[np.argsort(then.sum(axis=1), kind="stable")]
    chosen = np.full(nodes, -1, dtype=np.int64)
    taken = np.zeros(nodes, dtype=np.bool_)
    for old, new in zip(now, then, strict=False):
        columns = np.flatnonzero(new)
        members = np.flatnonzero(old)[: columns.size]
        chosen[members] = columns[: members.size]
        taken[columns[: members.size]] = True
    chosen[chosen < 0] = np.flatnonzero(~taken)
    return pattern[:, chosen]


def _rarest(sets: BoolArray, table: BoolArray, replicas: IntArray) -> IntArray:
    """Return the fewest `replicas` `(L E,)` of any expert whose hosts, of the `table` `(L E, N)`, are just one of the
    `sets` `(S, N)`, for each of these."""
    inside = table.astype(np.float32) @ sets.T.astype(np.float32)
    same = (inside == sets.sum(axis=1)) & (inside == table.sum(axis=1)[:, None])
    return np.where(same, replicas[:, None], np.iinfo(np.int64).max).min(axis=0)


def columns_by_copies(pattern: BoolArray, rows: IntArray, held: BoolArray) -> BoolArray:
    """Return the `pattern` `(E, N)` with its columns given to the nodes that hold most of what is in them already.

    `rows` `(L, E)` says which row of the pattern each expert has; `held` `(L, E, N)` who holds what. Nodes may take any
    column.
    """
    kinds, kind_of = distinct_rows(np.ascontiguousarray(pattern.T))
    nodes = held.shape[2]
    hosts = kinds.T[rows].reshape(-1, len(kinds)).astype(np.float32)
    # [N, K]: how many copies a node keeps as a node of this kind; exact in float32 up to 2**24.
    kept = held.reshape(-1, nodes).astype(np.float32).T @ hosts
    kept[np.arange(nodes), kind_of] += 0.5  # of equals, what it is
    return kinds[_assign(kept, np.bincount(kind_of))].T


def _assign(kept: NDArray[np.float32], room: IntArray) -> IntArray:
    """Return a kind for each node `(N,)`, as many of each as there is `room` `(K,)`: the greatest of `kept` `(N, K)`
    first."""
    nodes, kinds = kept.shape
    chosen = np.full(nodes, -1, dtype=np.int64)
    left = room.tolist()
    for place in np.argsort(-kept, axis=None, kind="stable").tolist():
        node, kind = divmod(place, kinds)
        if chosen[node] < 0 and left[kind]:
            chosen[node] = kind
            left[kind] -= 1
    return chosen
