"""Gates: from the router's logits to each token's experts and their weights.

Shape letters: T tokens, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from holdfast.errors import BadInputError
from holdfast.runtime.moe.gates.balancing import BalancingBias
from holdfast.runtime.options import check_integers, check_numbers

#: Added to a sum of scores before a division, because all scores may be zero (DeepSeek-V3).
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A gate's result for the tokens of one micro-batch."""

    #: each token's experts, `(T, K)` int64
    experts: torch.Tensor
    #: their weights, `(T, K)`
    weights: torch.Tensor
    #: a scalar to add to the loss
    aux_loss: torch.Tensor


class TopKGate(nn.Module):
    """Scores all experts, and chooses the K best.

    Any module that turns logits `(T, E)` into a `Choice` can replace it. If its `balancing` is a `BalancingBias`,
    holdfast updates that bias at each step. A gate that supports fixed routing takes the chosen experts as a second
    argument.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalise: bool | None = None,
        scale: float = 1.0,
        groups: int = 1,
        groups_kept: int | None = None,
        group_best: int = 2,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        """Make the gate.

        Args:
            experts, top_k: E and K.
            score: an expert's share of all (softmax), or its own score (sigmoid: DeepSeek-V3).
            normalise: scale a token's weights to a sum of 1 (GShard). The default is K > 1: with one expert the weight
                would always be 1 (Switch), and the gate would learn nothing.
            scale: factor of the weights.
            groups: experts 0..E/G-1 are the first group, and so on.
            groups_kept: number of groups from which a token's experts come (DeepSeek-V2, -V3); all by default.
            group_best: a group's score is the sum of this many best experts (V2: 1, V3: 2).
            aux_loss: coefficient of the load-balancing loss (Switch, equation 4).
            z_loss: coefficient of the router's z-loss, the mean squared logsumexp of the logits (ST-MoE, equation 5).
            bias_rate: balance without a loss instead (Wang et al., 2024; DeepSeek-V3). At each step a bias, used for
                the choice alone, moves by this much towards experts that are chosen less than the mean.

        Raises:
            BadInputError: a number is invalid or out of range, or the groups do not divide the experts.
        """
        super().__init__()
        self.experts = experts
        self.top_k = top_k
        self.score = score
        self.scale = scale
        self.groups = groups
        self.group_best = group_best
        self.groups_kept = groups if groups_kept is None else groups_kept
        self.aux_loss = aux_loss
        self.z_loss = z_loss
        self._check(bias_rate)
        self.normalise = top_k > 1 if normalise is None else normalise
        self.bias: torch.Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if bias_rate else None)
        #: Updates the bias; None without one.
        self.balancing = BalancingBias(gate=self, name="bias", rate=bias_rate) if bias_rate else None

    def _check(self, bias_rate: float) -> None:
        """Check all arguments of the gate, see `__init__`.

        Raises:
            BadInputError: one is not a number or out of range, or the groups do not divide the experts.
        """
        experts, top_k = self.experts, self.top_k
        check_integers(experts=experts, top_k=top_k, groups=self.groups)
        check_integers(groups_kept=self.groups_kept, group_best=self.group_best)
        if experts < 1 or not 1 <= top_k <= experts or self.score not in ("softmax", "sigmoid"):
            raise BadInputError(
                f"TopKGate(experts={experts}, top_k={top_k}, score={self.score!r}): there must be at least 1 expert, "
                "top_k from 1 to that, and the score softmax or sigmoid"
            )
        if self.groups < 1 or experts % self.groups:
            raise BadInputError(f"{experts} experts cannot be divided into {self.groups} groups of the same size")
        size = experts // self.groups
        if not 1 <= self.groups_kept <= self.groups or self.groups_kept * size < top_k:
            raise BadInputError(
                f"{self.groups_kept} of {self.groups} groups of {size} experts are kept: it must be 1 to "
                f"{self.groups}, and enough for the {top_k} experts that each token uses"
            )
        if self.groups_kept < self.groups and not 1 <= self.group_best <= size:
            raise BadInputError(f"group_best is {self.group_best}: groups have {size} experts, give 1 to {size}")
        numbers = {"scale": self.scale, "aux_loss": self.aux_loss, "z_loss": self.z_loss, "bias_rate": bias_rate}
        check_numbers(**numbers)
        for name, number in numbers.items():
            if not 0 <= number < math.inf or (name == "scale" and not number):
                raise BadInputError(f"{name} is {number}: it must be 0 or more, and the scale above 0")

    def forward(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> Choice:
        """Choose the K best experts of each token; return them with their weights and the losses.

        Weights are scores, scaled to a sum of 1 if `normalise`, times `scale`.

        Args:
            logits_TE: the router's logits, in float32 or wider.
            chosen_TK: a fixed choice (`routing.py`), for which the gate only computes weights and losses.

        Raises:
            BadInputError: the logits are for another number of experts.
        """
        if logits_TE.shape[-1] != self.experts:
            raise BadInputError(f"TopKGate is for {self.experts} experts, but the router has {logits_TE.shape[-1]}")
        scores_TE = logits_TE.softmax(dim=-1) if self.score == "softmax" else logits_TE.sigmoid()
        if chosen_TK is None:
            chosen_TK = self._select_experts(scores_TE.detach())
        weights_TK = scores_TE.gather(1, chosen_TK)
        if self.normalise:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)
            weights_TK = weights_TK / (total_T1 if self.score == "softmax" else total_T1 + _TINY)
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        aux_loss = self._compute_balance_loss(scores_TE, chosen_TK)
        if self.z_loss and logits_TE.shape[0]:
            aux_loss = aux_loss + self.z_loss * logits_TE.logsumexp(dim=-1).square().mean()
        return Choice(experts=chosen_TK, weights=weights_TK, aux_loss=aux_loss)

    def _select_experts(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """Return the K best experts of each token, `(T, K)`, by their scores plus the balancing bias, if there is one.

        With groups, only experts of each token's `groups_kept` best groups are chosen. A group's score is the sum of
        the scores of its `group_best` best experts.
        """
        if self.bias is not None:
            scores_TE = scores_TE + self.bias
        if self.groups_kept < self.groups:
            by_group_TGS = scores_TE.view(-1, self.groups, self.experts // self.groups)
            of_group_TG = by_group_TGS.topk(self.group_best, dim=-1).values.sum(dim=-1)
            kept_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
            kept_TG.scatter_(1, of_group_TG.topk(self.groups_kept, dim=-1).indices, True)
            scores_TE = by_group_TGS.masked_fill(~kept_TG.unsqueeze(-1), -math.inf).flatten(1)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def _compute_balance_loss(self, scores_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Return Switch's loss, E * sum over experts of (share of assignments) * (mean share of scores), * `aux_loss`.

        It is 0 without a coefficient or without tokens.
        """
        if self.aux_loss == 0.0 or chosen_TK.numel() == 0:
            return scores_TE.new_zeros(())
        if self.score == "sigmoid":
            scores_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + _TINY)
        counts_E = torch.bincount(chosen_TK.reshape(-1), minlength=self.experts)
        shares_E = counts_E.to(scores_TE.dtype) / chosen_TK.numel()
        return self.aux_loss * self.experts * (shares_E * scores_TE.mean(dim=0)).sum()


