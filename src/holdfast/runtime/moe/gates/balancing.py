"""Balance without a loss: a bias on the gate's scores, moved at each step by how often each expert was chosen.

(Wang et al., 2024, Algorithm 1; DeepSeek-V3, 2.1.2.) The bias is a buffer of the gate, and so part of the state.

Axes: E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancingBias:
    """A buffer of a gate that holdfast moves when a step is applied, and nobody else.

    Choices are counted exactly, over all micro-batches of the step on all ranks; so the bias is the same everywhere, in
    every bit.
    """

    gate: nn.Module
    #: The buffer's name in the gate: `(E,)`.
    name: str
    #: By how much it moves at a step.
    rate: float

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Move towards experts that were chosen less often than the mean, and away from the others.

        Args:
            counts_E: choices in the whole step, whole numbers.
        """
        # In whole numbers: no mean that is rounded decides about a sign.
        lacking_E = (counts_E.sum() - counts_E * counts_E.numel()).sign()
        bias_E = self.gate.get_buffer(self.name)
        bias_E.add_(lacking_E.to(bias_E.device, bias_E.dtype), alpha=self.rate)
