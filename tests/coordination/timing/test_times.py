"""Tests of time limits that follow from earlier durations."""

from __future__ import annotations

import pytest

from holdfast.coordination.timing.reading import Total
from holdfast.coordination.timing.times import FLOOR_S, MEMORY, WARM_UP, Times
from holdfast.protocol.messages.progress import Activity

COMPUTE, SCRIPT = Activity.COMPUTE, Activity.SCRIPT


def took(*seconds: float, activity: Activity = COMPUTE, world: int = 4, times: Times | None = None) -> Times:
    times = times or Times()
    longest = 0.0
    for each in seconds:
        longest = max(longest, each)
        times.add(activity, world, Total(1, each, longest))
    return times


def test_nobody_is_judged_before_enough_have_ended() -> None:
    assert took(*[0.1] * (WARM_UP - 1)).limit_s(COMPUTE, 4) is None
    assert took(*[0.1] * WARM_UP).limit_s(COMPUTE, 4) == pytest.approx(0.3 + FLOOR_S)


def test_a_mean_follows_what_changes_and_forgets_what_was() -> None:
    times = took(*[0.1] * 100, *[0.2] * 5 * MEMORY)
    assert times.mean_s(COMPUTE, 4) == pytest.approx(0.2, rel=0.01)


def test_several_that_ended_between_two_looks_count_as_so_many_of_their_mean() -> None:
    times = Times()
    times.add(COMPUTE, 4, Total(6, 0.6, 0.3))
    assert times.mean_s(COMPUTE, 4) == pytest.approx(0.1)


def test_one_that_hung_does_not_become_usual() -> None:
    times = took(*[0.1] * 20, 120.0)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.5, rel=0.2)


def test_another_world_size_has_times_of_its_own_and_until_then_twice_the_others_limit() -> None:
    times = took(*[0.1] * 10, world=4)
    assert times.limit_s(COMPUTE, 3) == pytest.approx(2 * (0.3 + FLOOR_S))
    took(*[0.4] * 10, world=3, times=times)
    assert times.limit_s(COMPUTE, 3) == pytest.approx(1.2 + FLOOR_S)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.3 + FLOOR_S)


def test_what_is_long_now_and_then_may_take_twice_the_longest_that_has_ended() -> None:
    times = took(*[0.001] * 30, 5.0, *[0.001] * 30, activity=SCRIPT)
    assert times.limit_s(SCRIPT, 4) == pytest.approx(10.0)


def test_anything_may_take_one_and_a_half_steps_longer_than_usual() -> None:
    times = took(*[0.2] * 20)
    took(*[0.5] * 10, activity=Activity.REDUCING, times=times)
    assert took(*[0.01] * 3, activity=Activity.APPLYING, world=3, times=times).limit_s(COMPUTE, 4) == pytest.approx(0.8)
    took(*[0.01] * 10, activity=Activity.APPLYING, times=times)
    took(30.0, 40.0, 50.0, activity=Activity.PAUSED, times=times)
    assert times.limit_s(Activity.APPLYING, 4) == pytest.approx(0.01 + 1.5 * 0.91)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.2 + 1.5 * 0.91)


def test_who_waits_for_a_word_is_never_late() -> None:
    for activity in (Activity.AWAITING, Activity.STARTING, Activity.FINISHED, Activity.ENDING):
        assert took(*[0.1] * 10, activity=activity).limit_s(activity, 4) is None


def test_longer_than_usual_is_worth_a_warning() -> None:
    times = took(*[0.1] * 10)
    assert times.warnings == {}
    took(0.12, times=times)
    assert times.warnings == {COMPUTE: 1}