def check_choice(choice: object, gate: nn.Module, *, tokens: int, top_k: int, experts: int) -> Choice:
    """Return a gate's result after checking it.

    Args:
        tokens, top_k, experts: the required T, K and E.

    Raises:
        BadInputError: it is not a `Choice` of tensors, has another shape or dtype, or names experts that do not exist.
    """
    name = type(gate).__name__
    if not isinstance(choice, Choice):
        raise BadInputError(f"the gate {name} returned a {type(choice).__name__}: it must return a holdfast.Choice")
    parts: dict[str, object] = {"experts": choice.experts, "weights": choice.weights, "an aux_loss": choice.aux_loss}
    for named, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise BadInputError(f"the gate {name} returned {named} as {type(part).__name__}: it must be a tensor")
    chosen, weights = choice.experts, choice.weights
    if not weights.is_floating_point():
        raise BadInputError(f"the gate {name} returned weights as {weights.dtype}: they must be floating-point numbers")
    if chosen.shape != (tokens, top_k) or weights.shape != (tokens, top_k) or choice.aux_loss.numel() != 1:
        raise BadInputError(
            f"the gate {name} returned experts {tuple(chosen.shape)}, weights {tuple(weights.shape)} and an aux_loss "
            f"{tuple(choice.aux_loss.shape)} for {tokens} tokens with {top_k} experts each: they must be "
            f"{(tokens, top_k)}, {(tokens, top_k)} and ()"
        )
    check_expert_numbers(chosen, name, experts)
    return choice


def check_expert_numbers(chosen_TK: torch.Tensor, gate: str, experts: int) -> None:
    """Check the numbers of the chosen experts.

    Args:
        gate: name of the gate, for error messages.
        experts: the number of experts.

    Raises:
        BadInputError: they are not int64, or out of range.
    """
    if chosen_TK.dtype != torch.int64:
        raise BadInputError(f"the gate {gate} returned experts as {chosen_TK.dtype}: they must be torch.int64")
    if chosen_TK.numel():
        low, high = (int(end) for end in chosen_TK.aminmax())
        if low < 0 or high >= experts:
            wrong = low if low < 0 else high
            raise BadInputError(
                f"the gate {gate} chose expert {wrong}: there are {experts} experts, 0 to {experts - 1}"
            )
