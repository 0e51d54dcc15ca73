"""Assigns the columns of a pattern of disjoint node groups to nodes, so that few experts move.

The nodes of a group have equal columns. So only the group of each node matters, and groups are few. The previous groups
are the smallest host sets of the experts that nodes hold.

Axes: L layers, E experts, N nodes, K kinds of columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import BoolArray, IntArray, distinct_rows
from holdfast.planning.survival.hitting import smallest_sets


def columns_by_groups(pattern: BoolArray, replicas: IntArray, held: BoolArray) -> BoolArray | None:
    """Return the `pattern` `(E, N)` with its columns assigned to the nodes of the corresponding previous groups.

    Groups correspond by the `replicas` `(L, E)` of their rarest expert, and by their size. `held` `(L, E, N)` says
    which nodes hold an expert. The result is None if the old or the new host sets are not disjoint. Nodes may take any
    column.
    """
    nodes = held.shape[2]
    table = held.reshape(-1, nodes)
    now, then = smallest_sets(table[table.any(axis=1)]), smallest_sets(pattern)
    if any(int(sets.sum(axis=0).max(initial=0)) > 1 for sets in (now, then)):
        return None
    now = now[np.lexsort((now.sum(axis=1), _fewest_replicas(now, table, replicas.ravel())))]
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


def _fewest_replicas(sets: BoolArray, table: BoolArray, replicas: IntArray) -> IntArray:
    """Return the fewest replicas of an expert hosted by exactly each of the `sets` `(S, N)`, `(S,)`.

    `table` `(L E, N)` are the hosts of each expert, and `replicas` `(L E,)` its replicas. If no expert has exactly
    these hosts, the entry is the largest int64.
    """
    inside = table.astype(np.float32) @ sets.T.astype(np.float32)
    same = (inside == sets.sum(axis=1)) & (inside == table.sum(axis=1)[:, None])
    return np.where(same, replicas[:, None], np.iinfo(np.int64).max).min(axis=0)


def columns_by_copies(pattern: BoolArray, rows: IntArray, held: BoolArray) -> BoolArray:
    """Return the `pattern` `(E, N)` with its columns assigned to the nodes that already hold most of their experts.

    `rows` `(L, E)` is the row of each expert; `held` `(L, E, N)` says which nodes hold it. Nodes may take any column.
    """
    kinds, kind_of = distinct_rows(np.ascontiguousarray(pattern.T))
    nodes = held.shape[2]
    hosts = kinds.T[rows].reshape(-1, len(kinds)).astype(np.float32)
    # [N, K] counts the copies that a node keeps as a node of this kind; exact in float32 up to 2**24.
    kept = held.reshape(-1, nodes).astype(np.float32).T @ hosts
    kept[np.arange(nodes), kind_of] += 0.5  # Among equals, a node keeps its kind.
    return kinds[_assign_kinds(kept, np.bincount(kind_of))].T


def _assign_kinds(kept: NDArray[np.float32], room: IntArray) -> IntArray:
    """Return the kind of each node `(N,)`, with `room` `(K,)` nodes for each kind.

    The greatest entry of `kept` `(N, K)` is assigned first.
    """
    nodes, kinds = kept.shape
    chosen = np.full(nodes, -1, dtype=np.int64)
    left = room.tolist()
    for place in np.argsort(-kept, axis=None, kind="stable").tolist():
        node, kind = divmod(place, kinds)
        if chosen[node] < 0 and left[kind]:
            chosen[node] = kind
            left[kind] -= 1
    return chosen
