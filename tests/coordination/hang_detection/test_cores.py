"""Tests that a thread ready to run without a core is not taken for a hung one, before the kernel counts the wait."""

from __future__ import annotations

import pytest

from holdfast.coordination.hang_detection.watchdog import STALLED_S, LateWatch
from holdfast.coordination.timing.reading import CoreWaits, Reading, ThreadClock
from holdfast.protocol.messages.progress import Activity

ME = "a/0/a"
#: Recorded from a worker next to three busy processes: samples 0.34, 0.23, 0.11 and 0 s before it would have been
#: late. Its main thread was ready all the time, and had a core for a millisecond.
RECORDED = ((0.0, True, 5.0, 2.0), (0.11, True, 5.001, 2.021), (0.23, True, 5.001, 2.021), (0.34, True, 5.001, 2.021))


def waiting(now: float, starved_s: float) -> Reading:
    return Reading(
        generation=1,
        step=45,
        activity=Activity.REDUCING,
        micro_batch=None,
        since=99.0,
        world=4,
        waits_since=99.5,
        looked=100.055,
        starved_s=starved_s,
    )


def recorded(scale: float = 1.0) -> list[float]:
    """Return the starvation times of a worker for the recorded samples, scaled."""
    watch, cores, late = LateWatch(), CoreWaits(), list[float]()
    for at, *clock in RECORDED:
        now = 100.0 + at * scale
        starved_s = cores.measure(now, {1: ThreadClock(*clock)})[1]
        watch.check_interval_s = 1.0
        late += [one.stand.for_s for one in watch.find_late(now, {ME: waiting(now, starved_s)})]
    return late


@pytest.mark.parametrize("scale", [1.0, 1.5, 20.0])
def test_a_worker_that_is_ready_without_a_core_is_not_late(scale: float) -> None:
    assert STALLED_S < 0.34 * 1.5 - 0.055
    assert recorded(scale) == []


def test_a_core_wait_counts_from_the_first_sample_that_shows_it() -> None:
    cores, asleep, ready = CoreWaits(), ThreadClock(False, 5.0, 2.0), ThreadClock(True, 5.0, 2.0)
    looks = [(0.0, asleep), (0.1, ready), (0.2, ready), (0.3, ready)]
    assert [cores.measure(at, {1: clock})[1] for at, clock in looks] == pytest.approx([2.0, 2.0, 2.1, 2.2])


def test_after_a_core_wait_only_the_count_of_the_kernel_applies() -> None:
    cores = CoreWaits()
    cores.measure(0.0, {1: ThreadClock(True, 5.0, 2.0)})
    assert cores.measure(0.4, {1: ThreadClock(True, 5.0, 2.0)})[1] == pytest.approx(2.4)
    assert cores.measure(0.5, {1: ThreadClock(True, 5.002, 2.45)})[1] == pytest.approx(2.45)
    assert cores.measure(0.6, {1: ThreadClock(False, 5.01, 2.46)})[1] == pytest.approx(2.46)


def test_a_running_or_sleeping_thread_does_not_wait_for_a_core() -> None:
    cores = CoreWaits()
    for look in range(5):  # an endless loop, and a lock that is never released
        spins, sleeps = ThreadClock(True, 5.0 + look / 10, 2.0), ThreadClock(False, 5.0, 2.0)
        assert cores.measure(look / 10, {1: spins, 2: sleeps}) == {1: 2.0, 2: 2.0}


def test_a_thread_that_has_ended_is_forgotten() -> None:
    cores, clock = CoreWaits(), ThreadClock(True, 5.0, 2.0)
    cores.measure(0.0, {1: clock, 2: clock})
    cores.forget_but({1: clock})
    assert cores.measure(1.0, {1: clock, 2: clock}) == {1: 3.0, 2: 2.0}
