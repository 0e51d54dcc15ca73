"""Token kernels by Triton: schedule and gathers stay on the GPU, top-k is combined without a copy per choice.

Under `TRITON_INTERPRET=1`, set before this module is imported, they also run on CPU tensors, slowly. Shape letters as
in `interface.py`.
"""

# Triton has no types, and may not be installed; its compiled programs look like functions but are not.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from holdfast.planning import Interval, dispatch_schedule
from holdfast.runtime.moe.kernels import triton_jit as jit
from holdfast.runtime.moe.kernels.interface import DispatchInputs, Movement, TokenKernels
from holdfast.runtime.tensors import from_array, to_int_rows

#: Elements that one program moves at a time: 64 bytes a thread in bfloat16, four of the widest loads.
_TILE = 4096
_WIDEST = 1024
_PLACES = 512


class TritonKernels(TokenKernels):
    """Token kernels for float32 and bfloat16."""

    name = "triton"

    def plan(self, inputs: DispatchInputs) -> Movement:
        """Return this rank's part of a dispatch, planned on the GPU; only the rows per peer are copied to the host.

        See `TokenKernels.plan`.
        """
        sent_EN, received_EN = _schedule_shares(inputs)
        totals = to_int_rows(torch.stack([sent_EN.sum(0), received_EN.sum(0)]))
        send, receive = tuple(totals[0]), tuple(totals[1])
        by_expert_A = torch.argsort(inputs.assigned_A, stable=True)
        send_order, unsend = _order_segments(sent_EN.T, _segment_starts(sent_EN).T, sum(send), by_expert_A)
        rows = torch.tensor(inputs.row_experts, dtype=torch.int64).to(sent_EN.device)
        used = rows >= 0
        by_row_RN = torch.where(used[:, None], received_EN[rows.clamp(min=0)], 0)
        starts_EN = _segment_starts(received_EN.T.contiguous()).T
        receive_order, unreceive = _order_segments(by_row_RN, starts_EN[rows.clamp(min=0)], sum(receive), None)
        return Movement(
            send=send,
            receive=receive,
            send_order=send_order,
            send_inverse=unsend,
            receive_order=receive_order,
            receive_inverse=unreceive,
            in_order=inputs.in_order,
            row_ends=by_row_RN.sum(1).cumsum(0).to(torch.int32),
        )

    def gather(self, rows: torch.Tensor, order_A: torch.Tensor, top_k: int = 1) -> torch.Tensor:
        """Return `rows[order // top_k]`, `(A, D)`: with `top_k`, row a is the token of assignment `order[a]`. See
        `TokenKernels.gather`.
        """
        rows, number, width = rows.contiguous(), order_A.numel(), rows.shape[1]
        out = rows.new_empty((number, width))
        if out.numel():
            high, wide = _tile(width)
            grid = (triton.cdiv(number, high), triton.cdiv(width, wide))
            sizes = {"D": width, "TOP_K": top_k, "BLOCK_A": high, "BLOCK_D": wide}
            _launch(jit.gather_rows, grid, rows, order_A, out, number, **sizes)
        return out

    def gather_sum(self, rows_AD: torch.Tensor, inverse_A: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the sum of each token's rows, `(T, D)`, see `TokenKernels.gather_sum`."""
        return self.gather(rows_AD, inverse_A) if top_k == 1 else _sum_rows(rows_AD, inverse_A, top_k)

    def combine(
        self, rows_AD: torch.Tensor, weights_TK: torch.Tensor, inverse_A: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weighted sum of each token's rows, `(T, D)`, see `TokenKernels.combine`."""
        return _sum_rows(rows_AD, inverse_A, weights_TK.shape[1], weights_TK, dtype)

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
            order_A: not used: `inverse_A` suffices.
            inverse_A: the row of each assignment (t * K + k).
        """
        grad_TD, rows_AD, weights_TK = grad_TD.contiguous(), rows_AD.contiguous(), weights_TK.contiguous()
        number, width = grad_TD.shape
        grad_rows, grad_weights = torch.empty_like(rows_AD), torch.empty_like(weights_TK)
        if not grad_rows.numel():
            return grad_rows, grad_weights.zero_()
        high, wide = _tile(width)
        _launch(
            jit.combine_backward,
            (triton.cdiv(number, high),),
            grad_TD,
            rows_AD,
            inverse_A,
            weights_TK,
            grad_rows,
            grad_weights,
            number,
            D=width,
            TOP_K=weights_TK.shape[1],
            BLOCK_T=high,
            BLOCK_D=wide,
        )
        return grad_rows, grad_weights


def _sum_rows(
    rows: torch.Tensor,
    inverse_A: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the sum over each token's `top_k` rows `rows[inverse]`, `(T, D)`, added in float32.

    Args:
        weights: factors of the rows, `(T, K)`; None for a plain sum.
        dtype: of the result; that of the rows by default.
    """
    rows, number, width = rows.contiguous(), inverse_A.numel() // top_k, rows.shape[1]
    out = rows.new_empty((number, width), dtype=dtype or rows.dtype)
    factors = rows if weights is None else weights.contiguous()
    if out.numel():
        high, wide = _tile(width)
        grid = (triton.cdiv(number, high), triton.cdiv(width, wide))
        sizes = {"D": width, "TOP_K": top_k, "BLOCK_T": high, "BLOCK_D": wide}
        _launch(jit.sum_rows, grid, rows, inverse_A, factors, out, number, WEIGHTED=weights is not None, **sizes)
    return out


def _schedule_shares(inputs: DispatchInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens per expert that the rank sends to and receives from each rank, `(E, N)` both, on the device.

    The interval scheme is planned on the device, any other one on the host.

    Raises:
        BadInputError: an expert with tokens has no replica.
    """
    tokens_EN, device = inputs.tokens_EN, inputs.tokens_EN.device
    # Only the default scheme has its own program. The plain function also refuses invalid inputs.
    if type(inputs.scheme) is not Interval or not inputs.replicas.any(axis=1).all():
        schedule = dispatch_schedule(tokens_EN.cpu().numpy(), inputs.replicas, inputs.scheme)
        row, column = schedule.send_row(inputs.rank), schedule.receive_column(inputs.rank)
        return from_array(row).to(device), from_array(column).to(device)
    replicas_EN = from_array(np.ascontiguousarray(inputs.replicas)).to(device)
    experts, ranks = replicas_EN.shape
    sent, received = torch.empty_like(replicas_EN), torch.empty_like(replicas_EN)
    _launch(
        jit.interval_shares,
        (experts,),
        tokens_EN,
        replicas_EN,
        sent,
        received,
        inputs.rank,
        ranks,
        tokens_EN.stride(0),
        tokens_EN.stride(1),
        BLOCK_N=max(triton.next_power_of_2(ranks), 16),
    )
    return sent, received


def _segment_starts(sizes: torch.Tensor) -> torch.Tensor:
    """Return the start of each segment if they are stored one after the other, row by row, `(I, J)`."""
    return (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)


def _order_segments(
    sizes: torch.Tensor, starts: torch.Tensor, number: int, lookup: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of elements stored in segments, read one after the other; and the inverse.

    Args:
        sizes, starts: of the segments, in the order in which they are read.
        number: total number of elements.
        lookup: the value at each position; without it, the position itself.
    """
    flat = sizes.flatten()
    ends = flat.cumsum(0)
    shifts = starts.flatten() - (ends - flat)
    order = torch.empty(number, dtype=torch.int64, device=sizes.device)
    inverse = torch.empty_like(order)
    if number:
        _launch(
            jit.order_by_segments,
            (triton.cdiv(number, _PLACES),),
            ends,
            shifts,
            order if lookup is None else lookup,
            order,
            inverse,
            number,
            flat.numel(),
            LOOKUP=lookup is not None,
            STEPS=flat.numel().bit_length(),
            BLOCK=_PLACES,
        )
    return order, inverse


def _launch(program: Any, grid: tuple[int, ...], *tensors_and_numbers: Any, **constants: Any) -> None:
    """Run a program on the device of its first tensor, which may not be the current device."""
    with torch.cuda.device_of(tensors_and_numbers[0]):
        program[grid](*tensors_and_numbers, **constants)


def _tile(width: int) -> tuple[int, int]:
    """Return rows and columns of the tile that one program handles, for rows of `width` elements."""
    wide = min(triton.next_power_of_2(width), _WIDEST)
    return max(_TILE // wide, 1), wide
