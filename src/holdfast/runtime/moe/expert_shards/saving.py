"""Experts in checkpoints: named by layer and expert, not by rank, so that every world can read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from holdfast.planning.moving.transfers import choose_senders
from holdfast.runtime.moe.expert_shards.shards import ExpertShards, LayerSpec
from holdfast.runtime.moe.hosts import Placement, count_replicas
from holdfast.runtime.state.tree import dtype_of


def assign_savers(placement: Placement, experts: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (layer, expert) pairs that each rank saves: every expert once, evenly over its hosts. Pure.

    Args:
        placement: per layer and rank.
        experts: number of experts of each layer.
    """
    have = count_replicas(placement, experts) > 0
    layer, expert = np.nonzero(have.any(axis=2))
    chosen = choose_senders(have[layer, expert])
    ranks = have.shape[2]
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for number, name, rank in zip(layer, expert, chosen, strict=True):
        pairs[int(rank)].append((int(number), int(name)))
    return tuple(tuple(mine) for mine in pairs)


def named_rows(shards: ExpertShards, pairs: Iterable[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return the live rows of experts on this rank, by names that are the same in every world.

    To save, pass the pairs from `assign_savers`. To load, pass all pairs of this rank: `torch.distributed.checkpoint`
    fills the rows in place. Optimizer values that all rows share (`step`) are not included: save
    `ExpertShards.describe` with the dense state, and pass it to `ExpertShards.set_optimizer_state` before the rows are
    loaded.
    """
    named: dict[str, torch.Tensor] = {}
    for layer, expert in pairs:
        for row in shards.describe(layer).rows:
            named[row_name(layer, expert, row.name)] = shards.row(layer, expert, row)
    return named


def row_name(layer: int, expert: int, row: str) -> str:
    """Return the name of one row in every checkpoint."""
    return f"experts:{layer}.{expert}.{row}"


def empty_rows(
    specs: Sequence[LayerSpec], wanted: Sequence[Sequence[int]], device: torch.device
) -> list[dict[tuple[int, str], torch.Tensor]]:
    """Allocate memory for the rows of missing experts, per layer by (expert, name of the row)."""
    return [
        {
            (expert, row.name): torch.empty(row.shape, dtype=dtype_of(row.dtype), device=device)
            for expert in experts
            for row in spec.rows
        }
        for spec, experts in zip(specs, wanted, strict=True)
    ]


def hosted_pairs(shards: ExpertShards) -> tuple[tuple[int, int], ...]:
    """Return the (layer, expert) pairs on this rank."""
    return tuple((layer, expert) for layer, experts in enumerate(shards.hosted) for expert in experts)
