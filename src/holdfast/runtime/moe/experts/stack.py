"""Experts as rows of stacked weights: the parameters stay the same objects when experts move.

`StackedExperts` is the fast path: two grouped multiplications for all experts at once. An FP8 path would belong into
`multiply_grouped`: scale and cast rows and matrices there, and multiply by torch's scaled grouped_mm. A Triton kernel
that fuses the operations between the two multiplications would belong into `StackedExperts.forward`.

Shape letters: R rows (room for experts on this rank), D model dimension, H hidden size, U output size of the first
matrix (H, or 2 H for gated experts), A assignments, sorted by row; X and Y the sides of any matrix.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.runtime.tensors import apply_function, split_tensor, to_ints

Activation = Callable[[torch.Tensor], torch.Tensor]

#: grouped_mm requires every matrix row to start at a multiple of this.
_ALIGNMENT_BYTES = 16
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


class ExpertStack(nn.Module, ABC):
    """The experts of one layer on this rank.

    Each parameter has one row per expert. Replicas of one expert share one row; unused rows are zero.
    """

    def __init__(self, dim: int, experts: int) -> None:
        """Start with all experts, in order; a subclass adds the parameters, `(experts, ...)` each.

        Args:
            dim: the tokens' model dimension.
            experts: number of experts in the whole job.
        """
        super().__init__()
        self.dim = dim
        self.experts = experts
        #: expert of each row, -1 for an unused row
        self.row_experts: tuple[int, ...] = tuple(range(experts))

    @property
    def rows(self) -> int:
        """The number of experts that fit."""
        return len(self.row_experts)

    @property
    def hosted(self) -> tuple[int, ...]:
        """The experts on this rank, ascending."""
        return tuple(sorted(expert for expert in self.row_experts if expert >= 0))

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return next(self.parameters()).dtype

    def row(self, expert: int) -> int:
        """Return the row of an expert.

        Raises:
            ValueError: the expert is not on this rank.
        """
        return self.row_experts.index(expert)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by name, `(R, ...)` each."""
        return dict(self.named_parameters(recurse=False))

    @abstractmethod
    def forward(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Compute each row's tokens with its weights, in the tokens' dtype: `(A, D)`.

        Args:
            tokens_AD: sorted by row.
            row_ends_R: int32, the end of each row's tokens.
        """


class StackedExperts(ExpertStack):
    """Experts with two matrices and a function between them: plain or gated, with or without biases."""

    def __init__(
        self,
        w1: nn.Parameter,
        w2: nn.Parameter,
        between: Activation,
        *,
        b1: nn.Parameter | None = None,
        b2: nn.Parameter | None = None,
        outputs_first: bool = False,
    ) -> None:
        """Use the given weights of all experts, without a copy.

        Args:
            w1, w2: `(E, D, U)` and `(E, H, D)`.
            between: turns `(A, U)` into `(A, H)`: an activation, or a gated one (`gated_activation`).
            b1, b2: biases, `(E, U)` and `(E, D)`.
            outputs_first: the matrices are stored as in nn.Linear: `(E, U, D)` and `(E, D, H)`.

        Raises:
            BadInputError: the shapes or dtypes do not fit each other.
        """
        shape1, shape2 = ((w.mT if outputs_first else w).shape for w in (w1, w2))
        fits = w1.dim() == w2.dim() == 3 and shape1[0] == shape2[0] and shape1[1] == shape2[2]
        with torch.no_grad():
            fits = fits and between(w1.new_zeros((1, shape1[2]))).shape == (1, shape2[1])
        biased = (b1 is None or b1.shape == shape1[::2]) and (b2 is None or b2.shape == shape2[::2])
        given = {"w1": w1, "w2": w2} | {name: b for name, b in (("b1", b1), ("b2", b2)) if b is not None}
        if not fits or not biased or len({weight.dtype for weight in given.values()}) > 1:
            shapes = ", ".join(f"{name} {tuple(weight.shape)} {weight.dtype}" for name, weight in given.items())
            form = "(E, U, D) and (E, D, H)" if outputs_first else "(E, D, U) and (E, H, D)"
            raise BadInputError(
                f"the experts' weights do not match: {shapes}; they must be {form}, with biases (E, U) and (E, D), all "
                "of one dtype; U is the input size of the function between them, H its output size"
            )
        super().__init__(dim=shape1[1], experts=shape1[0])
        self.between = between
        # Registered in the order of use, as models do it: optimizers number their state by this order.
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2
        self._outputs_first = outputs_first

    def forward(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Apply each expert on this rank to its tokens, `(A, D)`: first matrix, the function between, second matrix;
        with biases if any.

        Tokens are sorted by the expert's row in the stacked weights, see `ExpertStack.forward`. Autocast is off: all is
        in the tokens' dtype.
        """
        with torch.autocast(tokens_AD.device.type, enabled=False):
            hidden_AH = self.between(self._multiply(tokens_AD, self.w1, self.b1, row_ends_R))
            return self._multiply(hidden_AH, self.w2, self.b2, row_ends_R)

    def _multiply(
        self, rows_AX: torch.Tensor, weights: torch.Tensor, bias_RY: torch.Tensor | None, row_ends_R: torch.Tensor
    ) -> torch.Tensor:
        """Multiply each row's tokens by its matrix, in the dtype of the tokens, and add its bias if there is one."""
        weights_RXY = (weights.mT if self._outputs_first else weights).to(rows_AX.dtype)
        out_AY = multiply_grouped(rows_AX, weights_RXY, row_ends_R)
        if bias_RY is None:
            return out_AY
        sizes_R = row_ends_R.diff(prepend=row_ends_R.new_zeros(1))
        return out_AY + bias_RY.to(rows_AX.dtype).repeat_interleave(sizes_R, dim=0, output_size=rows_AX.shape[0])


def gated_activation(activation: Activation) -> Activation:
    """Return a function from `(A, 2 H)` to `(A, H)`: the activated first half times the second half.

    SwiGLU with F.silu: Shazeer, 2020.
    """

    def between(both_A2H: torch.Tensor) -> torch.Tensor:
        gate_AH, up_AH = both_A2H.chunk(2, dim=-1)
        return activation(gate_AH) * up_AH

    return between


def draw_experts(
    dim: int, hidden: int, experts: int, activation: Activation, *, gate: bool, seed: int, layer: int
) -> StackedExperts:
    """Return experts with fresh weights, each a pure function of (seed, layer, expert) and the sizes.

    Weights are uniform, within 1 / sqrt(input size).

    Args:
        dim, hidden: D and H.
        gate: gated experts: U is 2 H.
    """
    w1 = torch.empty(experts, dim, 2 * hidden if gate else hidden)
    w2 = torch.empty(experts, hidden, dim)
    for expert in range(experts):
        generator = expert_generator(seed=seed, layer=layer, expert=expert)
        for weight in (w1[expert], w2[expert]):
            # Always drawn in float32 on the host, so that the weights do not depend on device and dtype.
            bound = weight.shape[0] ** -0.5
            weight.copy_(torch.empty(weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))
    return StackedExperts(nn.Parameter(w1), nn.Parameter(w2), gated_activation(activation) if gate else activation)


def expert_generator(*, seed: int, layer: int, expert: int) -> torch.Generator:
    """Return the generator of one expert's first weights: a pure function of these numbers, in any world."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % (1 << 64), layer, expert), digest_size=8, person=b"hf-expert")
    return torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little") >> 1)


def multiply_grouped(tokens_AX: torch.Tensor, weights_RXY: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
    """Multiply the tokens of each expert by its matrix: `(A, X)` and `(R, X, Y)` give `(A, Y)`.

    Uses torch's grouped_mm if it supports dtype and sizes, else one multiplication for each expert.

    Args:
        tokens_AX: sorted by the expert's row in `weights_RXY`.
        row_ends_R: int32, the end of the tokens of each row.
    """
    if tokens_AX.shape[0] and _supports_grouped_mm(weights_RXY):
        return apply_function(_ContiguousGrad, F.grouped_mm(tokens_AX, weights_RXY, offs=row_ends_R))
    return _multiply_one_by_one(tokens_AX, weights_RXY, to_ints(row_ends_R))


def _supports_grouped_mm(weights_RXY: torch.Tensor) -> bool:
    """Return whether dtype and alignment of the matrices suit torch's grouped_mm."""
    sides = weights_RXY.shape[1:]
    aligned = all(side * weights_RXY.element_size() % _ALIGNMENT_BYTES == 0 for side in sides)
    return weights_RXY.dtype in _GROUPED and aligned


def _multiply_one_by_one(tokens_AX: torch.Tensor, weights_RXY: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Multiply the tokens of each expert by its matrix, expert by expert, `(A, Y)`: for `multiply_grouped`, if
    grouped_mm has no kernel (float64, odd sizes) or there are no tokens.

    Without tokens, the weights still get zero gradients.

    Args:
        ends: the end of each expert's tokens.
    """
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    parts = zip(split_tensor(tokens_AX, sizes), weights_RXY.unbind(0), strict=True)
    return torch.cat([tokens_nX @ weight_XY for tokens_nX, weight_XY in parts])


class _ContiguousGrad(torch.autograd.Function):
    """Makes the gradient contiguous, because grouped_mm's backward fails on an expanded one."""

    @staticmethod
    def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()
