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
        out_TKD = self.reorder(rows_AD, inverse_A, order_A).view(*weights_TK.shape, rows_AD.shape[1])
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(1).to(dtype)


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
        return by_choice_AD.view(-1, ctx.top_k, grad_AD.shape[1]).sum(1), None, None, None
