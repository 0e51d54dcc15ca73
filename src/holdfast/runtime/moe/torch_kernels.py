"""Token kernels by torch and numpy: any device, any dtype. Letters as in `kernels.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.planning.arrays import IntArray
from holdfast.runtime.moe.dispatch import inverse, plan_dispatch
from holdfast.runtime.moe.kernels import Movement, Question, TokenKernels


class TorchKernels(TokenKernels):
    """Plans on the host, gathers by `index_select`."""

    name = "torch"

    def plan(self, question: Question) -> Movement:
        """See `TokenKernels.plan`."""
        device = question.assigned_A.device
        plan = plan_dispatch(
            question.assigned_A.cpu().numpy(),
            np.ascontiguousarray(question.tokens_EN.cpu().numpy()),
            question.replicas,
            question.rank,
            question.row_experts,
            question.scheme,
        )

        def there(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return Movement(
            send=plan.send,
            receive=plan.receive,
            send_order=there(plan.send_order),
            unsend=there(inverse(plan.send_order)),
            receive_order=there(plan.receive_order),
            unreceive=there(inverse(plan.receive_order)),
            row_ends=there(plan.row_ends).to(torch.int32),
        )

    def spread(
        self, tokens_TD: torch.Tensor, order_A: torch.Tensor, inverse_A: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        """See `TokenKernels.spread`."""
        return _Spread.apply(tokens_TD, order_A, inverse_A, top_k)  # type: ignore[return-value]

    def reorder(self, rows_AD: torch.Tensor, order_A: torch.Tensor, inverse_A: torch.Tensor) -> torch.Tensor:
        """See `TokenKernels.reorder`."""
        return _Reorder.apply(rows_AD, order_A, inverse_A)  # type: ignore[return-value]

    def combine(
        self,
        rows_AD: torch.Tensor,
        weights_TK: torch.Tensor,
        order_A: torch.Tensor,
        inverse_A: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """See `TokenKernels.combine`."""
        return _Combine.apply(rows_AD, weights_TK, order_A, inverse_A).to(dtype)  # type: ignore[union-attr]


class _Reorder(torch.autograd.Function):
    """`rows[order]` for a permutation; the gradient is a gather too, not a slow and unordered scatter-add."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows_AD: torch.Tensor, order_A: torch.Tensor, inverse_A: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_A)
        return rows_AD.index_select(0, order_A)

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (inverse_A,) = ctx.saved_tensors
        return grad_AD.index_select(0, inverse_A), None, None


class _Spread(torch.autograd.Function):
    """Copy each token once per assignment, in a given order; gradients are added up in the order of the choices."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tokens_TD: torch.Tensor, order_A: torch.Tensor, inverse_A: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_A)
        ctx.top_k = top_k
        return tokens_TD.index_select(0, order_A if top_k == 1 else order_A // top_k)

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (inverse_A,) = ctx.saved_tensors
        by_choice_AD = grad_AD.index_select(0, inverse_A)
        if ctx.top_k == 1:
            return by_choice_AD, None, None, None
        return _sum_choices(by_choice_AD.view(-1, ctx.top_k, grad_AD.shape[1])), None, None, None


class _Combine(torch.autograd.Function):
    """Gather, weigh and sum in one node; in the wider dtype of the rows' and the weights'."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows_AD: torch.Tensor, weights_TK: torch.Tensor, order_A: torch.Tensor, inverse_A: torch.Tensor
    ) -> torch.Tensor:
        by_choice_TKD = rows_AD.index_select(0, inverse_A).view(*weights_TK.shape, rows_AD.shape[1])
        ctx.save_for_backward(by_choice_TKD, weights_TK, order_A)
        return _sum_choices(by_choice_TKD * weights_TK.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        by_choice_TKD, weights_TK, order_A = ctx.saved_tensors
        grad_T1D = grad_TD.unsqueeze(1)
        grad_TKD = (grad_T1D * weights_TK.unsqueeze(-1)).to(by_choice_TKD.dtype)
        grad_AD = grad_TKD.view(-1, grad_TD.shape[1]).index_select(0, order_A)
        return grad_AD, (grad_T1D * by_choice_TKD).sum(-1).to(weights_TK.dtype), None, None


def _sum_choices(by_choice_TKD: torch.Tensor) -> torch.Tensor:
    """Return the sums over the choices, `(T, D)`, first to last: for the few there are, faster than one reduction."""
    total_TD = by_choice_TKD[:, 0].clone()
    for choice in range(1, by_choice_TKD.shape[1]):
        total_TD += by_choice_TKD[:, choice]
    return total_TD
