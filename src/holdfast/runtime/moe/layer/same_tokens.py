"""Tensor parallelism: local ranks with the same tokens each send their share of them to the experts.

All local ranks choose experts for all tokens, with the same result. So gate, capacity, noise and the auxiliary loss are
the same as on a single rank. Then each local rank continues with its share, and the results of all shares are gathered.
In backward, the gradients of the shares are gathered, too. Nothing is summed: all local ranks have the same numbers in
every bit.

Shares depend only on the number of tokens, in order. So all local ranks gather the same shapes, even if the step is
void on only some of them.

Shape letters: T tokens, P of them in a share, K experts per token, D model dimension, X any.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import is_dtensor
from holdfast.runtime.tensors import apply_function, to_floats

#: difference of one token between local ranks that counts as rounding, relative to the largest number
_ROUNDING = 0.05


class _Work(Protocol):
    def wait(self) -> bool: ...


class TensorParallelGroup(Protocol):
    """The group of the local ranks with the same tokens, an outer group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> _Work: ...


class TokenSplit:
    """Splits the tokens of one layer among the local ranks that have the same tokens."""

    def __init__(self, group: TensorParallelGroup) -> None:
        """Use a group that exists as long as the replica group.

        All its ranks must make the same calls in the same order.
        """
        self._group = group
        self._rank = group.rank()
        self._places = group.size()
        self._checked = False

    def check_same_tokens(self, tokens_TD: torch.Tensor) -> None:
        """Check, at the first call only, that all local ranks have as many tokens and almost the same first token.

        Raises:
            BadInputError: they differ; on all local ranks.
        """
        if self._checked:
            return
        self._checked = True
        first = tokens_TD.detach()[:1].double().reshape(-1)
        room = torch.zeros(self._places, 1 + tokens_TD.shape[1], dtype=torch.float64, device=tokens_TD.device)
        room[self._rank, 0], room[self._rank, 1 : 1 + first.numel()] = len(tokens_TD), first
        each = self._all_gather(room).cpu()
        counts, rows = each[:, 0], each[:, 1:].nan_to_num()
        differ = bool((rows - rows[:1]).abs().max() > _ROUNDING * rows.abs().max())
        if differ or bool((counts != counts[0]).any()):
            raise BadInputError(
                "an MoE layer is given other tokens on each local rank along tensor "
                f"({', '.join(str(int(count)) for count in to_floats(counts))} of them): its tokens must be the same "
                "on all of these ranks, complete and not cut along their sequence; gather them before the layer"
            )

    def own_slice(self, tokens: int) -> slice:
        """Return this local rank's share of a number of tokens."""
        size = self._share_size(tokens)
        return slice(min(self._rank * size, tokens), min((self._rank + 1) * size, tokens))

    def split(self, tokens_TD: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this local rank's share, `(P, D)` and `(P, K)`; in backward, all get the gradients of all tokens."""
        return cast("tuple[torch.Tensor, torch.Tensor]", apply_function(_Split, tokens_TD, weights_TK, self))

    def join(self, mixed_PD: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the results of all shares, `(T, D)`; in backward, each local rank gets the gradient of its share."""
        return apply_function(_Join, mixed_PD, self, tokens)

    def gather_shares(self, share_PX: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the shares of all local ranks, `(T, X)`, in order; `tokens` is T."""
        size = self._share_size(tokens)
        room = share_PX.new_zeros((self._places, size, *share_PX.shape[1:]))
        room[self._rank, : len(share_PX)] = share_PX
        return self._all_gather(room).flatten(0, 1)[:tokens]

    def _share_size(self, tokens: int) -> int:
        """Return the number of tokens in a share; the last shares may have fewer."""
        return -(-tokens // self._places)

    def _all_gather(self, room: torch.Tensor) -> torch.Tensor:
        """Fill `room` with all local ranks' data; on entry it contains only this one's."""
        if room.numel():
            self._group.all_gather_single(room, room[self._rank]).wait()
        return room


def check_no_dtensor(tokens: torch.Tensor) -> None:
    """Refuse DTensors: a token must be complete on each local rank.

    Raises:
        BadInputError: the tokens are a DTensor.
    """
    if is_dtensor(tokens):
        raise BadInputError(
            "an MoE layer is given a DTensor: its tokens must be a plain tensor, the same on all local ranks; leave "
            "use_local_output at its default in the module before the layer, or pass tokens.full_tensor()"
        )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TD: torch.Tensor, weights_TK: torch.Tensor, places: TokenSplit
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of this local rank's share of tokens and weights, `(P, D)` and `(P, K)`."""
        ctx.places, ctx.tokens = places, len(tokens_TD)
        mine = places.own_slice(len(tokens_TD))
        return tokens_TD[mine].clone(), weights_TK[mine].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for each result
        ctx: Any, grad_PD: torch.Tensor, grad_PK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gather the gradients of all shares, so that each local rank has all of them: `(T, D)` and `(T, K)`."""
        places: TokenSplit = ctx.places
        return places.gather_shares(grad_PD, ctx.tokens), places.gather_shares(grad_PK, ctx.tokens), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed_PD: torch.Tensor, places: TokenSplit, tokens: int) -> torch.Tensor:
        """Gather the results of all shares, `(T, D)`, in the order of tokens."""
        ctx.mine = places.own_slice(tokens)
        return places.gather_shares(mixed_PD, tokens)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for one result
        ctx: Any, grad_TD: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return grad_TD[ctx.mine], None, None
