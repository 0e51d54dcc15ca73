"""Enumerate every placement of a small cluster, as an oracle for the planner.

Nodes are interchangeable, so a placement is a multiset of expert sets, one per node. With replicas r, exactly those
patterns are reachable in which each expert has at most r hosts. Replicas beyond that are doubled on a host or add a
host, which never lowers the recovery probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations, combinations_with_replacement
from math import comb

import numpy as np


@dataclass(frozen=True, slots=True)
class Patterns:
    """All distinct patterns of `nodes` x `slots` x `experts`."""

    #: `(P, E)` hosts per expert, ascending.
    hosts: np.ndarray
    #: `(P, N + 1)` recovery probability by number of lost nodes.
    recovery: np.ndarray

    def curves(self, replicas: np.ndarray, threshold: int) -> np.ndarray:
        """Return the curves `[*, N + 1]` reachable with *replicas* `(E,)` and *threshold* or more hosts per expert."""
        most = np.minimum(np.sort(replicas), self.recovery.shape[1] - 1)
        within = (self.hosts <= most).all(axis=1) & (self.hosts[:, 0] >= threshold)
        return self.recovery[within]


@cache
def all_patterns(nodes: int, slots: int, experts: int) -> Patterns:
    """Enumerate the patterns: a few million at most for 5 nodes, 3 slots and 6 experts."""
    held = np.array(
        [sum(1 << e for e in chosen) for size in range(1, slots + 1) for chosen in combinations(range(experts), size)],
        dtype=np.uint16,
    )
    choices = np.array(list(combinations_with_replacement(range(len(held)), nodes)), dtype=np.uint8)
    per_node = held[choices]
    hosts = np.sort(np.stack([((per_node >> e) & 1).sum(axis=1) for e in range(experts)], axis=1), axis=1)
    survived = np.zeros((len(per_node), nodes + 1), dtype=np.int64)
    for alive in range(1 << nodes):
        members = [node for node in range(nodes) if alive >> node & 1]
        union = np.bitwise_or.reduce(per_node[:, members], axis=1) if members else np.zeros(len(per_node), np.uint16)
        survived[:, nodes - len(members)] += union == (1 << experts) - 1
    rows = np.unique(np.concatenate([hosts, survived], axis=1), axis=0)
    number = np.array([comb(nodes, lost) for lost in range(nodes + 1)])
    return Patterns(rows[:, :experts], rows[:, experts:] / number)


def all_allocations(nodes: int, slots: int, experts: int, threshold: int) -> list[np.ndarray]:
    """Return every ascending r `(E,)` that sums to nodes * slots, with all entries >= *threshold*."""

    def extend(done: list[int], left: int, places: int) -> list[list[int]]:
        low = done[-1] if done else threshold
        if places == 1:
            return [[*done, left]] if left >= low else []
        return [row for r in range(low, left // places + 1) for row in extend([*done, r], left - r, places - 1)]

    return [np.array(row) for row in extend([], nodes * slots, experts)]
