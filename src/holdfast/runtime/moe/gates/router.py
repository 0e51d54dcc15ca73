"""The router: one logit per token and expert.

Shape letters: T tokens, D model dimension, E experts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.runtime.data.randomness import derive_seed
from holdfast.runtime.options import check_numbers


class Router(nn.Module):
    """A matrix; its logits `tokens @ weight.T` are the input of the gate."""

    def __init__(self, dim: int, experts: int, *, jitter: float, generator: torch.Generator) -> None:
        """Draw the weights.

        Args:
            jitter: during training, tokens are multiplied by noise between 1 - jitter and 1 + jitter (Switch, 2.2).

        Raises:
            BadInputError: the jitter is not a number from 0 to below 1.
        """
        check_numbers(jitter=jitter)
        if not 0 <= jitter < 1:
            raise BadInputError(f"jitter is {jitter}: it must be 0 (none) or more, and below 1")
        super().__init__()
        self.jitter = jitter
        self.weight = nn.Parameter(torch.empty(experts, dim))
        with torch.no_grad():
            self.weight.normal_(0.0, dim**-0.5, generator=generator)

    def forward(self, tokens_TD: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """Return the logits, `(T, E)`, in float32 or wider: half precision would send tokens to other experts.

        Args:
            stream: seed of the noise (`jitter_stream`).
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(tokens_TD.device.type, enabled=False):
            tokens_TD = tokens_TD.to(dtype)
            if self.jitter and self.training:
                tokens_TD = tokens_TD * self._draw_noise(tokens_TD, stream)
            return F.linear(tokens_TD, self.weight.to(dtype))

    def _draw_noise(self, tokens_TD: torch.Tensor, stream: int) -> torch.Tensor:
        """Return factors between 1 - jitter and 1 + jitter, shaped like the tokens, the same on every device."""
        # Drawn on the host: a device's generator would draw other numbers.
        generator = torch.Generator().manual_seed(stream)
        noise_TD = torch.empty(tokens_TD.shape).uniform_(1 - self.jitter, 1 + self.jitter, generator=generator)
        return noise_TD.to(tokens_TD)


def jitter_stream(seed: int, step: int, micro_batch: int, layer: int, part: int = 0) -> int:
    """Return the seed of a layer's noise in one micro-batch, which does not depend on the rank or the attempt.

    Args:
        part: part of the micro-batch's samples, if several local ranks of a replica group share them.
    """
    return derive_seed(derive_seed(seed, step, micro_batch, part), layer, 0) >> 1
