"""Tests of nodes on reclaimed machines: they drain within the grace period, or report the obstacle."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import MoveNodes
from holdfast.coordination.job.foresight import describe_wait
from holdfast.coordination.progress.costs import Cost
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def beside(*, warm: bool | None = None, nodes: int = 3) -> Job:
    """Return a job of nodes that have committed step 1, with standby s0 warm, cold or, if None, absent."""
    job = Job(nodes=nodes).start()
    job.step(1, *(f"n{index}" for index in range(nodes)))
    if warm is not None:
        job.connect(msgspec.structs.replace(hello("s0"), standby=True))
        job.deliver(attach(w("s0")))
        if warm:
            job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    return job


def reported(job: Job, at: int, *others: str) -> None:
    for node in ("n0", "n1", "n2", *others):
        job.report(node, at)


def test_a_node_with_an_end_notice_leaves_after_the_step_without_a_failure() -> None:
    job = beside()
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    assert job.machine.context.interruption.stop is None, "no node stops in the middle of a step"
    job.step(2)
    reported(job, 2)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.members) == ("drain", ("n0", "n2"))
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def joined(job: Job, step: int) -> None:
    """Make s0 join next to n1 at a step, and check that it takes n1's rank at the next one."""
    everybody = job.join("s0", step=step)
    job.step(step + 1, *everybody, generation=2)
    reported(job, step + 1, "s0")
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.members) == ("drain", ("n0", "s0", "n2"))


def test_a_warm_standby_joins_next_to_a_reclaimed_node_and_replaces_it() -> None:
    job = beside(warm=True)
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    joined(job, 2)


def test_a_standby_replaces_a_node_without_a_join_if_the_grace_is_short() -> None:
    job = beside(warm=True)
    job.deliver_from("n1", msg.EndNotice(grace_s=0.5))
    assert job.machine.record.pending is None
    job.step(2)
    reported(job, 2)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert begun.members == ("n0", "s0", "n2")
    assert job.orders(msg.Begin)[w("s0")].assignment[1] == (), (
        "it computes nothing of the step in which it receives its state"
    )


def test_a_moving_node_keeps_its_standby_after_an_end_notice() -> None:
    job = beside(warm=True)
    job.feed(MoveNodes(("n1",)))
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    (leaving,) = job.machine.record.leaving
    assert (leaving.beside, leaving.stays) == ("s0", False)
    joined(job, 2)


def test_a_moving_node_does_not_stay_as_a_standby_after_an_end_notice() -> None:
    job = beside(warm=False)
    job.feed(MoveNodes(("n1",)))
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    (leaving,) = job.machine.record.leaving
    assert (leaving.stays, leaving.until - leaving.since) == (False, pytest.approx(30.0))


def test_a_second_end_notice_does_not_change_the_deadline() -> None:
    job = beside()
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    before = job.machine.record.leaving
    job.deliver_from("n1", msg.EndNotice(grace_s=20.0))
    assert job.machine.record.leaving == before


def test_the_last_node_trains_until_its_grace_period_ends() -> None:
    job = beside(nodes=1)
    job.deliver_from("n0", msg.EndNotice(grace_s=30.0))
    assert not job.machine.record.leaving
    job.deliver_from("n0", msg.Leave(reason="told", detail="told to end, it has stayed for its grace of 30 s"))
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason) == ("n0", "failed")
    assert "its grace of 30 s" in left.detail


def settled(job: Job, *nodes: str, step: int = 2) -> ev.NodeLeft:
    generation = job.machine.record.generation
    for name in nodes:
        job.deliver(msg.Entered(worker=w(name), generation=generation, applied=step))
    job.step(step + 1, *nodes, generation=generation)
    job.step(step + 2, *nodes, generation=generation)
    (left,) = [event for event in job.events if isinstance(event, ev.NodeLeft)]
    return left


def test_a_reclaimed_node_may_return_and_its_departure_is_explained() -> None:
    job = beside()
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    job.step(2)
    reported(job, 2)
    left = settled(job, "n0", "n2")
    assert (left.node, left.reason) == ("n1", "drained")
    assert left.detail.startswith("told to end with a grace of 30 s, of which ")
    assert left.detail.endswith("no standby has taken its place: there is none")
    assert (job.machine.record.drained, job.machine.record.wanted) == ((), 3)
    job.connect(hello("n1", session="1" * 8))
    assert job.sent(msg.Welcome)


def test_a_replaced_node_reports_the_remaining_grace_only() -> None:
    job = beside(warm=True)
    job.deliver_from("n1", msg.EndNotice(grace_s=30.0))
    joined(job, 2)
    assert settled(job, "n0", "s0", "n2", step=3).detail.endswith(" s were left")
    assert job.machine.record.wanted == 3


@pytest.mark.parametrize(("grace_s", "waits"), [(60.0, True), (20.0, False)])
def test_a_cold_standby_is_awaited_if_the_grace_is_long_enough(grace_s: float, *, waits: bool) -> None:
    job = beside(warm=False)
    job.machine.context.progress.costs.add_measurement(Cost.WARM_UP, 40.0)
    job.deliver_from("n1", msg.EndNotice(grace_s=grace_s))
    said = [describe_wait(job.machine.context, one) for one in job.machine.record.leaving]
    assert said == ["a standby to be warm" if waits else "the end of a step"]
    job.step(2)
    assert (job.machine.context.interruption.stop is None) is waits
    if not waits:
        reported(job, 2)
        assert settled(job, "n0", "n2").detail.endswith("no standby has taken its place: one could have in 40.0 s")
        return
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    joined(job, 3)


def test_the_job_stops_immediately_if_the_grace_is_shorter_than_a_step() -> None:
    job = beside()
    for _ in range(5):
        job.machine.context.progress.costs.add_step(10.0, 0.0, 2)
    job.deliver_from("n1", msg.EndNotice(grace_s=5.0))
    assert job.machine.context.interruption.stop is not None
