"""Points on a ring, and the two networks of a GAN for them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

# B batch
NOISE = 4


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is (a point `(2,)` near the unit circle, noise `(NOISE,)` for generating a false point)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * torch.rand((), generator=drawn)
        point = torch.stack([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2, generator=drawn)
        return point, torch.randn(NOISE, generator=drawn)


def make_networks(width: int = 64) -> nn.ModuleDict:
    """Return a generator of points and a critic that distinguishes true points from generated ones."""
    generator = nn.Sequential(nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    critic = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2))
    generator.append(nn.Linear(width, 2))
    critic.append(nn.Linear(width, 1))
    return nn.ModuleDict({"generator": generator, "critic": critic})


def loss_of(networks: nn.ModuleDict, turn: str, real_B2: torch.Tensor, noise_BN: torch.Tensor) -> torch.Tensor:
    """Return the loss of the network that is updated in this turn."""
    made_B2 = networks["generator"](noise_BN)
    if turn == "generator":
        return F.softplus(-networks["critic"](made_B2)).mean()
    seen_real, seen_made = networks["critic"](real_B2), networks["critic"](made_B2.detach())
    return (F.softplus(-seen_real) + F.softplus(seen_made)).mean()
