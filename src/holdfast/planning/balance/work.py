"""The work of the nodes, and how busy the busiest node is.

The dispatcher spreads each expert's tokens evenly over its replicas. A layer takes as long as its busiest node.

Axes: L layers, E experts, N nodes (or GPUs, if work is counted per GPU).
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray


def busiest_tokens(counts: IntArray, loads: FloatArray) -> FloatArray:
    """Return tokens of the busiest node per layer `(L,)`, from replicas `counts` `(L, E, N)` and `loads` `(L, E)`.

    A layer is infinitely busy if one of its experts has tokens but no replica.
    """
    replicas = counts.sum(axis=2)
    homeless = ((replicas == 0) & (loads > 0)).any(axis=1)
    busiest = node_work(counts, work_per_replica(loads, replicas)).max(axis=1)
    return np.where(homeless, np.inf, busiest)


def work_per_replica(loads: FloatArray, replicas: IntArray) -> FloatArray:
    """Return each replica's share of its expert's tokens, `(L, E)`, from two `(L, E)`; 0 without replica."""
    return np.divide(loads, replicas, out=np.zeros(loads.shape), where=replicas > 0)


def node_work(counts: IntArray, work: FloatArray) -> FloatArray:
    """Return the tokens of each node `(L, N)`, from replicas `counts` `(L, E, N)` and `work` `(L, E)` per replica."""
    return np.matmul(work[:, None, :], counts.astype(np.float64))[:, 0, :]


def busiest_over_mean(counts: IntArray, loads: FloatArray) -> FloatArray:
    """Return the busiest node's work over the mean node's, per layer `(L,)`; 1 for layers without load."""
    mean = loads.sum(axis=1) / counts.shape[2]
    return np.divide(busiest_tokens(counts, loads), mean, out=np.ones(len(counts)), where=mean > 0)
