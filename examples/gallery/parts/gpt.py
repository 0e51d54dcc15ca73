"""A small decoder over bytes, made of torch's own layers."""

from __future__ import annotations

import torch
from parts.text import VOCABULARY
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

# B batch, T context length, D width, V vocabulary


class GPT(nn.Module):
    """A GPT with one weight for its head and its embedding.

    Args:
        context: bytes that it sees.
        width: D.
        layers: number of blocks.
        recompute: discard the activations inside the blocks, and compute them again in backward.
    """

    def __init__(self, *, context: int, width: int = 48, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        length = bytes_BT.shape[1]
        mask_TT = self.get_buffer("mask")[:length, :length]
        x_BTD = self.token(bytes_BT) + self.position.weight[:length]
        for block in self.blocks:
            x_BTD = recomputed(block, x_BTD, mask_TT) if self.recompute else block(x_BTD, mask_TT)
        return self.head(self.norm(x_BTD))


def recomputed(block: nn.Module, x_BTD: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
    """Return the block's output; backward computes the block's activations again."""
    return checkpoint(block, x_BTD, mask_TT, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


def loss_of(model: nn.Module, bytes_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy per byte, in nats."""
    logits_BTV = model(bytes_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
