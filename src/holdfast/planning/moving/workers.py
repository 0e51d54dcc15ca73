"""Several workers per node: the replicas of a node are spread evenly over its workers.

Axes: L layers, E experts, N nodes, W workers.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, indices
from holdfast.planning.moving.migration import assign_roles


def split_over_workers(counts: IntArray, workers: IntArray, held: IntArray | None = None) -> IntArray:
    """Return replicas per worker `(L, E, W)` from replicas per node `counts` `(L, E, N)`.

    Replicas are dealt expert by expert. Within a node the workers' slots differ by at most one, and so does each
    expert's number of replicas per worker.

    Args:
        counts: Replicas per node.
        workers: `(N,)` the number of workers of each node. The workers of node 0 come first, then those on node 1, and
            so on.
        held: `(L, E, W)` replicas that the workers hold now. If given, each share of a node goes to the worker that has
            to load the fewest experts.
    """
    parts = [_deal_node(counts[:, :, node], int(number)) for node, number in enumerate(workers)]
    if held is not None:
        mine = np.split(held, np.cumsum(workers)[:-1], axis=2)
        parts = [part[:, :, assign_roles(have, part)] for have, part in zip(mine, parts, strict=True)]
    return np.concatenate(parts, axis=2)


def _deal_node(counts: IntArray, workers: int) -> IntArray:
    """Deal one node's `(L, E)` replicas to its workers in turn, expert by expert, `(L, E, W)`."""
    stop = np.cumsum(counts, axis=1)
    start = stop - counts
    turn = indices(workers)
    # Worker w gets the replicas number w, w + W, w + 2W, ... of the node's row.
    upto_stop = (stop[:, :, None] - turn + workers - 1) // workers
    upto_start = (start[:, :, None] - turn + workers - 1) // workers
    return upto_stop - upto_start
