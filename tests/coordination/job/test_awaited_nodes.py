"""Tests of the named workers and nodes that a coordinator waits for."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.job.awaited_nodes import list_awaited
from holdfast.protocol.messages import any_side as msg


def awaited_names(job: Job) -> list[tuple[str, str]]:
    return [(one.who, one.what.partition(" in ")[0]) for one in list_awaited(job.machine.context, job.now)]


@pytest.fixture
def job() -> Job:
    return Job().start()


def test_no_worker_is_awaited_while_all_train(job: Job) -> None:
    job.step(1)
    assert awaited_names(job) == []


def test_members_without_a_report_are_awaited(job: Job) -> None:
    job.step(1)
    job.lose("n2")
    assert awaited_names(job) == [
        ("rank 0 on n0", "its report of where it stands"),
        ("rank 1 on n1", "its report of where it stands"),
    ]
    job.report("n0", 1)
    job.tick(0.5)
    (one,) = list_awaited(job.machine.context, job.now)
    assert (one.who, one.since_s) == ("rank 1 on n1", 0.5)


def test_a_member_that_has_not_entered_is_awaited(job: Job) -> None:
    job.step(1)
    job.lose("n2")
    for node in ("n0", "n1"):
        job.report(node, 1)
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=1))
    assert awaited_names(job) == [("rank 1 on n1", "to stand")]


def test_workers_that_have_not_prepared_are_awaited(job: Job) -> None:
    job.step(1)
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    job.deliver(msg.Prepared(worker=w("n0"), generation=2))
    assert [who for who, _ in awaited_names(job)] == ["rank 1 on n1", "rank 2 on n2", "worker 0 of n3"]


def test_a_computing_worker_that_others_wait_for_is_awaited(job: Job) -> None:
    for step in range(1, 8):
        job.tick(0.1)
        job.step(step)
    job.tick(0.3)
    (probe, *_) = job.sent(msg.Probe)
    stand = msg.ThreadActivity(
        worker=w("n1"), generation=1, step=8, activity=msg.Activity.COMPUTE, for_s=0.25, micro_batch=2
    )
    job.deliver_from("n1", msg.ProbeAnswer(number=probe.number, stands=(stand,)))
    assert awaited_names(job) == []
    there = msgspec.structs.replace(stand, worker=w("n0"), activity=msg.Activity.REDUCING, micro_batch=None, waits=True)
    job.deliver_from("n0", msg.ProbeAnswer(number=probe.number, stands=(there,)))
    job.now += 0.5
    (one,) = list_awaited(job.machine.context, job.now)
    assert (one.who, one.what) == ("rank 1 on n1", "to be done with its part of step 8")
    assert (one.since_s, one.at) == (0.75, "'compute' of step 8, micro-batch 2")
    assert one.for_whom == ("rank 0 on n0",)
    job.step(8)
    assert awaited_names(job) == []


def test_a_worker_that_lags_behind_is_awaited(job: Job) -> None:
    for step in (1, 2, 3):
        job.step(step, "n0", "n1")
    assert awaited_names(job) == [("rank 2 on n2", "to apply step 1")]


def test_a_node_that_has_not_reconnected_to_a_new_coordinator_is_awaited(job: Job) -> None:
    job.step(1)
    job.boot(takeover=True)
    assert awaited_names(job)[0] == ("node n0", "to come back with what its workers hold")
