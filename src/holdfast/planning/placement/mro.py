"""Maximum rank overlap (Lazarus, 4.1 and Theorem 1), with aligned node groups and a true guarantee.

Experts sorted by replicas form groups of c; the nodes form one disjoint group per expert group, as large as its rarest
expert has replicas, and each node of a group holds the whole expert group. So the layer lives while every node group
has a live node. Two things go beyond the paper (ERRATA, Lazarus 1 to 3):

- Groups are aligned across layers. Node group g has a `core`, the nodes it has in every layer (as many as the layer
  with the fewest); what a layer has beyond the core comes from the nodes left over. Then the whole model lives
  while every core has a live node, instead of every group of every layer.
- The last group, cut off by the number of nodes, may be too small: `with_guarantee` mends that.

Axes: L layers, E experts, N nodes, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import IntArray, indices, put_rows
from holdfast.planning.placement.fill import deal
from holdfast.planning.placement.guarantee import with_guarantee
from holdfast.planning.placement.strategy import PlacementProblem


@dataclass(frozen=True, slots=True)
class Mro:
    """MRO with expert groups of `width` experts; by default the width whose rectangle (width x nodes) is largest."""

    width: int | None = None
    name: str = "mro"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`."""
        width = self.width or default_width(problem.slots)
        counts = place_groups(problem, width, group_sizes(problem, width))
        counts = deal(counts, problem.replicas, problem.slots)
        return with_guarantee(counts, problem.slots, problem.fault_threshold)


def default_width(slots: IntArray) -> int:
    """Return the number c of experts a group's nodes hold: the common slots, or the c with the most c x nodes."""
    widths = np.unique(slots)
    areas = [int(width) * int((slots >= width).sum()) for width in widths]
    return int(widths[int(np.argmax(areas))])


def group_sizes(problem: PlacementProblem, width: int) -> IntArray:
    """Return nodes per group and layer, `(L, G)`: the replicas of each group's rarest expert, while nodes last."""
    nodes = int((problem.slots >= width).sum())
    rarest = problem.ranked_replicas[:, ::width]
    before = np.cumsum(rarest, axis=1) - rarest
    return np.clip(nodes - before, 0, rarest)


def place_groups(problem: PlacementProblem, width: int, sizes: IntArray) -> IntArray:
    """Return replicas `(L, E, N)` of the groups alone, with `sizes` `(L, G)` nodes per group: one of each expert of the
    group on each node of the group. What is left of the replicas is still to be dealt."""
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
    # Position p of the pattern is a node with at least `width` slots, for all positions in use.
    nodes = np.argsort(problem.slots < width, kind="stable")
    placed = np.empty_like(counts)
    placed[:, :, nodes] = counts
    return placed
