"""Patterns: a minimal set of hosts for each expert, the same in all layers.

If experts are ranked by their replicas, rank i has at least `profile[i]` replicas in every layer. A pattern of hosts
`(E, N)` within that profile fits every layer at once: row i is for the layer's expert of rank i. The whole model then
survives every loss that the pattern survives. So the joint problem over layers becomes the problem of one layer.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices, take_rows
from holdfast.planning.survival.hitting import smallest_sets

#: The most ways considered to distribute the missing experts among groups.
_MOST_WAYS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The bounds of a pattern: which hosts each expert may have, `(E, N)`."""

    #: `(E,)` most hosts per expert.
    most: IntArray
    #: Fewest hosts of any expert.
    threshold: int
    #: `(N,)` most experts per node.
    slots: IntArray


def group_patterns(profile: IntArray, slots: IntArray) -> list[BoolArray]:
    """Return the patterns of disjoint node groups worth a try, `(E, N)` each.

    There are several for every width c of some node's slots. The expert group that is not full may be at any position
    (MRO's is last), or several groups may be incomplete. Node groups are as large as their rarest expert allows, and
    even if there are too few nodes.
    """
    return [
        disjoint_groups(profile, starts, slots)
        for width in np.unique(slots)
        for starts in _group_starts(profile.size, int(width))
    ]


def disjoint_groups(profile: IntArray, starts: IntArray, slots: IntArray) -> BoolArray:
    """Return the pattern `(E, N)` with one node group per expert group, each as large as nodes and replicas allow.

    `profile` `(E,)` are the most hosts of each expert, by rank, and `starts` the first ranks of the expert groups. A
    group has at most as many nodes as its first expert has hosts. The smallest group is served first. Only nodes with
    enough `slots` `(N,)` for the largest expert group are used.
    """
    stops = np.append(starts[1:], profile.size)
    nodes = np.flatnonzero(slots >= (stops - starts).max())
    sizes = _share_nodes(profile[starts], nodes.size)
    ends = np.cumsum(sizes)
    pattern = np.zeros((profile.size, slots.size), dtype=np.bool_)
    for start, stop, first, last in zip(starts, stops, ends - sizes, ends, strict=True):
        pattern[start:stop, nodes[first:last]] = True
    return pattern


def _group_starts(experts: int, width: int) -> list[IntArray]:
    """Return the first ranks of the groups, for each way to divide the experts.

    The ways are: the short group at each position, groups of sizes as equal as possible, and, while they are few, all
    other ways to distribute the missing experts.
    """
    full, short = divmod(experts, width)
    if not short:
        return [np.arange(full, dtype=np.int64) * width]
    groups = full + 1
    even = np.diff(indices(groups + 1) * experts // groups)
    sizes = [np.where(indices(groups) == place, short, width) for place in range(groups)]
    sizes += [even, even[::-1], *_uneven_group_sizes(groups, width, groups * width - experts)]
    starts = [tuple((np.cumsum(size) - size).tolist()) for size in sizes]
    return [np.array(start, dtype=np.int64) for start in dict.fromkeys(starts)]


def _uneven_group_sizes(groups: int, width: int, lacking: int) -> list[IntArray]:
    """Return the possible sizes of `groups` that lack `lacking` experts in total.

    A size is from one to `width` experts. The result has all ways, or none if there are too many.
    """
    ways: list[list[int]] = [[]]
    for place in range(groups):
        ways = [
            [*way, lack]
            for way in ways
            for lack in range(min(width - 1, lacking - sum(way)) + 1)
            if sum(way) + lack + (groups - place - 1) * (width - 1) >= lacking
        ]
        if len(ways) > _MOST_WAYS:
            return []
    return [width - np.array(way, dtype=np.int64) for way in ways]


def _share_nodes(wanted: IntArray, nodes: int) -> IntArray:
    """Share `nodes` among the groups: at most `wanted` each, with the smallest as large as possible."""
    sizes = np.zeros_like(wanted)
    left = nodes
    for place, group in enumerate(np.argsort(wanted, kind="stable")):
        sizes[group] = min(int(wanted[group]), left // (wanted.size - place))
        left -= int(sizes[group])
    return sizes


def common_pattern(counts: IntArray, by_rank: IntArray) -> BoolArray:
    """Return the hosts `(E, N)` that the expert of each rank has in every layer of a placement `(L, E, N)`.

    `by_rank` `(L, E)` are the experts of each layer in the order of their ranks.
    """
    return np.logical_and.reduce(take_rows(counts > 0, by_rank), axis=0)


def complete_pattern(pattern: BoolArray, room: Room) -> BoolArray | None:
    """Return `pattern` with hosts added while there is room, experts below the threshold first.

    The result is None if an expert stays below the threshold. A trade might help, but other patterns will do.
    """
    pattern = pattern.copy()
    free = room.slots - pattern.sum(axis=0)
    for goal in (np.minimum(room.most, room.threshold), room.most):
        for rank in np.flatnonzero(pattern.sum(axis=1) < goal):
            missing = int(goal[rank] - pattern[rank].sum())
            space = np.where(pattern[rank], 0, free)
            nodes = np.argsort(-space, kind="stable")[:missing]
            nodes = nodes[space[nodes] > 0]
            pattern[rank, nodes] = True
            free[nodes] -= 1
    return pattern if (pattern.sum(axis=1) >= room.threshold).all() else None


def trim_pattern(pattern: BoolArray, threshold: int) -> BoolArray:
    """Return `pattern` without the hosts that recovery does not need; it survives the same losses.

    If an expert's hosts include all hosts of another expert, it is safe whenever the other one is. So the other one's
    hosts are enough for it, if they are at least `threshold` nodes. The migration can use the freed slots as it needs.
    """
    smallest = smallest_sets(pattern[pattern.sum(axis=1) >= threshold])
    if not len(smallest):
        return pattern.copy()
    # [E, sets] counts the nodes of a set that are not hosts of an expert.
    outside = (~pattern).astype(np.float32) @ smallest.T.astype(np.float32)
    inside = outside == 0
    trimmed = pattern.copy()
    only = inside.sum(axis=1) == 1
    trimmed[only] = smallest[inside[only].argmax(axis=1)]
    # An expert with several such sets takes the one of the nodes with the fewest experts so far.
    several = np.flatnonzero(inside.sum(axis=1) > 1)
    members, size = smallest.astype(np.float64), smallest.sum(axis=1)
    crowd = members @ (trimmed.sum(axis=0) - trimmed[several].sum(axis=0)) / size
    share = (members @ members.T) / size
    for row in several.tolist():
        chosen = int(np.where(inside[row], crowd, np.inf).argmin())
        trimmed[row] = smallest[chosen]
        crowd += share[chosen]
    return trimmed
