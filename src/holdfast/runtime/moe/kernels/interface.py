"""The interface of the token kernels, which move rows of tokens on one device before and after the exchange.

Autograd does not see these operations: `token_exchange.py` calls them forward and backward.

Shape letters: T tokens, D model dimension, K experts per token, A assignments (T*K) or rows received from other ranks,
E experts, N ranks, R rows of stacked weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.planning import DispatchScheme
from holdfast.planning.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchInputs:
    """The inputs of a rank's part of one layer's dispatch."""

    #: Expert of each of this rank's assignments, `(A,)` int64, on the device.
    assigned_A: torch.Tensor
    #: T, assignments per expert and source rank, `(E, N)` int64, on the device.
    tokens_EN: torch.Tensor
    #: R, replicas per expert and rank, `(E, N)`.
    replicas: IntArray
    rank: int
    #: expert of each stacked row, `(R,)`; -1 for an unused row
    row_experts: Sequence[int]
    scheme: DispatchScheme

    @property
    def in_order(self) -> bool:
        """Whether received rows need no reordering, because they arrive in the order of the stacked rows.

        So it is with at most one used row, or with a single rank and ascending experts.
        """
        used = [expert for expert in self.row_experts if expert >= 0]
        return len(used) < 2 or (self.tokens_EN.shape[1] == 1 and used == sorted(used))


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """A rank's part of one layer's dispatch (`dispatch.Dispatch`) with its orders on the device, and their inverses."""

    #: Rows per peer, `(N,)`.
    send: tuple[int, ...]
    receive: tuple[int, ...]
    #: `(A,)` int64 permutations: of this rank's assignments, and of the rows it receives
    send_order: torch.Tensor
    send_inverse: torch.Tensor
    receive_order: torch.Tensor
    receive_inverse: torch.Tensor
    #: whether `receive_order` is the order of arrival, so that nothing has to be moved
    in_order: bool
    #: the end of each stacked row's tokens, `(R,)` int32
    row_ends: torch.Tensor


class TokenKernels(ABC):
    """Plans and moves rows. Orders are permutations with their inverses, so that every move is a gather.

    Token t has the assignments t*K .. t*K + K - 1; sums over them use that order.
    """

    #: name in benchmarks
    name: str

    @abstractmethod
    def plan(self, inputs: DispatchInputs) -> Movement:
        """Return this rank's part of a dispatch; all kernels return the same integers.

        Raises:
            BadInputError: an expert with tokens has no replica.
        """

    @abstractmethod
    def gather(self, rows: torch.Tensor, order_A: torch.Tensor, top_k: int = 1) -> torch.Tensor:
        """Return `rows[order // top_k]`, `(A, D)`: with top_k, row a is the token of assignment `order[a]`."""

    @abstractmethod
    def gather_sum(self, rows_AD: torch.Tensor, inverse_A: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the sum of each token's rows, `(T, D)`: the gradient of a `gather` with top_k.

        Args:
            rows_AD: row `inverse[a]` belongs to assignment a.
        """

    @abstractmethod
    def combine(
        self, rows_AD: torch.Tensor, weights_TK: torch.Tensor, inverse_A: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weighted sum of each token's rows, `(T, D)`.

        Args:
            rows_AD: row `inverse[a]` belongs to assignment a.
            weights_TK: the gate's weights; sums use the wider dtype of rows and weights.
            dtype: of the result.
        """

    @abstractmethod
    def combine_backward(
        self,
        grad_TD: torch.Tensor,
        rows_AD: torch.Tensor,
        weights_TK: torch.Tensor,
        order_A: torch.Tensor,
        inverse_A: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `combine`: of its rows, `(A, D)`, and of its weights, `(T, K)`."""
