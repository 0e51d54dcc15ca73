"""Tests of a job's speed as measured by its coordinator."""

from __future__ import annotations

import pytest

from holdfast.coordination.hang_detection.pace import PROBE_FLOOR_S, Pace
from holdfast.coordination.timing.times import TOGETHER_S, UNKNOWN_S

STEP_S = 0.5


def trained(steps: int) -> Pace:
    """Return a pace after this many steps of equal length, the newest at `steps` times that length."""
    pace = Pace()
    pace.on_generation(4, 0.0)
    pace.on_entered(0.0)
    for step in range(1, steps + 1):
        pace.on_applied(step, STEP_S * step)
    return pace


def test_the_mean_step_time_is_known_after_three_full_steps() -> None:
    assert trained(3).mean_s is None  # the first step begins before all are known to have entered
    assert trained(4).mean_s == STEP_S


def test_the_probe_and_the_deadlines_follow_multiples_of_the_step_time() -> None:
    pace, last = trained(10), 10 * STEP_S
    assert not pace.should_ask(last + 1.5 * STEP_S)
    assert pace.should_ask(last + 1.5 * STEP_S + PROBE_FLOOR_S + 0.01)
    assert pace.stopped_at == pytest.approx(last + 2.0 * STEP_S + PROBE_FLOOR_S)
    assert pace.overdue_at == pytest.approx(last + 3.0 * STEP_S + PROBE_FLOOR_S)


def test_the_first_steps_have_the_limit_of_unknown_work() -> None:
    pace = trained(0)
    assert not pace.should_ask(UNKNOWN_S + 1.0)
    assert pace.overdue_at == pace.stopped_at == UNKNOWN_S
    assert not pace.should_ask(TOGETHER_S)
    assert pace.should_ask(TOGETHER_S + 1.0)
    assert pace.together_s == TOGETHER_S


def test_a_coordinator_outage_does_not_count_as_a_slow_step() -> None:
    pace = trained(10)
    pace.restart_waiting(100.0)
    assert not pace.should_ask(100.1)
    pace.on_applied(40, 100.2)
    assert pace.mean_s == STEP_S
    assert not pace.should_ask(100.3)
