"""Tests of the budgets of escalation steps: the time window, and failures that count as one try."""

from __future__ import annotations

from holdfast.coordination.failures.budget import TOGETHER_S, WINDOW_S, Budget


def test_tries_are_counted_within_a_time_window() -> None:
    budget = Budget()
    assert [budget.count_try(10.0 * number) for number in range(4)] == [1, 2, 3, 4]
    assert budget.count_try(WINDOW_S) == 4  # the first try is outside the window
    assert budget.count_try(10 * WINDOW_S) == 1


def test_simultaneous_failures_count_as_one_try_and_a_repeated_one_as_two() -> None:
    budget = Budget()
    assert [budget.count_try(0.1 * place, place) for place in range(4)] == [1, 1, 1, 1]
    assert budget.count_try(0.5, 2) == 2
    assert budget.count_try(0.6, 3) == 2
    assert budget.count_try(0.5 + TOGETHER_S, 0) == 3
