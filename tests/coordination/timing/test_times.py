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


def test_no_limit_exists_before_the_warm_up_measurements() -> None:
    assert took(*[0.1] * (WARM_UP - 1)).limit_s(COMPUTE, 4) is None
    assert took(*[0.1] * WARM_UP).limit_s(COMPUTE, 4) == pytest.approx(0.3 + FLOOR_S)


def test_the_mean_forgets_old_times() -> None:
    times = took(*[0.1] * 100, *[0.2] * 5 * MEMORY)
    assert times.mean_s(COMPUTE, 4) == pytest.approx(0.2, rel=0.01)


def test_a_total_of_several_times_counts_as_that_many_of_their_mean() -> None:
    times = Times()
    times.add(COMPUTE, 4, Total(6, 0.6, 0.3))
    assert times.mean_s(COMPUTE, 4) == pytest.approx(0.1)


def test_a_single_hang_does_not_raise_the_limit() -> None:
    times = took(*[0.1] * 20, 120.0)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.5, rel=0.2)


def test_a_new_world_size_has_twice_the_old_limit_until_it_is_measured() -> None:
    times = took(*[0.1] * 10, world=4)
    assert times.limit_s(COMPUTE, 3) == pytest.approx(2 * (0.3 + FLOOR_S))
    took(*[0.4] * 10, world=3, times=times)
    assert times.limit_s(COMPUTE, 3) == pytest.approx(1.2 + FLOOR_S)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.3 + FLOOR_S)


def test_an_occasionally_long_activity_has_twice_its_longest_time() -> None:
    times = took(*[0.001] * 30, 5.0, *[0.001] * 30, activity=SCRIPT)
    assert times.limit_s(SCRIPT, 4) == pytest.approx(10.0)


def test_each_limit_allows_one_and_a_half_steps_more_than_usual() -> None:
    times = took(*[0.2] * 20)
    took(*[0.5] * 10, activity=Activity.REDUCING, times=times)
    assert took(*[0.01] * 3, activity=Activity.APPLYING, world=3, times=times).limit_s(COMPUTE, 4) == pytest.approx(0.8)
    took(*[0.01] * 10, activity=Activity.APPLYING, times=times)
    took(30.0, 40.0, 50.0, activity=Activity.PAUSED, times=times)
    assert times.limit_s(Activity.APPLYING, 4) == pytest.approx(0.01 + 1.5 * 0.91)
    assert times.limit_s(COMPUTE, 4) == pytest.approx(0.2 + 1.5 * 0.91)


def test_activities_that_wait_for_a_message_have_no_limit() -> None:
    for activity in (Activity.AWAITING, Activity.STARTING, Activity.FINISHED, Activity.ENDING):
        assert took(*[0.1] * 10, activity=activity).limit_s(activity, 4) is None


def test_a_time_longer_than_usual_counts_as_a_warning() -> None:
    times = took(*[0.1] * 10)
    assert times.warnings == {}
    took(0.12, times=times)
    assert times.warnings == {COMPUTE: 1}
