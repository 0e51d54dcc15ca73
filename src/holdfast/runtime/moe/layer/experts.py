"""Experts as rows of stacked weights: the parameters stay the same objects while experts come and go.

R rows (room for experts on this rank), D model dimension, H hidden size, A assignments, sorted by row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.runtime.tensors import apply, integers, pieces

Activation = Callable[[torch.Tensor], torch.Tensor]

#: grouped_mm wants every matrix row to begin at a multiple of this.
_ALIGNMENT_BYTES = 16
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


class Experts(nn.Module):
    """The experts that live on this rank. Replicas of one expert share one row; rows not in use are zero."""

    def __init__(self, dim: int, hidden: int, experts: int, activation: Activation, *, seed: int, layer: int) -> None:
        super().__init__()
        self.dim = dim
        self.hidden = hidden
        self.experts = experts
        self.activation = activation
        #: Expert of each row, -1 for a row not in use.
        self.row_experts: tuple[int, ...] = tuple(range(experts))
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        with torch.no_grad():
            for expert in range(experts):
                init_expert(self.w1[expert], self.w2[expert], seed=seed, layer=layer, expert=expert)

    @property
    def rows(self) -> int:
        """How many experts there is room for."""
        return len(self.row_experts)

    @property
    def hosted(self) -> tuple[int, ...]:
        """The experts that live here, ascending."""
        return tuple(sorted(expert for expert in self.row_experts if expert >= 0))

    def row(self, expert: int) -> int:
        """Return the row of an expert.

        Raises:
            ValueError: it does not live here.
        """
        return self.row_experts.index(expert)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by name, `(R, ...)` each."""
        return {"w1": self.w1, "w2": self.w2}

    def forward(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Compute each row's tokens with its weights, in the tokens' dtype.

        Args:
            tokens_AD: sorted by row.
            row_ends_R: int32, where each row's tokens end.
        """
        dtype = tokens_AD.dtype
        with torch.autocast(tokens_AD.device.type, enabled=False):
            hidden_AH = self.activation(grouped(tokens_AD, self.w1.to(dtype), row_ends_R))
            return grouped(hidden_AH, self.w2.to(dtype), row_ends_R)


def init_expert(w1_DH: torch.Tensor, w2_HD: torch.Tensor, *, seed: int, layer: int, expert: int) -> None:
    """Fill one expert's weights: a pure function of (seed, layer, expert) and the shapes, in any world."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % (1 << 64), layer, expert), digest_size=8, person=b"hf-expert")
    generator = torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
    for weight in (w1_DH, w2_HD):
        # Always drawn in float32 on the host, so that device and dtype make no other experts.
        bound = weight.shape[0] ** -0.5
        drawn = torch.empty(weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        weight.copy_(drawn)


def grouped(tokens_AX: torch.Tensor, weights_RXY: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
    """Multiply the tokens of each row with its matrix: `(A, X)` and `(R, X, Y)` give `(A, Y)`."""
    if tokens_AX.shape[0] and _fits_grouped_mm(weights_RXY):
        return apply(_ContiguousGrad, F.grouped_mm(tokens_AX, weights_RXY, offs=row_ends_R))
    return _one_by_one(tokens_AX, weights_RXY, integers(row_ends_R))


def _fits_grouped_mm(weights_RXY: torch.Tensor) -> bool:
    sides = weights_RXY.shape[1:]
    aligned = all(side * weights_RXY.element_size() % _ALIGNMENT_BYTES == 0 for side in sides)
    return weights_RXY.dtype in _GROUPED and aligned


def _one_by_one(tokens_AX: torch.Tensor, weights_RXY: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """What grouped_mm has no kernel for: float64, odd sizes; and no tokens at all: the weights still get zeros."""
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    parts = zip(pieces(tokens_AX, sizes), weights_RXY.unbind(0), strict=True)
    return torch.cat([tokens_nX @ weight_XY for tokens_nX, weight_XY in parts])


class _ContiguousGrad(torch.autograd.Function):
    """grouped_mm's backward fails on an expanded gradient."""

    @staticmethod
    def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()
