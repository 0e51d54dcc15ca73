"""Capacities that even out ranks instead of replicas (DESIGN, Token dispatch: the min-max flow over ranks)."""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices
from holdfast.planning.dispatch import replica_capacities
from holdfast.planning.solvers import largest_flow


def minmax_capacities(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Return tokens per expert and rank `[E, N]` such that the busiest rank computes as few as possible.

    *tokens*, *replicas* `[E, N]` as for `dispatch_schedule`. An expert's tokens are split over its ranks at will, so
    a replica may get more than ceil(t / r) tokens. The least load is found by bisection over maximum flows.
    """
    demand = tokens.sum(axis=1)
    best = replica_capacities(tokens, replicas)
    low, high = -(-int(demand.sum()) // tokens.shape[1]), int(best.sum(axis=0).max())
    while low < high:
        middle = (low + high) // 2
        capacities = _flow(demand, replicas > 0, middle)
        if capacities is None:
            low = middle + 1
        else:
            best, high = capacities, middle
    return best


def _flow(demand: IntArray, hosts: BoolArray, limit: int) -> IntArray | None:
    """Return a split of *demand* `[E]` over the hosts `[E, N]` with no rank above *limit*, or None."""
    experts, ranks = hosts.shape
    source, sink = experts + ranks, experts + ranks + 1
    expert, rank = np.nonzero(hosts)
    edges = [
        (np.full(experts, source), indices(experts), demand),
        (expert, experts + rank, demand[expert]),
        (experts + indices(ranks), np.full(ranks, sink), np.full(ranks, limit)),
    ]
    tails, heads, capacity = (np.concatenate(column) for column in zip(*edges, strict=True))
    flow = largest_flow(tails, heads, capacity, source, sink)[experts : experts + expert.size]
    if int(flow.sum()) < int(demand.sum()):
        return None
    capacities = np.zeros(hosts.shape, dtype=np.int64)
    capacities[expert, rank] = flow
    return capacities
