"""Several workers per node: what is placed on a node is spread evenly over its workers.

Axes: L layers, E experts, N nodes, W workers.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, indices
from holdfast.planning.moving.migration import assign_roles


def split_over_workers(counts: IntArray, workers: IntArray, held: IntArray | None = None) -> IntArray:
    """Return replicas per worker `(L, E, W)` from replicas per node `counts` `(L, E, N)`.

    `workers` `(N,)` is the number of workers of each node; the workers of node 0 come first, then node 1's, ...
    Each node's replicas are dealt out expert by expert: within a node the workers' slots differ by at most
    one, and so does each expert's number of replicas per worker. With `held` `(L, E, W)`, what the workers hold now,
    the shares of each node go to those of its workers that have to load the fewest experts.
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
