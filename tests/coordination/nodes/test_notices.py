"""Nodes whose machines are taken away: they leave in good order while they can, and say what kept them else."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import MoveNodes
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def beside(*, warm: bool | None = None, nodes: int = 3) -> Job:
    """Nodes that have committed step 1, and standby s0: warm, cold, or (None) not there."""
    job = Job(nodes=nodes).start()
    job.step(1, *(f"n{index}" for index in range(nodes)))
    if warm is not None:
        job.connect(msgspec.structs.replace(hello("s0"), standby=True))
        job.say(attach(w("s0")))
        if warm:
            job.say(msg.Warmed(worker=w("s0"), seconds=0.5))
    return job


def reported(job: Job, at: int) -> None:
    for node in ("n0", "n1", "n2"):
        job.report(node, at)


def test_it_leaves_at_the_end_of_the_step_and_nobody_has_failed() -> None:
    job = beside()
    job.tell("n1", msg.EndNotice(grace_s=30.0))
    assert job.machine.parts.stopping.stop is None, "not in the midst of a step"
    job.step(2)
    reported(job, 2)
    (begun,) = job.said(ev.GenerationStarted)
    assert (begun.reason, begun.members) == ("drain", ("n0", "n2"))
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_warm_standby_takes_its_place_in_the_same_breath() -> None:
    job = beside(warm=True)
    job.tell("n1", msg.EndNotice(grace_s=30.0))
    job.step(2)
    reported(job, 2)
    (begun,) = job.said(ev.GenerationStarted)
    assert begun.members == ("n0", "s0", "n2")


def test_one_that_was_to_stay_as_a_standby_goes() -> None:
    job = beside(warm=False)
    job.feed(MoveNodes(("n1",)))
    job.tell("n1", msg.EndNotice(grace_s=30.0))
    (leaving,) = job.machine.record.leaving
    assert (leaving.stays, leaving.until - leaving.since) == (False, pytest.approx(30.0))


def test_told_twice_counts_from_the_first() -> None:
    job = beside()
    job.tell("n1", msg.EndNotice(grace_s=30.0))
    before = job.machine.record.leaving
    job.tell("n1", msg.EndNotice(grace_s=20.0))
    assert job.machine.record.leaving == before


def test_the_last_node_stays_to_its_end() -> None:
    job = beside(nodes=1)
    job.tell("n0", msg.EndNotice(grace_s=30.0))
    assert not job.machine.record.leaving
    job.tell("n0", msg.Leave(reason="told", detail="told to end, it has stayed for its grace of 30 s"))
    (left,) = job.said(ev.NodeLeft)
    assert (left.node, left.reason) == ("n0", "failed")
    assert "its grace of 30 s" in left.detail
