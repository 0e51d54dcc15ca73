"""The best arrangement of node groups on many nodes of equal slots, chosen by the sizes of its groups alone.

Axes: L layers, E experts, N nodes, G groups of nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices
from holdfast.planning.placement.mro import group_sizes
from holdfast.planning.placement.strategy import PlacementProblem
from holdfast.planning.survival.disjoint import disjoint_sizes, losses_of_disjoint, survives_no_less
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.pattern import group_patterns

#: The most lost nodes that count in the choice; larger numbers have too little weight.
_MOST_LOST = 64


def best_groups(problem: PlacementProblem) -> BoolArray | None:
    """Return the best pattern `(E, N)` of disjoint host sets, rows by rank, or None.

    For every number of lost nodes, it survives at least as likely as MRO and spread. The result is None if sizes alone
    cannot show this: with uneven slots, too few nodes for MRO's groups, or racks.
    """
    slots = int(problem.slots.max())
    sizes = group_sizes(problem, slots)
    rarest = problem.ranked_replicas[:, ::slots]
    if problem.racks is not None or (problem.slots != slots).any() or (sizes != rarest).any():
        return None
    # The number of nodes that each group has in every layer decides what MRO survives.
    mro = sizes.min(axis=0)
    if int(mro.min()) < problem.fault_threshold or not survives_no_less(mro, _spread_run_sizes(problem, mro.size)):
        return None
    weights = problem.failure_weights
    if weights is None:
        weights = default_weights(problem.nodes)
    most_lost = min(problem.nodes, _MOST_LOST if problem.failure_weights is None else problem.nodes)
    best: tuple[float, BoolArray] | None = None
    for pattern in group_patterns(np.minimum(problem.ranked_replicas.min(axis=0), problem.nodes), problem.slots):
        found = disjoint_sizes(smallest_sets(pattern))
        if found is None or int(found.min()) < problem.fault_threshold or not survives_no_less(found, mro):
            continue
        cost = float(losses_of_disjoint(found, problem.nodes, most_lost).fatal @ weights[: most_lost + 1])
        if best is None or cost < best[0]:
            best = cost, pattern
    return None if best is None else best[1]


def _spread_run_sizes(problem: PlacementProblem, enough: int) -> IntArray:
    """Return the sizes of up to `enough` host sets of spread that share no node, smallest first.

    On nodes of equal slots, spread places each expert on a run of consecutive nodes on a ring. The run starts at the
    end of the previous one.
    """
    nodes = problem.nodes
    end = np.cumsum(problem.ranked_replicas, axis=1)
    length = np.minimum(problem.ranked_replicas, nodes)
    start = (end - problem.ranked_replicas) % nodes
    runs = np.unique(np.stack([length.ravel(), start.ravel()], axis=1), axis=0)
    taken = np.zeros(nodes, dtype=np.bool_)
    sizes: list[int] = []
    for size, first in runs.tolist():
        members = (first + indices(size)) % nodes
        if not taken[members].any():
            taken[members] = True
            sizes.append(size)
            if len(sizes) == enough:
                break
    return np.array(sizes, dtype=np.int64)
