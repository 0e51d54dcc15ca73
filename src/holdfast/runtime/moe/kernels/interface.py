"""Moving rows of tokens on one device: in front of the exchange, behind it, and back; one interface, two makers.

Nothing here is seen by autograd: `token_exchange.py` calls it forwards and backwards.

Shape letters: T tokens, D model dimension, K experts per token, A assignments (T*K) or rows that came from the other
ranks, E experts, N ranks, R rows of stacked weights.
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
    """What a rank's part of one layer's dispatch follows from."""

    #: Expert of each of this rank's assignments, `(A,)` int64, on the device.
    assigned_A: torch.Tensor
    #: T, assignments per expert and source rank, `(E, N)` int64, on the device.
    tokens_EN: torch.Tensor
    #: R, replicas per expert and rank, `(E, N)`.
    replicas: IntArray
    rank: int
    #: Expert of each stacked row, `(R,)`; -1 for a row that is not in use.
    row_experts: Sequence[int]
    scheme: DispatchScheme

    @property
    def in_order(self) -> bool:
        """Whether rows arrive as the experts want them: all come from one rank, or are for one expert."""
        used = [expert for expert in self.row_experts if expert >= 0]
        return len(used) < 2 or (self.tokens_EN.shape[1] == 1 and used == sorted(used))


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """A rank's part of one layer's dispatch (`dispatch.Dispatch`) with its orders on the device, and their inverses."""

    #: Rows per peer, `(N,)`.
    send: tuple[int, ...]
    receive: tuple[int, ...]
    #: `(A,)` int64 permutations: of this rank's assignments, and of the rows it receives.
    send_order: torch.Tensor
    send_inverse: torch.Tensor
    receive_order: torch.Tensor
    receive_inverse: torch.Tensor
    #: `receive_order` is that in which they arrive: nothing has to be moved.
    in_order: bool
    #: Where each stacked row's tokens end, `(R,)` int32.
    row_ends: torch.Tensor


class TokenKernels(ABC):
    """Plans and moves. Orders are permutations that come with their inverses, so that all that moves is gathered.

    Token t has the assignments t*K .. t*K + K - 1; sums over them are taken in that order.
    """

    #: What benchmarks call it.
    name: str

    @abstractmethod
    def plan(self, question: DispatchInputs) -> Movement:
        """Return this rank's part of a dispatch; the integers are the same whoever computes them.

        Raises:
            BadInputError: an expert with tokens has no replica.
        """

    @abstractmethod
    def gather(self, rows: torch.Tensor, order_A: torch.Tensor, top_k: int = 1) -> torch.Tensor:
        """Return `rows[order // top_k]`, `(A, D)`: with top_k, row a is the token of assignment `order[a]`."""

    @abstractmethod
    def gather_sum(self, rows_AD: torch.Tensor, inverse_A: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the sum of each token's rows, `(T, D)`: what turns the gradient of such a gather back.

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
            weights_TK: of the gate; sums are taken in the wider dtype of the rows' and theirs.
            dtype: of the sums when they are done.
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
