"""Small models with MoE layers, random placements, and the results of one process on the same micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.expert_shards.binding import bind_layers
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.gates.gate import TopKGate
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import moe_layers, serve_round
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.moe.layer.rounds import StepState

# The first optimizer imports torch modules for seconds, so make one before the fork.
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()

DIM, HIDDEN = 8, 16
#: Experts and top-k of the model's layers.
LAYERS = ((6, 2), (3, 1))
EXPERTS = tuple(experts for experts, _ in LAYERS)


class SmallModel(nn.Module):
    """Two MoE layers with residuals, behind a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.layers())

    def layers(self) -> Iterable[MoE]:
        """Make both layers."""
        return (MoE(DIM, HIDDEN, experts, k, aux_loss=0.01) for experts, k in LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        for block in self.blocks:
            x = x + block(x)
        return x


class RichModel(SmallModel):
    """The same with all features of a layer: other experts and gates, noise, capacity, shared experts."""

    def layers(self) -> Iterable[MoE]:
        """Make both layers."""
        (first, k), (second, _) = LAYERS
        gate = TopKGate(
            first, k, score="sigmoid", scale=1.5, groups=3, groups_kept=2, aux_loss=0.01, z_loss=0.001, bias_rate=0.01
        )
        yield MoE(DIM, HIDDEN, first, k, gated=True, gate=gate, jitter=0.1, shared=nn.Linear(DIM, DIM))
        factory = lambda dim, hidden: nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))  # noqa: E731
        yield MoE(DIM, HIDDEN, second, 1, expert=factory, capacity_factor=1.0, gate=TopKGate(second, 1, bias_rate=0.01))


def rich_model(dtype: torch.dtype = torch.float64) -> RichModel:
    """Return the same model every time."""
    torch.manual_seed(7)
    return RichModel().to(dtype)


def small_model(dtype: torch.dtype = torch.float64) -> SmallModel:
    """Return the same model every time."""
    torch.manual_seed(7)
    return SmallModel().to(dtype)


def batch(step: int, micro_batch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return tokens that depend only on step and micro-batch; skewed, so that some experts get few tokens or none."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    tokens = torch.randn(5, DIM, generator=generator, dtype=torch.float64)
    return (0.3 * tokens + torch.linspace(-1.0, 1.0, DIM, dtype=torch.float64) * (micro_batch % 3)).to(dtype)


def loss_of(model: SmallModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's loss, including the load-balancing loss."""
    out = model(tokens)
    aux = sum((layer.aux_loss for layer in moe_layers(model)), torch.zeros((), dtype=tokens.dtype))
    return out.square().mean() + aux


def random_placement(rng: np.random.Generator, ranks: int, least: int = 1) -> Placement:
    """Place every expert on at least `least` ranks; some ranks host no expert of a layer, and some repeat one."""
    layers = []
    for experts in EXPERTS:
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in range(experts):
            for rank in rng.choice(ranks, size=int(rng.integers(least, ranks + 1)), replace=False):
                held[int(rank)] += [expert] * int(rng.integers(1, 3))
        layers.append(tuple(tuple(sorted(mine)) for mine in held))
    return tuple(layers)


def settle(shards: ExpertShards, placement: Placement, rank: int, spare: int = 1) -> None:
    """Keep only this rank's experts of the placement, with room for `spare` more."""
    for layer, ranks in enumerate(placement):
        mine = sorted(set(ranks[rank]))
        shards.rearrange(layer, mine, rows=len(mine) + spare)


def run_rounds(
    comm: Communicator,
    model: SmallModel,
    state: StepState,
    gradients: ExpertGradients,
    step: int,
    micro_batches: int,
    places: int = 1,
) -> float:
    """Compute this rank's micro-batches, serve in surplus rounds, and return the sum of the losses.

    Args:
        places: the number of consecutive ranks that have the same micro-batches.
    """
    total, layers = 0.0, moe_layers(model)
    unit, units = comm.rank // places, comm.size // places
    for turn in range(-(-micro_batches // units)):
        number = turn * units + unit
        state.start_micro_batch(step, number)
        if number < micro_batches:
            loss = loss_of(model, batch(step, number))
            loss.backward()
            total += float(loss.detach())
        else:
            serve_round(layers)
        state.finish_micro_batch()
        gradients.collect()
    return total


def expert_tensors(layers: Sequence[MoE], of: str) -> dict[tuple[int, int, str], np.ndarray]:
    """Return copies of each hosted expert's weights ("data") or gradients ("grad")."""
    found: dict[tuple[int, int, str], np.ndarray] = {}
    for number, layer in enumerate(layers):
        for name, weight in layer.experts.weights().items():
            stack: Any = weight.grad if of == "grad" else weight.detach()
            for expert in layer.experts.hosted:
                found[number, expert, name] = stack[layer.experts.row(expert)].numpy().copy()
    return found


def bound(comm: Communicator, model: SmallModel, placement: Placement) -> tuple[StepState, ExpertGradients]:
    """Settle and bind a model that holds all experts."""
    layers = moe_layers(model)
    settle(ExpertShards(layers), placement, comm.rank)
    return bind_layers(layers, comm, placement), ExpertGradients(layers, placement, comm)
