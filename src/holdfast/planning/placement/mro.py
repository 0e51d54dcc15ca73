"""Maximum rank overlap (Lazarus, 4.1 and Theorem 1), with aligned node groups and a true guarantee.

Experts sorted by replicas form groups of c experts. Each expert group has one node group, disjoint from the others,
with as many nodes as the group's rarest expert has replicas. Each node of a group holds the whole expert group. So a
layer survives while every node group has a live node. Two things go beyond the paper (ERRATA, Lazarus 1 to 3):

- Groups are aligned across layers. The `core` of node group g is the set of nodes that it has in every layer, as many
  as in the layer with the fewest. Nodes of a group beyond its core come from the remaining nodes. So the whole model
  survives while every core has a live node, instead of every group of every layer.
- The last group may be too small, since the number of nodes cuts it off. `enforce_guarantee` mends it.

Axes: L layers, E experts, N nodes, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import IntArray, indices, put_rows
from holdfast.planning.placement.fill import deal_replicas
from holdfast.planning.placement.guarantee import enforce_guarantee
from holdfast.planning.placement.strategy import PlacementProblem


@dataclass(frozen=True, slots=True)
class Mro:
    """MRO with groups of `width` experts; by default the width with the largest area, width x nodes."""

    width: int | None = None
    name: str = "mro"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`; place node groups, deal the other replicas, then enforce the guarantee."""
        width = self.width or default_width(problem.slots)
        counts = place_groups(problem, width, group_sizes(problem, width))
        counts = deal_replicas(counts, problem.replicas, problem.slots)
        return enforce_guarantee(counts, problem.slots, problem.fault_threshold)


def default_width(slots: IntArray) -> int:
    """Return the default number c of experts per group: the slots of a node, if all have the same.

    Otherwise it is the c with the largest product of c and the number of nodes that have at least c slots.
    """
    widths = np.unique(slots)
    areas = [int(width) * int((slots >= width).sum()) for width in widths]
    return int(widths[int(np.argmax(areas))])


def group_sizes(problem: PlacementProblem, width: int) -> IntArray:
    """Return nodes per layer and group, `(L, G)`: the replicas of each group's rarest expert, while nodes last.

    Groups have `width` experts, the rarest experts first. Only nodes with at least `width` slots count.
    """
    nodes = int((problem.slots >= width).sum())
    rarest = problem.ranked_replicas[:, ::width]
    before = np.cumsum(rarest, axis=1) - rarest
    return np.clip(nodes - before, 0, rarest)


def place_groups(problem: PlacementProblem, width: int, sizes: IntArray) -> IntArray:
    """Return replicas `(L, E, N)` of the groups alone, with `sizes` `(L, G)` nodes per group.

    Each node of a group gets one replica of each expert of the group. The caller must deal the remaining replicas.
    """
    layers, experts = problem.replicas.shape
    cores = sizes.min(axis=0)
    core_start = np.cumsum(cores) - cores
    extra = sizes - cores
    extra_start = int(cores.sum()) + np.cumsum(extra, axis=1) - extra
    position = indices(problem.nodes)
    by_rank = np.zeros((layers, experts, problem.nodes), dtype=np.bool_)
    for group in range(sizes.shape[1]):
        core = (position >= core_start[group]) & (position < core_start[group] + cores[group])
        start, stop = extra_start[:, group, None], (extra_start + extra)[:, group, None]
        inside = core | ((position >= start) & (position < stop))
        by_rank[:, group * width : (group + 1) * width, :] = inside[:, None, :]
    hosts = np.empty_like(by_rank)
    put_rows(hosts, problem.by_rank, by_rank)
    counts = hosts.astype(np.int64)
    if (problem.slots >= width).all():
        return counts
    # Every position in use must be a node with at least `width` slots.
    nodes = np.argsort(problem.slots < width, kind="stable")
    placed = np.empty_like(counts)
    placed[:, :, nodes] = counts
    return placed
