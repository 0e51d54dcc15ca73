"""Quantiles against a printed table (Abramowitz and Stegun 26.8 and 26.10)."""

from __future__ import annotations

import pytest

from holdfast.planning.special import chi_square_quantile, student_quantile


@pytest.mark.parametrize(("freedom", "value"), [(1, 63.657), (10, 3.169), (120, 2.617)])
def test_students_t(freedom: int, value: float) -> None:
    assert student_quantile(0.995, freedom) == pytest.approx(value, abs=5e-4)
    assert student_quantile(0.005, freedom) == pytest.approx(-value, abs=5e-4)


@pytest.mark.parametrize(
    ("share", "freedom", "value"), [(0.025, 10, 3.24697), (0.975, 10, 20.4831), (0.5, 1, 0.454937)]
)
def test_chi_square(share: float, freedom: int, value: float) -> None:
    assert chi_square_quantile(share, freedom) == pytest.approx(value, rel=1e-5)
