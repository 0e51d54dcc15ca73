"""A squared norm that is the same in every bit, however many ranks add up its parts, and whichever part each has.

The clipping factor is made of the norm. Were each rank to add up its shard in floating point, another cut of the same
gradients would give another last bit: a step that has one rank more, as a planned move has, would train on to other
parameters. So squares are added up in blocks that lie in a bucket where they do whoever owns them, and the blocks'
sums, which are rounded alike everywhere, are added up without any rounding: as whole numbers of the smallest float64's
unit, cut into digits that fit a lane of the sums over all ranks. What comes out is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.planning.levels import BLOCK
from holdfast.runtime.tensors import compute_row_norms, split_tensor, to_ints

#: Bits of a float64's mantissa; the exponent of the smallest one, as frexp gives it; and of the largest.
_MANTISSA, _LEAST, _MOST = 53, -1073, 1024
#: The unit is 2 to the power of minus this.
_UNIT = _MANTISSA - _LEAST
#: Bits of what is added up as int64: a piece has up to twice as many, so 2**27 pieces find room.
_BIN = 18
_BINS = (_MOST - _LEAST + _MANTISSA) // _BIN + 2
#: Bits of a digit: those of 2**17 ranks add up to a float64 that is exact.
_DIGIT = 36
DIGITS = (_BINS * _BIN + _DIGIT) // _DIGIT


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """This rank's part of v, as far as it is of the reduced gradients.

    squares: squared norms of the blocks of this rank's shards, float64 vectors. nonfinite: how many of the shards'
    elements are not finite.
    """

    squares: tuple[torch.Tensor, ...] = ()
    nonfinite: int = 0

    @classmethod
    def from_blocks(cls, squares: Sequence[torch.Tensor], elements: torch.Tensor) -> GradientSummary:
        """Return what a shard comes to that has these elements, and these squares of its blocks."""
        together = torch.cat([*squares]) if squares else torch.empty(0)
        if bool(together.isfinite().all()):
            return cls((together,))
        return cls((together,), int((~elements.isfinite()).sum()))

    @classmethod
    def from_pieces(cls, elements: torch.Tensor, sizes: Sequence[int]) -> GradientSummary:
        """Return what a vector comes to of consecutive pieces with these sizes, each of which begins a block."""
        blocks = all(size % BLOCK == 0 for size in sizes[:-1])  # (then the pieces' blocks are those of the vector)
        parts = (elements,) if blocks else split_tensor(elements, sizes)
        return cls.from_blocks([block_squares(part) for part in parts], elements)

    @classmethod
    def combine(cls, parts: Iterable[GradientSummary]) -> GradientSummary:
        """Return what several come to together."""
        parts = tuple(parts)
        return cls(tuple(one for part in parts for one in part.squares), sum(part.nonfinite for part in parts))

    @property
    def square(self) -> float:
        """The squared norm, as one rank would have it by itself: how it is rounded depends on the shards."""
        return sum(float(one.sum()) for one in self.squares)


def block_squares(part: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of each block of a vector that begins where a block does, in float64."""
    whole = part.numel() // BLOCK * BLOCK
    squares = compute_row_norms(part[:whole].view(-1, BLOCK), torch.float64)
    if whole < part.numel():
        squares = torch.cat((squares, compute_row_norms(part[whole:].view(1, -1), torch.float64)))
    return squares.square_()


def sum_to_digits(squares: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of all these finite numbers, which are not negative, in digits.

    Digits of several such sums can be added up one by one, in any order: `number_of` then makes of them the whole sum.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in squares:
        by_device.setdefault(one.device, []).append(one)
    total = sum(_exact_sum(torch.cat(ones)) for ones in by_device.values())
    return [float((total >> (place * _DIGIT)) & ((1 << _DIGIT) - 1)) for place in range(DIGITS)]


def _exact_sum(squares: torch.Tensor) -> int:
    """Return a sum in units."""
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
    """Return the number that these digits, each of them a sum of some ranks', stand for, rounded once."""
    total = sum(int(digit) << (place * _DIGIT) for place, digit in enumerate(digits))
    try:
        return total / (1 << _UNIT)
    except OverflowError:
        return math.inf
