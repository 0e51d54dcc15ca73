"""Eq. 4 against exact rational arithmetic, and beta against enumeration."""

from __future__ import annotations

from fractions import Fraction
from math import comb, log, log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.reliability.sparing.blocking import (
    block_unavailability,
    job_blocked_probability,
    log_zone_free_probability,
    zone_blocked_probability,
)


def exact_tail(blocks: int, spares: int, q: float) -> Fraction:
    down, up = Fraction(q), 1 - Fraction(q)
    return sum((comb(blocks, n) * down**n * up ** (blocks - n) for n in range(spares + 1, blocks + 1)), Fraction(0))


def log_of(free: Fraction) -> float:
    return log(free) if free < 0.5 else log1p(-float(1 - free))


@given(blocks=st.integers(1, 60), spares=st.integers(0, 60), q=st.floats(1e-6, 0.99))
def test_equals_exact_arithmetic(blocks: int, spares: int, q: float) -> None:
    exact = exact_tail(blocks, spares, q)
    assert zone_blocked_probability(blocks, spares, q) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)
    if exact < 1:
        assert log_zone_free_probability(blocks, spares, q) == pytest.approx(log_of(1 - exact), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("spares", [8, 16, 64, 128])
def test_keeps_its_digits_in_the_far_tail_of_a_thousand_blocks(spares: int) -> None:
    # Unavailability is 1/76, in whole numbers, because exact_tail's fractions would take seconds.
    tail = sum(comb(1024, n) * 75 ** (1024 - n) for n in range(spares + 1, 1025))
    exact = float(Fraction(tail, 76**1024))
    assert zone_blocked_probability(1024, spares, 1 / 76) == pytest.approx(exact, rel=1e-9)


def test_never_blocked_with_a_spare_for_every_block() -> None:
    assert zone_blocked_probability(4, np.array([4, 5]), 0.9).tolist() == [0.0, 0.0]


def test_the_job_is_blocked_when_any_zone_is() -> None:
    p = 0.3
    enumerated = sum(
        p ** sum(zones) * (1 - p) ** (3 - sum(zones))
        for zones in np.ndindex(2, 2, 2)
        if any(zones)
    )  # fmt: skip
    assert job_blocked_probability(p, 3) == pytest.approx(enumerated)
    assert job_blocked_probability(1e-13, 4) == pytest.approx(4e-13)
    assert job_blocked_probability(1.0, 4) == 1.0


def test_unavailability_is_the_share_of_time_in_repair() -> None:
    assert block_unavailability(76.0, 24.0) == pytest.approx(0.24)
