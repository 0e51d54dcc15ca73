"""Tests of an agent's watchdog: late workers are reported repeatedly, but not for time when the agent did not run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast.coordination.hang_detection.watchdog import LEARN_S, MAX_EXPECTED, REPORT_AGAIN, STALLED_S, LateWatch
from holdfast.coordination.timing.reading import ProgressAccount, Reading, Total
from holdfast.coordination.timing.times import ENDLESS, UNKNOWN_S
from holdfast.protocol.job_spec import OWN_TIMES_S
from holdfast.protocol.messages.progress import Activity, Late, OwnTimes, WatchWork

ME = "a/0/a"
COMPUTING = Reading(generation=1, step=5, activity=Activity.COMPUTE, micro_batch=2, since=100.0, world=4)
#: three times a tenth of a second, plus the floor of 0.2 s
LIMIT_S = 0.5


def made(activity: Activity = Activity.COMPUTE) -> LateWatch:
    """Return a watchdog that knows that the activity takes a tenth of a second."""
    watch = LateWatch()
    watch.learn(0.0, {ME: COMPUTING}, {ME: ProgressAccount()})
    watch.learn(1.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={activity: Total(10, 1.0, 0.1)})})
    return watch


def look_until(watch: LateWatch, reading: Reading, start: float, end: float) -> list[tuple[float, Late]]:
    """Run the watchdog at its check interval; return its reports with their times."""
    told: list[tuple[float, Late]] = []
    now = start
    while now < end:
        told += [(now, late) for late in watch.find_late(now, {ME: reading})]
        now += watch.check_interval_s
    return told


def test_without_known_times_a_very_late_worker_is_reported_without_a_limit() -> None:
    (at, late), *_ = look_until(LateWatch(), COMPUTING, 100.0, 200.0)
    assert 0.0 < at - 100.0 - UNKNOWN_S < 0.2
    assert late.stand.limit_s == 0.0


@pytest.mark.parametrize("activity", sorted(ENDLESS))
def test_a_worker_in_an_endless_activity_is_never_late(activity: Activity) -> None:
    assert look_until(LateWatch(), replace(COMPUTING, activity=activity), 100.0, 200.0) == []


def test_a_late_worker_is_reported_within_one_check_interval() -> None:
    (at, told), *_ = look_until(made(), COMPUTING, 100.03, 102.0)
    late = told.stand
    assert 100.0 + LIMIT_S < at < 100.0 + LIMIT_S + 0.03
    assert (late.worker, late.generation, late.step, late.micro_batch) == (ME, 1, 5, 2)
    assert (late.activity, late.waits) == (Activity.COMPUTE, False)
    assert abs(late.limit_s - LIMIT_S) < 1e-6


def test_a_late_worker_is_reported_again_at_growing_intervals() -> None:
    times = [late.stand.for_s / LIMIT_S for _, late in look_until(made(), COMPUTING, 100.0, 110.0)]
    assert len(times) > 3
    assert all(after >= REPORT_AGAIN * before * 0.99 for before, after in pairwise(times))


def test_a_new_activity_restarts_the_limit() -> None:
    watch = made()
    assert len(look_until(watch, COMPUTING, 100.0, 100.6)) == 1
    following = replace(COMPUTING, micro_batch=3, since=100.6)
    assert [late.ended for _, late in look_until(watch, following, 100.6, 101.0)] == [True]
    assert len(look_until(watch, following, 101.0, 101.2)) == 1


def test_time_in_which_the_agent_did_not_run_is_excluded() -> None:
    watch = made()
    watch.find_late(100.01, {ME: COMPUTING})
    assert watch.find_late(130.0, {ME: COMPUTING}) == []  # perhaps the whole machine was stopped
    assert look_until(watch, COMPUTING, 130.02, 130.4) == []
    assert len(look_until(watch, COMPUTING, 130.4, 130.6)) == 1


def test_time_in_which_a_worker_had_no_core_is_excluded() -> None:
    """The machine has four times as many busy threads as cores, but no process hangs."""
    watch, late = made(), []
    for look in range(-20, 200):
        now = 100.0 + look / 50
        starved = replace(COMPUTING, since=min(now, 100.0), starved_s=7.0 + 0.75 * look / 50)
        late += [now for _ in watch.find_late(now, {ME: starved})]
    assert 100.0 + 4 * LIMIT_S <= late[0] < 100.0 + 4 * LIMIT_S + 0.1


def test_time_in_which_another_thread_of_the_worker_had_no_core_is_excluded() -> None:
    """The other thread may hold the interpreter lock."""
    watch, late = made(), []
    for look in range(100):
        now = 100.0 + look / 50
        others = {7: 3.0 + look / 50, 8: 1.0} if ME in watch.closely_watched else {}
        late += watch.find_late(now, {ME: replace(COMPUTING, others_starved_s=others)})
    assert late == []


def test_only_a_worker_with_a_long_activity_is_watched_closely() -> None:
    watch, other = made(), "a/1/b"
    seen: list[frozenset[str]] = []
    for look in range(10):
        now = 100.0 + look / 25
        watch.find_late(now, {ME: COMPUTING, other: replace(COMPUTING, since=now)})
        seen.append(watch.closely_watched)
    assert seen[:4] == [frozenset()] * 4
    assert seen[5:] == [{ME}] * 5


def test_starvation_before_the_first_check_is_not_excluded() -> None:
    watch = made()
    starved = replace(COMPUTING, others_starved_s={7: 50.0})
    (at, _), *_ = look_until(watch, starved, 100.0, 102.0)
    assert 100.0 + LIMIT_S < at < 100.0 + LIMIT_S + 0.03


def test_a_new_process_with_less_starvation_is_late_at_its_own_limit() -> None:
    watch = made()
    assert look_until(watch, replace(COMPUTING, starved_s=50.0), 100.0, 100.3) == []
    (at, _), *_ = look_until(watch, replace(COMPUTING, since=100.3, starved_s=0.1), 100.3, 102.0)
    assert 100.3 + LIMIT_S < at < 100.3 + LIMIT_S + 0.03


def test_a_worker_in_a_collective_is_not_late_while_it_polls() -> None:
    watch = made()
    for tenth in range(100):
        now = 100.0 + tenth / 10
        assert watch.find_late(now, {ME: replace(COMPUTING, waits_since=100.0, looked=now - 0.01)}) == []


def test_a_waiting_worker_that_does_not_poll_has_stalled() -> None:
    (at, late), *_ = look_until(made(), replace(COMPUTING, waits_since=100.0, looked=100.1), 100.1, 101.0)
    assert late.stand.waits
    assert 100.1 + STALLED_S < at < 100.1 + STALLED_S + 0.03


def test_invalid_values_in_a_progress_page_are_harmless() -> None:
    watch = made()
    assert watch.find_late(100.0, {ME: replace(COMPUTING, since=1e300)}) == []
    watch.learn(2.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(5, -1.0, 0.1)})})
    watch.learn(3.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(1, 1e300, 0.1)})})
    assert abs((watch.times.limit_s(Activity.COMPUTE, 4) or 0.0) - LIMIT_S) < 0.2


def test_the_totals_of_a_new_process_start_from_zero() -> None:
    watch = made()
    watch.learn(2.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(2, 0.2, 0.1)})})
    watch.learn(3.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(4, 0.4, 0.1)})})
    assert abs((watch.times.mean_s(Activity.COMPUTE, 4) or 0.0) - 0.1) < 1e-9


def test_work_that_ended_while_the_world_size_changed_is_not_counted() -> None:
    watch = made()
    smaller = {ME: replace(COMPUTING, world=3)}
    watch.learn(2.0, smaller, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(20, 9.0, 5.0)})})
    assert watch.times.mean_s(Activity.COMPUTE, 3) is None
    watch.learn(3.0, smaller, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(25, 9.5, 5.0)})})
    assert abs((watch.times.mean_s(Activity.COMPUTE, 3) or 0.0) - 0.1) < 1e-9


def test_checks_are_rare_if_no_worker_can_be_late_soon() -> None:
    watch = LateWatch()
    watch.learn(0.0, {ME: COMPUTING}, {ME: ProgressAccount()})
    watch.learn(1.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(10, 300.0, 31.0)})})
    watch.find_late(100.0, {ME: COMPUTING})
    assert watch.check_interval_s == 1.0


def test_time_waited_in_a_collective_is_excluded_when_work_resumes() -> None:
    """A worker probed between two collectives once counted as late because it had waited in the first one.

    It lost its process because of another worker's slow link."""
    watch = made()
    waited = replace(COMPUTING, looked=108.0)
    (stood,) = watch.list_activities(108.1, {ME: waited}, ())
    assert stood.for_s == pytest.approx(0.1)
    assert watch.find_late(108.1, {ME: waited}) == []
    late = [one for look in range(1, 25) for one in watch.find_late(108.1 + look / 50, {ME: waited})]
    assert [one.stand.for_s for one in late] == [pytest.approx(0.5, abs=0.021)]


