"""Uneven all-to-alls with autograd that never block and never raise into the user's loop.

Shape letters: A assignments sent or received by this rank, D model dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.runtime.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.moe.rounds import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """A group, and the step whose failure its collectives report to."""

    comm: Communicator
    state: StepState

    def all_gather(self, mine_X: torch.Tensor) -> torch.Tensor | None:
        """Return all ranks' `(X,)` tensors as `(N, X)`; None where the step is void."""
        gathered = mine_X.new_empty(self.comm.size * mine_X.numel())
        if self.state.void is not None:
            return None
        try:
            self.comm.wait(self.comm.start_all_gather(gathered, mine_X))
        except (HaltedError, PeerLostError) as error:
            self.state.spoil(error)
            return None
        return gathered.view(self.comm.size, -1)

    def all_to_all(self, rows_AD: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send `send[r]` rows to each rank r, return the `receive[r]` rows from each; zeros where the step is void."""
        shape = (sum(receive), *rows_AD.shape[1:])
        self.state.exchanges += 1
        if self.state.void is None:
            output = rows_AD.new_empty(shape)
            try:
                pending = self.comm.start_all_to_all(output, rows_AD.contiguous(), receive, send)
                self.comm.wait(pending)
                return output
            except (HaltedError, PeerLostError) as error:
                # The abandoned operation may still write to `output`: it is never looked at again.
                self.state.spoil(error)
        return rows_AD.new_zeros(shape)


class _AllToAll(torch.autograd.Function):
    """The gradient of an all-to-all is the transposed all-to-all."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows_AD: torch.Tensor, channel: Channel, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        ctx.channel, ctx.send, ctx.receive = channel, send, receive
        return channel.all_to_all(rows_AD, send, receive)

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return ctx.channel.all_to_all(grad_AD, ctx.receive, ctx.send), None, None, None


def all_to_all(rows_AD: torch.Tensor, channel: Channel, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
    """Exchange rows with all ranks, differentiably; a world of one has nothing to exchange."""
    if channel.comm.size == 1:
        return rows_AD
    return _AllToAll.apply(rows_AD, channel, send, receive)  # type: ignore[return-value]
