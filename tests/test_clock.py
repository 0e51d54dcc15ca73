"""Marks of the clock, at which thousands of nodes do their periodic work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import MARK_S, until_mark


@given(st.floats(0.0, 4e9), st.floats(2 * MARK_S, 60.0))
def test_a_wait_ends_on_a_mark_and_is_never_longer_than_requested(now: float, within_s: float) -> None:
    wait_s = until_mark(now, within_s)
    assert within_s - MARK_S - 1e-5 < wait_s <= within_s
    marks = (now + wait_s) / MARK_S
    assert marks == pytest.approx(round(marks), abs=1e-4)


@given(st.floats(0.0, 4e9), st.floats(0.0, 2 * MARK_S, exclude_max=True))
def test_short_waits_are_not_aligned_to_marks(now: float, within_s: float) -> None:
    assert until_mark(now, within_s) == within_s


def test_a_wait_that_starts_on_a_mark_is_not_shortened() -> None:
    now = 1_700_000_000.0
    for _ in range(1000):
        before, now = now, now + until_mark(now, 0.5) + 1e-4  # Timers are always slightly late.
        assert now - before > 0.5 - 2e-4
