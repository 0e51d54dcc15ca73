"""A tiny GPT with layers that tensor parallelism can split, and its wrapping and training."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

# B samples, T positions, D width, V vocabulary
VOCABULARY, T, D, HEADS = 12, 6, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        normed = self.norm1(x)
        # A tensor rank has some of the heads.
        q, k, v = (one(normed).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dtype: torch.dtype = torch.float64) -> GPT:
    """Return the same model on every rank."""
    torch.manual_seed(4)
    return GPT().to(dtype)


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Wrap the model as a user would: tensor parallelism if the mesh has several tensor ranks, then FSDP2."""
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {n: RowwiseParallel() for n in ("out", "down")}
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], plan)
    if mesh["shard"].size() > 1:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["shard"])
    return model


def batch(step: int, samples: int) -> torch.Tensor:
    """Return tokens, each with its successor."""
    return torch.randint(0, VOCABULARY, (samples, T + 1), generator=torch.Generator().manual_seed(step))


def loss_sum(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # foreach needs all parameters on one mesh, and Adam would amplify a gradient that is zero except for rounding.
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
