"""Balance without a loss: a bias on the gate's scores, updated at each step by how often each expert was chosen.

Source: Wang et al., 2024, Algorithm 1; DeepSeek-V3, 2.1.2. The bias is a buffer of the gate, so it is part of the
state.

Axes: E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancingBias:
    """A buffer of a gate that only holdfast changes, when a step is applied.

    Choices are counted exactly, over all micro-batches of the step on all ranks. So the bias is the same in every bit
    on all ranks.
    """

    gate: nn.Module
    #: the buffer's name in the gate: `(E,)`
    name: str
    #: change of the bias at each step
    rate: float

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Raise the bias of experts that were chosen less often than the mean by `rate`, and lower it for the others.

        It stays the same for an expert that was chosen exactly as often as the mean.

        Args:
            counts_E: choices in the whole step, integers.
        """
        # Integers, so that a rounded mean cannot change a sign.
        lacking_E = (counts_E.sum() - counts_E * counts_E.numel()).sign()
        bias_E = self.gate.get_buffer(self.name)
        bias_E.add_(lacking_E.to(bias_E.device, bias_E.dtype), alpha=self.rate)
