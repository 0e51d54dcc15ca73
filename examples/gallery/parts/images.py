"""Small images generated from their index, and a network that classifies them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

# B batch, C channels, S side in pixels, K kinds
KINDS = 4
SIDE = 12


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Stripes in one of `KINDS` directions under noise: sample i is (image `(1, S, S)`, its kind)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        kind = index % KINDS
        row_S, column_S = torch.arange(SIDE).float()[:, None], torch.arange(SIDE).float()[None, :]
        across = math.cos(math.pi * kind / KINDS) * row_S + math.sin(math.pi * kind / KINDS) * column_S
        phase = 2 * math.pi * torch.rand((), generator=drawn)
        return (torch.sin(across + phase) + torch.randn(SIDE, SIDE, generator=drawn))[None], kind


class _Residual(nn.Module):
    """Two convolutions, each with BatchNorm, added to the input."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.past = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x_BCSS: torch.Tensor) -> torch.Tensor:
        y_BCSS = F.relu(self.norm1(self.first(x_BCSS)))
        return F.relu(self.norm2(self.second(y_BCSS)) + self.past(x_BCSS))


class ResNet(nn.Module):
    """Three residual blocks; returns logits `(B, K)`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            _Residual(1, width, 1), _Residual(width, 2 * width, 2), _Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, KINDS)

    def forward(self, x_BCSS: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x_BCSS).mean((2, 3)))
