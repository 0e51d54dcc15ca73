"""Exchange of tokens with their experts, with autograd; it never raises into the user's loop.

Shape letters: T tokens, K experts per token, A assignments sent or received by this rank, D model dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.moe.kernels.interface import Movement, TokenKernels
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.tensors import apply_function


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """The group that exchanges tokens for one step, and the state to which failures of its collectives are reported."""

    comm: Communicator
    state: StepState

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self.comm.size

    def enter_layer(self, layer: int) -> None:
        """Check that a layer's forward starts in its turn. In a group of one rank, any order is accepted.

        Raises:
            BadInputError: other ranks take part, and another layer is next.
        """
        if self.size > 1:
            self.state.enter_layer(layer)

    def all_gather(self, mine_X: torch.Tensor) -> torch.Tensor | None:
        """Return all ranks' `(X,)` tensors as `(N, X)`; None if the step is void, or becomes void by a failure here."""
        gathered = mine_X.new_empty(self.comm.size * mine_X.numel())
        if self.state.void is not None:
            return None
        try:
            self.comm.wait(self.comm.start_all_gather(gathered, mine_X))
        except (HaltedError, PeerLostError) as error:
            self.state.mark_void(error)
            return None
        return gathered.view(self.comm.size, -1)

    def all_to_all(self, rows_AD: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send `send[r]` rows to each rank r, and return the `receive[r]` rows from each, in the order of ranks.

        Counts the exchange. Returns zeros if the step is void, or becomes void by a failure here. A world of one gets
        its own rows back.
        """
        if self.comm.size == 1:
            return rows_AD
        shape = (sum(receive), *rows_AD.shape[1:])
        self.state.exchanges += 1
        if self.state.void is None:
            output = rows_AD.new_empty(shape)
            try:
                pending = self.comm.start_all_to_all(output, rows_AD.contiguous(), receive, send)
                self.comm.wait(pending)
                return output
            except (HaltedError, PeerLostError) as error:
                # The abandoned operation may still write to `output`, so it is not used.
                self.state.mark_void(error)
        return rows_AD.new_zeros(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The exchange of one micro-batch's tokens in one layer: the rows' destinations, the group, and the kernels."""

    channel: Channel
    movement: Movement
    kernels: TokenKernels
    top_k: int

    def by_row(self, arrived_AD: torch.Tensor) -> torch.Tensor:
        """Return received rows in the order of the stacked rows."""
        move = self.movement
        return arrived_AD if move.in_order else self.kernels.gather(arrived_AD, move.receive_order)

    def by_source(self, rows_AD: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of the stacked rows in the order in which they were received."""
        move = self.movement
        return rows_AD if move.in_order else self.kernels.gather(rows_AD, move.receive_inverse)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TD: torch.Tensor, route: Route) -> torch.Tensor:
        """Send each token to its experts' ranks; return the rows received here, sorted by the expert's row in the
        stacked weights.
        """
        ctx.route = route
        move, kernels = route.movement, route.kernels
        leaving_AD = kernels.gather(tokens_TD, move.send_order, route.top_k)
        arrived_AD = route.channel.all_to_all(leaving_AD, move.send, move.receive)
        return route.by_row(arrived_AD)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for one result
        ctx: Any, grad_AD: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Send the rows' gradients back to their sources, and sum them for each token."""
        route: Route = ctx.route
        move, kernels = route.movement, route.kernels
        leaving_AD = route.by_source(grad_AD)
        back_AD = route.channel.all_to_all(leaving_AD, move.receive, move.send)
        return kernels.gather_sum(back_AD, move.send_inverse, route.top_k), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, done_AD: torch.Tensor, weights_TK: torch.Tensor, route: Route, dtype: torch.dtype
    ) -> torch.Tensor:
        """Send the experts' outputs back to their sources; return each token's weighted sum, `(T, D)`, in `dtype`.

        Args:
            done_AD: the outputs of the experts on this rank, in the order of `_ToExperts.forward`.
            weights_TK: the weights of each token's choices.
        """
        ctx.route = route
        move, kernels = route.movement, route.kernels
        leaving_AD = route.by_source(done_AD)
        back_AD = route.channel.all_to_all(leaving_AD, move.receive, move.send)
        ctx.save_for_backward(back_AD, weights_TK)
        return kernels.combine(back_AD, weights_TK, move.send_inverse, dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for one result
        ctx: Any, grad_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Send the gradients of the outputs to the experts' ranks; return them and the gradients of the weights.

        While a micro-batch is skipped, zeros are sent.
        """
        route: Route = ctx.route
        move, kernels = route.movement, route.kernels
        back_AD, weights_TK = ctx.saved_tensors
        grad_AD, grad_TK = kernels.combine_backward(grad_TD, back_AD, weights_TK, move.send_order, move.send_inverse)
        if route.channel.state.skipping:
            grad_AD = torch.zeros_like(grad_AD)  # Not a multiplication by 0, because the gradient may be NaN.
        arrived_AD = route.channel.all_to_all(grad_AD, move.send, move.receive)
        return route.by_row(arrived_AD), grad_TK, None, None


def to_experts(tokens_TD: torch.Tensor, route: Route) -> torch.Tensor:
    """Return the rows for this rank's experts, `(A, D)`, sorted by stacked row; differentiable once."""
    return apply_function(_ToExperts, tokens_TD, route)


def from_experts(done_AD: torch.Tensor, weights_TK: torch.Tensor, route: Route, dtype: torch.dtype) -> torch.Tensor:
    """Return the weighted outputs `(T, D)` of tokens sent by `to_experts`, in a dtype; differentiable once."""
    return apply_function(_FromExperts, done_AD, weights_TK, route, dtype)
