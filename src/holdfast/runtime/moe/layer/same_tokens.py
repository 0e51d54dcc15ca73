"""Places of a unit that have the same tokens (tensor parallelism): each brings its share of them to the experts.

All of them choose experts for all tokens, alike; so gate, capacity, noise and what is added to the loss are what they
would be in one place. Then each goes on with its share, and what comes of the shares is gathered. Backward, the
gradients of the shares are gathered likewise. Nothing is added up: all places have the same numbers, in every bit.

The shares are of tokens, in order, and depend on nothing but their number: also where a step is void at one place and
not at another, and computes with other numbers there, all gather alike.

Shape letters: T tokens, P of them in a share, K experts per token, D model dimension, X any.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import is_dtensor
from holdfast.runtime.tensors import apply, numbers

#: by how much of the largest number places may differ in what they have of one token, for other reasons than that they
#: have others
_ROUNDING = 0.05


class _Work(Protocol):
    def wait(self) -> bool: ...


class TensorParallelGroup(Protocol):
    """The group of the places: what an outer group is."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> _Work: ...


class TokenSplit:
    """The places that have the tokens of one layer, as one of them sees them."""

    def __init__(self, group: TensorParallelGroup) -> None:
        """`group`: as long as the unit lasts. All its places must call the same, in the same order."""
        self._group = group
        self._rank, self._places = group.rank(), group.size()
        self._checked = False

    def check_same_tokens(self, tokens_TD: torch.Tensor) -> None:
        """Look, once, whether all places have the same tokens: as many, and the same first one.

        Raises:
            BadInputError: they have not; on all places.
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
                "an MoE layer is given other tokens at each place along tensor "
                f"({', '.join(str(int(count)) for count in numbers(counts))} of them): its tokens must be the same at "
                "all of these places, whole and not cut along their sequence; gather them in front of the layer"
            )

    def own_slice(self, tokens: int) -> slice:
        """Return which of so many tokens this place goes on with."""
        size = self._share_size(tokens)
        return slice(min(self._rank * size, tokens), min((self._rank + 1) * size, tokens))

    def split(self, tokens_TD: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this place's share, `(P, D)` and `(P, K)`; backward, all places get the gradients of all tokens."""
        return cast("tuple[torch.Tensor, torch.Tensor]", apply(_Split, tokens_TD, weights_TK, self))

    def join(self, mixed_PD: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return what all places have made of their shares, `(T, D)`; backward, each gets what is of its own."""
        return apply(_Join, mixed_PD, self, tokens)

    def gather_shares(self, share_PX: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the shares of all places, `(T, X)`."""
        size = self._share_size(tokens)
        room = share_PX.new_zeros((self._places, size, *share_PX.shape[1:]))
        room[self._rank, : len(share_PX)] = share_PX
        return self._all_gather(room).flatten(0, 1)[:tokens]

    def _share_size(self, tokens: int) -> int:
        """Return how many tokens a share has, but for the last ones, which may have fewer."""
        return -(-tokens // self._places)

    def _all_gather(self, room: torch.Tensor) -> torch.Tensor:
        """Fill room for what all places have, where there is what this one has."""
        if room.numel():
            self._group.all_gather_single(room, room[self._rank]).wait()
        return room


def check_no_dtensor(tokens: torch.Tensor) -> None:
    """Refuse tokens that are spread over the places of a unit: what goes to an expert is a row of numbers.

    Raises:
        BadInputError: they are.
    """
    if is_dtensor(tokens):
        raise BadInputError(
            "an MoE layer is given a DTensor: it must have its tokens as a tensor of this place's own, the same at all "
            "places; leave use_local_output as it is in what comes before the layer, or give it tokens.full_tensor()"
        )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TD: torch.Tensor, weights_TK: torch.Tensor, places: TokenSplit
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.places, ctx.tokens = places, len(tokens_TD)
        mine = places.own_slice(len(tokens_TD))
        return tokens_TD[mine].clone(), weights_TK[mine].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for each result
        ctx: Any, grad_PD: torch.Tensor, grad_PK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        places: TokenSplit = ctx.places
        return places.gather_shares(grad_PD, ctx.tokens), places.gather_shares(grad_PK, ctx.tokens), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed_PD: torch.Tensor, places: TokenSplit, tokens: int) -> torch.Tensor:
        ctx.mine = places.own_slice(tokens)
        return places.gather_shares(mixed_PD, tokens)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - one gradient for one result
        ctx: Any, grad_TD: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return grad_TD[ctx.mine], None, None
