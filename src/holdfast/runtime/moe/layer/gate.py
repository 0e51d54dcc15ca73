"""The gate: which experts each token goes to, and with which weight. T tokens, D model dimension, E experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The gate's answer for the tokens of one micro-batch."""

    #: `(T, top_k)` int64, and their weights, in float32 (float64 for float64 models).
    experts: torch.Tensor
    weights: torch.Tensor
    #: The load-balancing loss, a scalar.
    aux_loss: torch.Tensor


class Gate(nn.Module):
    """Softmax over the experts, the k likeliest are taken.

    With top_k = 1 the weight is the probability itself (Switch): normalised it would be 1, and the gate would learn
    nothing. With more, the chosen probabilities are normalised to sum to 1 (GShard).
    """

    def __init__(self, dim: int, experts: int, top_k: int, aux_loss: float, generator: torch.Generator) -> None:
        super().__init__()
        self.experts = experts
        self.top_k = top_k
        self.aux_loss = aux_loss
        self.weight = nn.Parameter(torch.empty(experts, dim))
        with torch.no_grad():
            self.weight.normal_(0.0, dim**-0.5, generator=generator)

    def forward(self, tokens_TD: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> Choice:
        """Choose.

        Args:
            tokens_TD: the tokens.
            chosen_TK: a choice made elsewhere (`routing.py`): then only the weights are the gate's.
        """
        # A half-precision softmax would send tokens to other experts: at least float32, also under autocast.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(tokens_TD.device.type, enabled=False):
            logits_TE = F.linear(tokens_TD.to(dtype), self.weight.to(dtype))
        probabilities_TE = logits_TE.softmax(dim=-1)
        if chosen_TK is None:
            chosen_TK = probabilities_TE.detach().topk(self.top_k, dim=-1).indices
        weights_TK = probabilities_TE.gather(1, chosen_TK)
        if self.top_k > 1:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        aux = self._balance(probabilities_TE, chosen_TK)
        return Choice(experts=chosen_TK, weights=weights_TK, aux_loss=aux)

    def _balance(self, probabilities_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Switch's loss: E times the sum over experts of (share of assignments) x (mean probability)."""
        if self.aux_loss == 0.0 or chosen_TK.numel() == 0:
            return probabilities_TE.new_zeros(())
        counts_E = torch.bincount(chosen_TK.reshape(-1), minlength=self.experts)
        shares_E = counts_E.to(probabilities_TE.dtype) / chosen_TK.numel()
        return self.aux_loss * self.experts * (shares_E * probabilities_TE.mean(dim=0)).sum()
