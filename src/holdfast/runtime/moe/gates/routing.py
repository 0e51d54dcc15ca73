"""Fixed routing: a token's experts as a pure function of (step, micro-batch, position).

With fixed routing, two runs on different worlds differ only by rounding: no gate decision can flip.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from holdfast.errors import BadInputError
from holdfast.runtime.data.randomness import derive_seed
from holdfast.runtime.tensors import from_array


class Routing(Protocol):
    """A source of assignments that replaces the gate's choice, but not its weights."""

    def assign(self, step: int, micro_batch: int, tokens: int) -> torch.Tensor:
        """Return the experts of each token, `(T, top_k)` int64, all different within a row."""
        ...


class RecordedRouting:
    """Assignments from a table; each (step, micro-batch) starts at its own row and wraps around."""

    def __init__(self, table: ArrayLike, *, seed: int = 0) -> None:
        """Check and keep the table.

        Args:
            table: recorded experts, `(R, top_k)` integers; a row's experts are all different.
            seed: of the starting rows.

        Raises:
            BadInputError: the table has another shape, or a row names an expert twice.
        """
        array = np.asarray(table)
        if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise BadInputError(
                f"recorded routing has shape {array.shape} of {array.dtype}: give integers [rows, top_k]"
            )
        ordered = np.sort(array, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any() or int(ordered.min()) < 0:
            raise BadInputError("recorded routing names an expert twice for one token, or one below 0")
        self._table = from_array(array.astype(np.int64))
        self._seed = seed

    def assign(self, step: int, micro_batch: int, tokens: int) -> torch.Tensor:
        """Return consecutive rows of the table, `(T, top_k)`, from a row that follows from (seed, step, micro-batch).

        After the last row comes the first one again.
        """
        rows = self._table.shape[0]
        start = derive_seed(self._seed, step, micro_batch) % rows
        return self._table[(torch.arange(tokens) + start) % rows]


def routing_from_loads(loads: ArrayLike, top_k: int, *, rows: int = 4096, seed: int = 0) -> RecordedRouting:
    """Return a routing that chooses experts in proportion to recorded loads, from a table that is drawn once.

    Args:
        loads: tokens per expert of one layer, `(E,)`, not negative. Experts without load are chosen last.
        top_k: experts per token.
        rows: length of the drawn table.
        seed: of the draw.

    Raises:
        BadInputError: the loads are invalid, or fewer than top_k.
    """
    weights = np.asarray(loads, dtype=np.float64)
    if weights.ndim != 1 or weights.size < top_k or not np.isfinite(weights).all() or (weights < 0).any():
        raise BadInputError(f"loads have shape {weights.shape}: give one number >= 0 per expert, at least {top_k}")
    noise = np.random.Generator(np.random.Philox(key=seed % (1 << 64))).gumbel(size=(rows, weights.size))
    # Gumbel top-k draws without replacement; an expert without load comes last.
    with np.errstate(divide="ignore"):
        ranking = np.log(weights)[None, :] + noise
    return RecordedRouting(np.argsort(-ranking, axis=1, kind="stable")[:, :top_k], seed=seed)