def test_times_are_learned_periodically() -> None:
    watch = made()
    assert not watch.is_learning_due(1.0 + LEARN_S / 2)
    assert watch.is_learning_due(1.0 + LEARN_S)


def test_compute_times_are_reported_periodically() -> None:
    watch, told = LateWatch(), list[OwnTimes]()
    for number in range(1, 40):
        seconds = 0.1 * number + (0.5 if number > 30 else 0.0)
        totals = {Activity.COMPUTE: Total(number, seconds, 0.6), Activity.VOTED: Total(number, 1.0, 1.0)}
        told += watch.learn(float(number), {ME: COMPUTING}, {ME: ProgressAccount(totals=totals)})
    assert [round(one.compute_s[ME], 2) for one in told][:4] == [0.1] * 4
    assert len(told) == 8
    assert [one.slow.get(Activity.COMPUTE, 0) for one in told] == [0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(("tell_s", "times"), [(2.0, 10), (0.5, 20)])
def test_the_report_interval_of_compute_times_can_be_set(tell_s: float, times: int) -> None:
    watch, told = LateWatch(), list[OwnTimes]()
    watch.report_interval_s = tell_s
    for number in range(1, 21):
        totals = {Activity.COMPUTE: Total(number, 0.1 * number, 0.1)}
        told += watch.learn(float(number), {ME: COMPUTING}, {ME: ProgressAccount(totals=totals)})
    assert len(told) == times


def test_compute_times_of_a_lost_worker_are_not_reported() -> None:
    watch, totals = LateWatch(), {Activity.COMPUTE: Total(1, 0.1, 0.1)}
    watch.learn(0.0, {ME: COMPUTING}, {ME: ProgressAccount()})
    watch.learn(1.0, {ME: COMPUTING}, {ME: ProgressAccount(totals=totals)})
    other = "a/0/b"
    assert watch.learn(OWN_TIMES_S + 1.0, {other: COMPUTING}, {other: ProgressAccount()}) == []


def test_times_are_learned_separately_for_each_world_size() -> None:
    watch = made()
    larger = replace(COMPUTING, world=8)
    watch.learn(2.0, {ME: larger}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(20, 51.0, 5.0)})})
    assert watch.times.mean_s(Activity.COMPUTE, 8) is None  # the time cannot be split between the two world sizes
    assert watch.times.mean_s(Activity.COMPUTE, 4) == 0.1
    watch.learn(3.0, {ME: larger}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(24, 53.0, 5.0)})})
    assert watch.times.mean_s(Activity.COMPUTE, 8) == 0.5


