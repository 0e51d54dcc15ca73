"""A squared norm that is the same in every bit for any number of ranks and any division into shards.

The clipping factor follows from the norm. If each rank summed its shard in floating point, another division of the same
gradients would give another last bit. A step with one more rank, as in a planned move, would then train other
parameters. So squares are summed in blocks at fixed positions of a bucket, which every owner rounds in the same way.
The sums of the blocks are then added exactly: as integers in units of the smallest float64, split into digits that fit
into the sums over all ranks. The result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.planning.levels import BLOCK
from holdfast.runtime.tensors import compute_row_norms, split_tensor, to_ints

#: bits of a float64's mantissa
_MANTISSA = 53
#: exponents of the smallest and the largest float64, as frexp returns them
_LEAST, _MOST = -1073, 1024
#: the unit is 2 to the power of minus this
_UNIT = _MANTISSA - _LEAST
#: bits of a bin, which is an int64 sum: shifted pieces have up to twice as many, so 2**27 of them fit
_BIN = 18
_BINS = (_MOST - _LEAST + _MANTISSA) // _BIN + 2
#: bits of a digit: the sum over 2**17 ranks is an exact float64
_DIGIT = 36
DIGITS = (_BINS * _BIN + _DIGIT) // _DIGIT


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """This rank's part of the step result that follows from the reduced gradients."""

    #: squared norms of the blocks of this rank's shards, float64 vectors
    squares: tuple[torch.Tensor, ...] = ()
    #: number of the shards' elements that are not finite
    nonfinite: int = 0

    @classmethod
    def from_blocks(cls, squares: Sequence[torch.Tensor], elements: torch.Tensor) -> GradientSummary:
        """Return the summary of a shard with these elements and these squared norms of its blocks. Elements that are
        not finite are only counted if a norm is not finite.
        """
        together = torch.cat([*squares]) if squares else torch.empty(0)
        if bool(together.isfinite().all()):
            return cls((together,))
        return cls((together,), int((~elements.isfinite()).sum()))

    @classmethod
    def from_pieces(cls, elements: torch.Tensor, sizes: Sequence[int]) -> GradientSummary:
        """Return the summary of a vector with consecutive pieces of these sizes; each piece starts a block."""
        # If true, the blocks of the pieces are the same as the blocks of the whole vector.
        blocks = all(size % BLOCK == 0 for size in sizes[:-1])
        parts = (elements,) if blocks else split_tensor(elements, sizes)
        return cls.from_blocks([block_squares(part) for part in parts], elements)

    @classmethod
    def combine(cls, parts: Iterable[GradientSummary]) -> GradientSummary:
        """Return the summary of several parts together."""
        parts = tuple(parts)
        return cls(tuple(one for part in parts for one in part.squares), sum(part.nonfinite for part in parts))

    @property
    def square(self) -> float:
        """The squared norm of this rank's part; its rounding depends on the shards."""
        return sum(float(one.sum()) for one in self.squares)


def block_squares(part: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of each block in float64; the vector must start at the start of a block."""
    whole = part.numel() // BLOCK * BLOCK
    squares = compute_row_norms(part[:whole].view(-1, BLOCK), torch.float64)
    if whole < part.numel():
        squares = torch.cat((squares, compute_row_norms(part[whole:].view(1, -1), torch.float64)))
    return squares.square_()


def sum_to_digits(squares: Sequence[torch.Tensor]) -> list[float]:
    """Return the exact sum of all elements of these tensors (float64, finite, not negative), as `DIGITS` digits, the
    lowest first.

    Digits of several sums can be added one by one, in any order; `digits_to_number` then returns the total.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in squares:
        by_device.setdefault(one.device, []).append(one)
    total = sum(_exact_sum(torch.cat(ones)) for ones in by_device.values())
    return [float((total >> (place * _DIGIT)) & ((1 << _DIGIT) - 1)) for place in range(DIGITS)]


def _exact_sum(squares: torch.Tensor) -> int:
    """Return the sum of non-negative, finite float64 numbers, not rounded, as an integer in units of 2 ** -`_UNIT`."""
    fractions, exponents = torch.frexp(squares)
    mantissas = (fractions * 2.0**_MANTISSA).to(torch.int64)
    places = exponents.to(torch.int64) - _LEAST
    bins = places.div(_BIN, rounding_mode="floor")
    shifts = places - bins * _BIN
    sums = torch.zeros(_BINS, dtype=torch.int64, device=squares.device)
    for number in range(_MANTISSA // _BIN + 1):
        piece = (mantissas >> (number * _BIN)) & ((1 << _BIN) - 1)
        sums.index_add_(0, bins + number, piece << shifts)
    return sum(count << (place * _BIN) for place, count in enumerate(to_ints(sums)) if count)


def digits_to_number(digits: Sequence[float]) -> float:
    """Return the number of these digits, the lowest first, which may be sums over ranks; rounded once. inf if it is too
    large for a float.
    """
    total = sum(int(digit) << (place * _DIGIT) for place, digit in enumerate(digits))
    try:
        return total / (1 << _UNIT)
    except OverflowError:
        return math.inf
