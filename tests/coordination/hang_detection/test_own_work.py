"""Tests of slow work and hung workers: the kills that count, and the time limits of work."""

from __future__ import annotations

import pytest
from machinery import Job, w

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.hang_detection.own_work import VERDICT_S, SlowWork
from holdfast.protocol import events as ev
from holdfast.protocol.messages.progress import Activity, CountHang, ThreadActivity


@pytest.fixture
def job() -> Job:
    return Job(nodes=4).start()


def late(worker: str, for_s: float, *, step: int = 11, micro_batch: int = 3, limit_s: float = 0.5) -> ThreadActivity:
    activity = Activity.COMPUTE
    return ThreadActivity(
        worker=worker, generation=1, step=step, activity=activity, for_s=for_s, limit_s=limit_s, micro_batch=micro_batch
    )


def is_ended(work: SlowWork, stand: ThreadActivity) -> bool:
    return [one.worker for one in work.exclude_slow_work([stand])] == [stand.worker]


def counted(job: Job, work: SlowWork, step: int) -> list[str]:
    """Return the workers with counted kills after a step is committed and the time for a verdict is over."""
    told: list[str] = []
    for seconds in (0.0, VERDICT_S - 0.1, 0.2):
        job.now += seconds
        job.machine.transaction.now = job.now
        work.tick(step)
    job.tick(0.0)
    told += [message.worker for message in job.sent(CountHang)]
    return told


def test_a_restarted_worker_has_ten_times_the_limit_for_the_same_work(job: Job) -> None:
    """It computes the same work again. With the old limit, a long sequence never finished and its node was removed."""
    work = SlowWork(job.machine.transaction)
    assert is_ended(work, late(w("n1"), 0.6))
    assert is_ended(work, late(w("n1"), 0.7)), "the order is repeated until the process has ended"
    for process, for_s, ended in (("b", 0.6, False), ("b", 4.9, False), ("b", 5.1, True), ("c", 49.0, False)):
        assert is_ended(work, late(w("n1", process), for_s)) == ended
    assert is_ended(work, late(w("n1", "c"), 51.0)), "a repeated hang is detected each time"
    counted(job, work, 11)
    assert is_ended(work, late(w("n1", "d"), 0.6, step=12))


def test_a_killed_worker_is_reported_with_the_limit_in_force(job: Job) -> None:
    """Messages once named the agent's limit, although ten times as much was allowed."""
    work = SlowWork(job.machine.transaction)
    assert [stand.limit_s for stand in work.exclude_slow_work([late(w("n1"), 0.6)])] == [0.5]
    assert [stand.limit_s for stand in work.exclude_slow_work([late(w("n1", "b"), 5.1)])] == [5.0]


def raised(job: Job) -> int:
    return sum(isinstance(event, ev.LimitRaised) for event in job.events)


def ended_at(work: SlowWork, *, step: int, limit_s: float) -> None:
    """Check the limit in force, within a tenth of a second."""
    assert not is_ended(work, late(w("n3"), limit_s - 0.1, step=step, micro_batch=0))
    assert is_ended(work, late(w("n3"), limit_s + 0.1, step=step, micro_batch=0))


def test_the_limit_covers_the_full_duration_of_slow_work(job: Job) -> None:
    """When the limit was learned at the time of suspicion, a 3 s sample cost a process per epoch and finally a node."""
    work = SlowWork(job.machine.transaction)
    assert is_ended(work, late(w("n1"), 0.6))
    work.record_kill(late(w("n1"), 0.6), "late")
    for for_s in (0.6, 1.0, 2.0):  # its agent reports again and again
        assert not is_ended(work, late(w("n2"), for_s))
    job.tick(0.1)
    assert raised(job) == 1
    ended_at(work, step=12, limit_s=3.0)
    work.on_work_ended(late(w("n2"), 30.0))
    ended_at(work, step=13, limit_s=45.0)
    job.tick(WINDOW_S)
    ended_at(work, step=14, limit_s=0.5)


def test_equally_slow_work_on_a_lone_survivor_clears_the_killed_worker(job: Job) -> None:
    """No worker waits for it, and it may be within its own limit: with two nodes nothing was once learned."""
    work = SlowWork(job.machine.transaction)
    assert work.record_kill(late(w("n1"), 0.6), "late")
    work.on_work_ended(late(w("n0"), 1.0, limit_s=1.2))
    assert counted(job, work, 11) == []
    ended_at(work, step=12, limit_s=1.5)


def test_equally_slow_work_of_its_next_process_clears_a_node(job: Job) -> None:
    work = SlowWork(job.machine.transaction)
    assert is_ended(work, late(w("n1"), 0.6))
    assert work.record_kill(late(w("n1"), 0.6), "late")
    assert not is_ended(work, late(w("n1", "b"), 0.7))
    work.on_work_ended(late(w("n1", "b"), 1.0))
    assert counted(job, work, 11) == []


def test_a_kill_counts_if_no_other_worker_needed_as_long(job: Job) -> None:
    work = SlowWork(job.machine.transaction)
    for _ in range(2):  # the order is repeated until the agent obeys
        assert work.record_kill(late(w("n1"), 0.6), "late")
    work.on_work_ended(late(w("n0"), 0.5))
    work.on_work_ended(late(w("n0"), 9.0, micro_batch=4))
    work.on_work_ended(late(w("n1"), 9.0))
    assert counted(job, work, 10) == []
    assert counted(job, work, 11) == [w("n1")]
    assert counted(job, work, 11) == []
    ended_at(work, step=12, limit_s=0.5)


def test_a_verdict_waits_for_the_report_of_slow_work(job: Job) -> None:
    """Agents report the end of slow work after the step is committed."""
    work = SlowWork(job.machine.transaction)
    work.record_kill(late(w("n1"), 0.6), "late")
    work.tick(11)
    job.now += VERDICT_S - 0.1
    job.machine.transaction.now = job.now
    work.tick(11)
    work.on_work_ended(late(w("n0"), 1.0))
    assert counted(job, work, 11) == []


def test_a_worker_killed_while_entering_is_not_on_trial(job: Job) -> None:
    work = SlowWork(job.machine.transaction)
    entering = ThreadActivity(worker=w("n1"), generation=1, step=11, activity=Activity.ENTERING, for_s=9.0, limit_s=0.5)
    assert not work.record_kill(entering, "late")
    assert is_ended(work, entering)


def test_repeatedly_slow_work_is_remembered_for_longer(job: Job) -> None:
    """Otherwise it would cost a process each time."""
    work = SlowWork(job.machine.transaction)
    for step in (11, 12):
        work.record_kill(late(w("n1"), 0.6, step=step), "late")
        work.on_work_ended(late(w("n0"), 1.0, step=step))
        job.tick(12 * WINDOW_S)
    ended_at(work, step=13, limit_s=1.5)
    job.tick(12 * WINDOW_S)
    ended_at(work, step=14, limit_s=0.5)


def test_a_raised_limit_applies_only_to_the_same_activity(job: Job) -> None:
    work = SlowWork(job.machine.transaction)
    assert is_ended(work, late(w("n1"), 0.6))
    assert not is_ended(work, late(w("n2"), 5.0))
    applying = ThreadActivity(worker=w("n1"), generation=1, step=12, activity=Activity.APPLYING, for_s=0.6, limit_s=0.5)
    assert is_ended(work, applying)


def test_the_number_of_remembered_kills_is_bounded(job: Job) -> None:
    work = SlowWork(job.machine.transaction)
    for step in range(5000):
        work.record_kill(late(w("n1"), 0.6, step=11 + step), "late")
    assert len(counted(job, work, 10**6)) == 4096
