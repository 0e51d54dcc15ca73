"""Token kernels by torch and numpy: any device, any dtype. Shape letters as in `interface.py`."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.planning.arrays import IntArray
from holdfast.runtime.moe.kernels.dispatch import invert_order, plan_dispatch
from holdfast.runtime.moe.kernels.interface import DispatchInputs, Movement, TokenKernels
from holdfast.runtime.tensors import from_array


class TorchKernels(TokenKernels):
    """Plans on the host, and gathers by `index_select`."""

    name = "torch"

    def plan(self, inputs: DispatchInputs) -> Movement:
        """Return this rank's part of a dispatch, planned by numpy on the host and then copied to the device.

        See `TokenKernels.plan`.
        """
        device = inputs.assigned_A.device
        plan = plan_dispatch(
            inputs.assigned_A.cpu().numpy(),
            np.ascontiguousarray(inputs.tokens_EN.cpu().numpy()),
            inputs.replicas,
            inputs.rank,
            inputs.row_experts,
            inputs.scheme,
        )

        def to_device(array: IntArray) -> torch.Tensor:
            return from_array(array).to(device)

        return Movement(
            send=plan.send,
            receive=plan.receive,
            send_order=to_device(plan.send_order),
            send_inverse=to_device(invert_order(plan.send_order)),
            receive_order=to_device(plan.receive_order),
            receive_inverse=to_device(invert_order(plan.receive_order)),
            in_order=inputs.in_order,
            row_ends=to_device(plan.row_ends).to(torch.int32),
        )

    def gather(self, rows: torch.Tensor, order_A: torch.Tensor, top_k: int = 1) -> torch.Tensor:
        """Return `rows[order // top_k]`, `(A, D)`, see `TokenKernels.gather`."""
        return rows.index_select(0, order_A if top_k == 1 else order_A // top_k)

    def gather_sum(self, rows_AD: torch.Tensor, inverse_A: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the sum of the rows of each token's `top_k` choices, `(T, D)`, choice by choice in the rows' dtype.

        Row `inverse[t * top_k + k]` belongs to choice k of token t. See `TokenKernels.gather_sum`.
        """
        # Choice by choice, first to last: there are few, so the sums stay in the cache.
        first, *others = inverse_A.view(-1, top_k).unbind(1)
        total_TD = rows_AD.index_select(0, first)
        for inverse_T in others:
            total_TD += rows_AD.index_select(0, inverse_T)
        return total_TD

    def combine(
        self, rows_AD: torch.Tensor, weights_TK: torch.Tensor, inverse_A: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weighted sum of the rows of each token's K choices, `(T, D)`, in `dtype`.

        Row `inverse[t * K + k]` belongs to choice k of token t. See `TokenKernels.combine`.
        """
        choices = zip(inverse_A.view(weights_TK.shape).unbind(1), weights_TK.unsqueeze(-1).unbind(1), strict=True)
        first, *others = choices
        total_TD = rows_AD.index_select(0, first[0]) * first[1]
        for inverse_T, weights_T1 in others:
            total_TD += rows_AD.index_select(0, inverse_T) * weights_T1
        return total_TD.to(dtype)

    def combine_backward(
        self,
        grad_TD: torch.Tensor,
        rows_AD: torch.Tensor,
        weights_TK: torch.Tensor,
        order_A: torch.Tensor,
        inverse_A: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `combine`: of its rows, `(A, D)`, and of its weights, `(T, K)`.

        Args:
            grad_TD: the gradient of its result.
            order_A: the assignment (t * K + k) of each row.
            inverse_A: the row of each assignment.
        """
        # In the order of the rows, so that they need not be gathered again.
        dtype = torch.promote_types(rows_AD.dtype, weights_TK.dtype)
        spread_AD = self.gather(grad_TD.to(dtype), order_A, weights_TK.shape[1])
        grad_A = torch.einsum("ad,ad->a", spread_AD, rows_AD.to(dtype))
        grad_AD = spread_AD.mul_(weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(-1))
        return grad_AD.to(rows_AD.dtype), grad_A.index_select(0, inverse_A).view_as(weights_TK).to(weights_TK.dtype)
