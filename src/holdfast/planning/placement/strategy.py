"""The input and the output of every placement strategy.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices, stable_argsort, take_rows
from holdfast.planning.balance.work import work_per_replica


@dataclass(frozen=True, kw_only=True)  # Without slots, so that cached properties work.
class PlacementProblem:
    """The replicas to place, the slots of the nodes, and what to consider.

    Every row of `replicas` sums to `slots.sum()`, and `fault_threshold` fits, as `allocate` ensures.
    """

    #: `(L, E)` replicas per layer and expert.
    replicas: IntArray
    #: `(N,)` slots per node, for one layer.
    slots: IntArray
    #: Each expert lives on at least this many distinct nodes.
    fault_threshold: int
    #: `(N,)` the rack of each node as 0, 1, ...; None if racks do not matter.
    racks: IntArray | None = None
    #: `(L, E, N)` replicas that the nodes hold now, 0 for joining nodes; None for a first placement.
    previous: IntArray | None = None
    #: `(N + 1,)` how much each number of lost nodes matters; None for the strategy's default.
    failure_weights: FloatArray | None = None
    #: `(N,)` how often each node fails, over the mean; None if nodes are alike.
    failure_rates: FloatArray | None = None
    #: `(L, E)` tokens that the experts get, each layer's sum above 0; None if only the replicas are known.
    loads: FloatArray | None = None

    @property
    def nodes(self) -> int:
        return self.slots.size

    @cached_property
    def by_rank(self) -> IntArray:
        """The experts of each layer, ordered by replicas, fewest first, `(L, E)`."""
        return stable_argsort(self.replicas)

    @cached_property
    def ranked_replicas(self) -> IntArray:
        """The replicas of the expert of each rank, ascending, `(L, E)`."""
        return take_rows(self.replicas, self.by_rank)

    @cached_property
    def work(self) -> FloatArray:
        """Each replica's tokens over the tokens of its layer's average slot, `(L, E)`; ones if the loads are not known.

        The values are rounded, so that equal loads are placed alike, whatever their scale.
        """
        if self.loads is None:
            return np.ones(self.replicas.shape)
        average = self.loads.sum(axis=1, keepdims=True) / int(self.slots.sum())
        work: FloatArray = work_per_replica(self.loads, self.replicas) / average
        return work.round(9)

    @cached_property
    def previous_hosts(self) -> BoolArray | None:
        """Whether each node holds each expert now, `(L, E, N)`; None for a first placement."""
        return None if self.previous is None else hosts_of(self.previous)


class Strategy(Protocol):
    """One way to place replicas, pure and deterministic."""

    @property
    def name(self) -> str:
        """The name that users give."""
        ...

    def place(self, problem: PlacementProblem) -> IntArray:
        """Return replicas `(L, E, N)`: summed over N the problem's replicas, summed over E its slots."""
        ...


def hosts_of(counts: IntArray) -> BoolArray:
    """Return whether each node hosts each expert, `(..., E, N)`, from replicas `(..., E, N)`."""
    return counts > 0


def fewest_hosts(counts: IntArray) -> int:
    """Return the smallest number of distinct nodes that any expert of any layer lives on."""
    return int(hosts_of(counts).sum(axis=-1).min())


def node_lists(counts: IntArray) -> list[list[int]]:
    """Return one layer's placement `(E, N)` as each node's experts, one entry per slot, ascending."""
    experts = indices(counts.shape[0])
    return [[int(expert) for expert in np.repeat(experts, column)] for column in counts.T]


def from_node_lists(lists: Sequence[Sequence[int]], experts: int) -> IntArray:
    """Return replicas `(E, N)` from each node's experts (the inverse of `node_lists`)."""
    return np.stack([np.bincount(np.asarray(held, dtype=np.int64), minlength=experts) for held in lists], axis=1)