def ends(watch: LateWatch, reading: Reading, until: float) -> list[tuple[float, float]]:
    """Run an activity until a time, then another one; return the reported durations and limits."""
    look_until(watch, reading, reading.since, until)
    following = replace(reading, micro_batch=None, activity=Activity.REDUCING, since=until)
    reported = [late for _, late in look_until(watch, following, until + 0.05, until + 0.3)]
    return [(late.stand.for_s, late.stand.limit_s) for late in reported if late.ended]


def test_the_end_of_late_work_is_reported_with_its_duration() -> None:
    assert ends(made(), COMPUTING, 103.0) == [(pytest.approx(3.0, abs=0.001), pytest.approx(LIMIT_S))]
    assert ends(made(), COMPUTING, 100.4) == []


def test_slow_work_at_which_another_worker_was_killed_is_reported() -> None:
    """The limit here may be longer than on the node that ended its worker."""
    watch = made()
    watch.expect_end(WatchWork(step=5, activity=Activity.COMPUTE, micro_batch=2, for_s=0.3))
    assert ends(watch, COMPUTING, 100.4) == [(pytest.approx(0.4, abs=0.001), pytest.approx(LIMIT_S))]
    assert ends(watch, replace(COMPUTING, since=110.0), 110.25) == []
    assert ends(watch, replace(COMPUTING, since=120.0, step=6), 120.4) == []


def test_the_number_of_watched_work_items_is_bounded() -> None:
    watch = made()
    for step in range(5, 5 + MAX_EXPECTED + 1):
        watch.expect_end(WatchWork(step=step, activity=Activity.COMPUTE, micro_batch=2, for_s=0.3))
    assert ends(watch, COMPUTING, 100.4) == []
    assert len(ends(watch, replace(COMPUTING, since=110.0, step=6), 110.4)) == 1


def first_time_s(first_s: float, done: int) -> float:
    """Return the limit of a new process after `done` computations; its predecessor's first one took `first_s`."""
    watch = LateWatch()
    slow = ProgressAccount(totals={Activity.COMPUTE: Total(1, first_s, first_s)})
    watch.learn(0.0, {ME: COMPUTING}, {ME: ProgressAccount()})
    watch.learn(1.0, {ME: COMPUTING}, {ME: slow})
    watch.learn(
        2.0, {ME: COMPUTING}, {ME: ProgressAccount(totals={Activity.COMPUTE: Total(400, first_s + 39.9, first_s)})}
    )
    new = "a/0/b"
    totals = {Activity.COMPUTE: Total(done, 0.1 * done, 0.1)} if done else {}
    watch.learn(3.0, {new: COMPUTING}, {new: ProgressAccount(totals=totals)})
    now = 100.0
    while not (late := watch.find_late(now, {new: COMPUTING})):
        now += watch.check_interval_s
    return late[0].stand.limit_s


def test_the_first_work_of_a_new_process_has_the_limit_of_earlier_first_work() -> None:
    """A restarted worker that compiled in its first step (torch.compile) was once taken for a hung one."""
    assert first_time_s(20.0, done=0) == first_time_s(20.0, done=2) == 40.0
    assert first_time_s(20.0, done=3) < 2.0
    assert first_time_s(0.1, done=0) < 1.0


def test_garbage_collection_time_is_excluded() -> None:
    """With a large heap, a collection takes a second on one worker at a time."""
    watch = made()
    look_until(watch, replace(COMPUTING, collected_s=7.0), 100.01, 100.1)
    assert look_until(watch, replace(COMPUTING, collected_s=12.0), 100.1, 105.4) == []
    assert look_until(watch, replace(COMPUTING, collected_s=12.0), 105.4, 105.7) != []
