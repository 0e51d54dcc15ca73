"""The squared norm does not depend on how gradients are cut, or on the order of the parts."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planning.levels import BLOCK
from holdfast.runtime.reduction.squares import DIGITS, GradientSummary, block_squares, digits_to_number, sum_to_digits

_numbers = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False, max_value=1e300)


def _added(parts: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts, strict=True)]


@given(st.lists(st.lists(_numbers, max_size=9), min_size=1, max_size=5))
def test_a_sum_in_digits_is_exact_and_rounded_once(parts: list[list[float]]) -> None:
    digits = [sum_to_digits([torch.tensor(part, dtype=torch.float64)]) for part in parts]
    exact = sum(Fraction(number) for part in parts for number in part)
    assert digits_to_number(_added(digits)) == exact.numerator / exact.denominator


def test_the_smallest_and_largest_doubles_are_exact() -> None:
    ends = [5e-324, 2.2250738585072014e-308, 1.7976931348623157e308]
    for number in ends:
        assert digits_to_number(sum_to_digits([torch.tensor([number], dtype=torch.float64)])) == number
    assert digits_to_number(_added([sum_to_digits([torch.tensor([ends[-1]], dtype=torch.float64)])] * 3)) == math.inf
    assert sum_to_digits([]) == [0.0] * DIGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(deadline=None, max_examples=40)
@given(blocks=st.integers(1, 40), tail=st.integers(0, BLOCK - 1), data=st.data())
def test_the_norm_of_a_vector_is_independent_of_its_shards(
    dtype: torch.dtype, blocks: int, tail: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    vector = torch.randn(blocks * BLOCK + tail, generator=generator, dtype=torch.float64).to(dtype)
    cuts = sorted(data.draw(st.sets(st.integers(0, blocks), max_size=6)))
    ends = [0, *(cut * BLOCK for cut in cuts), vector.numel()]
    shards = [GradientSummary.from_blocks([block_squares(vector[a:b])], vector[a:b]) for a, b in pairwise(ends)]
    norms = {
        digits_to_number(_added([sum_to_digits(shard.squares) for shard in order]))
        for order in (shards, shards[::-1], shards[1:] + shards[:1])
    }
    norms.add(digits_to_number(sum_to_digits([block_squares(vector)])))
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(vector.to(torch.float64).square().sum()), rel=1e-14)


def test_pieces_that_end_within_a_block_have_separate_blocks() -> None:
    pieces = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (BLOCK + 3, 2 * BLOCK, 5)]
    together = GradientSummary.from_pieces(torch.cat(pieces), [piece.numel() for piece in pieces])
    alone = [block_squares(piece) for piece in pieces]
    assert torch.equal(together.squares[0], torch.cat(alone))


def test_nonfinite_elements_are_counted() -> None:
    vector = torch.ones(3 * BLOCK)
    vector[5], vector[2 * BLOCK] = math.inf, math.nan
    shard = GradientSummary.from_blocks([block_squares(vector)], vector)
    assert shard.nonfinite == 2
    assert not math.isfinite(shard.square)
