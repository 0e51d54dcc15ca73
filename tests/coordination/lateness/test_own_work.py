"""Work that takes its time: for whom that is an excuse, and for how long."""

from __future__ import annotations

import pytest
from machinery import Job, w

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.lateness.own_work import OwnWork
from holdfast.protocol import events as ev
from holdfast.protocol.messages.progress import Activity, Stand


@pytest.fixture
def job() -> Job:
    return Job(nodes=4).start()


def late(worker: str, for_s: float, *, step: int = 11, micro_batch: int = 3) -> Stand:
    activity = Activity.COMPUTE
    return Stand(
        worker=worker, generation=1, step=step, activity=activity, for_s=for_s, limit_s=0.5, micro_batch=micro_batch
    )


def is_ended(work: OwnWork, stand: Stand) -> bool:
    return work.spare([stand]) == [stand]


def test_a_node_that_keeps_its_share_is_given_ten_times_as_long_in_its_next_process(job: Job) -> None:
    """It computes the same again: ended as soon as before, a long sequence never ended, and cost its node the job."""
    work = OwnWork(job.machine.turn)
    assert is_ended(work, late(w("n1"), 0.6))
    assert is_ended(work, late(w("n1"), 0.7)), "until it is gone"
    for process, for_s, ended in (("b", 0.6, False), ("b", 4.9, False), ("b", 5.1, True), ("c", 49.0, False)):
        assert is_ended(work, late(w("n1", process), for_s)) == ended
    assert is_ended(work, late(w("n1", "c"), 51.0)), "what hangs each time is found each time"
    work.forget_up_to(11)
    assert is_ended(work, late(w("n1", "d"), 0.6, step=12))


def raised(job: Job) -> int:
    return sum(isinstance(event, ev.LimitRaised) for event in job.events)


def test_what_the_work_took_once_it_may_take_again_for_a_while(job: Job) -> None:
    """A long sequence every minute cost a process each time, until nodes had none left."""
    work = OwnWork(job.machine.turn)
    assert is_ended(work, late(w("n1"), 0.6))
    for for_s in (0.6, 1.0, 2.0):  # (its agent tells again and again)
        assert not is_ended(work, late(w("n2"), for_s))
    job.tick(0.1)
    assert raised(job) == 1
    for for_s, ended in ((0.6, False), (2.9, False), (3.1, True)):
        assert is_ended(work, late(w("n3"), for_s, step=12, micro_batch=0)) == ended
    assert not is_ended(work, late(w("n0"), 1e9, step=12, micro_batch=0)), "a second node again"
    assert not is_ended(work, late(w("n1"), 4.9, step=13))
    assert is_ended(work, late(w("n1"), 5.1, step=13)), "ten times as long is the most"
    job.tick(WINDOW_S)
    assert is_ended(work, late(w("n2"), 0.6, step=14))


def test_it_may_take_longer_at_that_alone(job: Job) -> None:
    work = OwnWork(job.machine.turn)
    assert is_ended(work, late(w("n1"), 0.6))
    assert not is_ended(work, late(w("n2"), 5.0))
    applying = Stand(worker=w("n1"), generation=1, step=12, activity=Activity.APPLYING, for_s=0.6, limit_s=0.5)
    assert is_ended(work, applying)
