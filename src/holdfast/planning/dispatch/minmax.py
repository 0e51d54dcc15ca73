"""Capacities that even out ranks instead of replicas (DESIGN, Token dispatch: the min-max flow over ranks).

Axes: E experts, N ranks.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices
from holdfast.planning.dispatch.interval import Interval
from holdfast.planning.dispatch.schedule import DispatchScheme, Match, Surplus, replica_capacities
from holdfast.planning.solvers import Flow, largest_flow


class MinMax(DispatchScheme):
    """Min-max capacities, filled by the interval scheme."""

    name = "minmax"

    def capacities(self, tokens: IntArray, replicas: IntArray) -> IntArray:
        """See `DispatchScheme.capacities`."""
        return minmax_capacities(tokens, replicas)

    def match(self, surplus: Surplus) -> Match:
        """See `DispatchScheme.match`."""
        return Interval().match(surplus)


def minmax_capacities(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Return tokens per expert and rank `(E, N)` such that the busiest rank computes as few as possible.

    `tokens` and `replicas` `(E, N)` are as for `dispatch_schedule`. An expert's tokens are split freely over its
    ranks, so a replica may get more than ceil(t / r) tokens.

    Newton's method on minimum cuts finds the least load. If a limit is too low, some experts have only full hosts. The
    mean load of these hosts is the next limit to try. It never exceeds the least load.
    """
    demand = tokens.sum(axis=1)
    even = replica_capacities(tokens, replicas)
    limit, enough = -(-int(demand.sum()) // tokens.shape[1]), int(even.sum(axis=0).max())
    while limit < enough:
        flow = _find_flow(demand, replicas > 0, limit)
        if flow.total == int(demand.sum()):
            return _as_capacities(flow, replicas > 0)
        crowded, full = flow.reachable[: demand.size], flow.reachable[demand.size :][: tokens.shape[1]]
        limit = -(-int(demand[crowded].sum()) // int(full.sum()))
    return even


def _find_flow(demand: IntArray, hosts: BoolArray, limit: int) -> Flow:
    """Return the largest flow from experts with `demand` `(E,)` to their `hosts` `(E, N)`, at most `limit` per rank."""
    experts, ranks = hosts.shape
    source, sink = experts + ranks, experts + ranks + 1
    expert, rank = np.nonzero(hosts)
    edges = [
        (np.full(experts, source), indices(experts), demand),
        (expert, experts + rank, demand[expert]),
        (experts + indices(ranks), np.full(ranks, sink), np.full(ranks, limit)),
    ]
    tails, heads, capacity = (np.concatenate(column) for column in zip(*edges, strict=True))
    return largest_flow(tails, heads, capacity, source, sink)


def _as_capacities(flow: Flow, hosts: BoolArray) -> IntArray:
    """Return the flow that `_find_flow` sends from experts to ranks as a table `(E, N)`; 0 if not a host."""
    experts = hosts.shape[0]
    expert, rank = np.nonzero(hosts)
    capacities = np.zeros(hosts.shape, dtype=np.int64)
    capacities[expert, rank] = flow.edges[experts : experts + expert.size]
    return capacities
