"""Placements of experts as plain tuples, as a generation's plan carries them. Pure functions.

Axes: L layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.planning import from_node_lists, node_lists
from holdfast.planning.arrays import IntArray

#: One layer: the experts of each rank, one entry per slot, repeats allowed.
LayerPlacement = Sequence[Sequence[int]]
#: All MoE layers, in the order of registration.
Placement = Sequence[LayerPlacement]


def count_layer_replicas(layer: LayerPlacement, experts: int) -> IntArray:
    """Return replicas per expert and rank, `(E, N)`, for one layer's placement over N ranks.

    Raises:
        ValueError: the placement names an unknown expert, or leaves one out.
    """
    named = [expert for held in layer for expert in held]
    if any(not 0 <= expert < experts for expert in named):
        raise ValueError(f"a placement names experts outside 0..{experts - 1}: {sorted(set(named))}")
    missing = sorted(set(range(experts)) - set(named))
    if missing:
        raise ValueError(f"experts {missing} live on no rank")
    return from_node_lists(layer, experts)


def count_replicas(placement: Placement, experts: Sequence[int]) -> IntArray:
    """Return replicas per layer, expert and rank, `(L, E, N)`; an expert may have no replica.

    E is the number of experts of the largest layer.

    Args:
        placement: the experts of each rank; a joiner has none.
        experts: the number of experts of each layer.
    """
    widest = max(experts, default=0)
    return np.stack([from_node_lists(layer, widest) for layer in placement])


def placement_from_counts(counts: IntArray) -> Placement:
    """Return the placement for replicas per layer, expert and rank, `(L, E, N)`; the inverse of `count_replicas`."""
    return tuple(tuple(tuple(held) for held in node_lists(layer)) for layer in counts)


def hosts_by_expert(layer: LayerPlacement) -> dict[int, tuple[int, ...]]:
    """Return the ranks that host each expert, ascending; experts without a host are left out."""
    found: dict[int, list[int]] = {}
    for rank, held in enumerate(layer):
        for expert in sorted(set(held)):
            found.setdefault(expert, []).append(rank)
    return {expert: tuple(ranks) for expert, ranks in sorted(found.items())}


def place_everywhere(experts: Sequence[int], ranks: int) -> Placement:
    """Return the placement of a fresh world, in which every rank has all experts."""
    return tuple(tuple(tuple(range(number)) for _ in range(ranks)) for number in experts)


def experts_of_rank(placement: Placement, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return one rank's distinct experts per layer, ascending."""
    return tuple(tuple(sorted(set(layer[rank]))) for layer in placement)
