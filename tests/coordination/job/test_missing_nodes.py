"""Tests of a waiting job: it reports the reason once, and continues when the wait is over."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import ExpertShape
from holdfast.protocol.position import Position
from holdfast.protocol.record import KnownCheckpoint

SHAPE = ExpertShape(layers=1, experts=8, slots=6)


def connect_with_worker(job: Job, node: str, shape: ExpertShape | None = None, nonce: str = "a") -> None:
    job.connect(hello(node, session=f"{nonce * 8}"))
    job.deliver(msgspec.structs.replace(attach(w(node, nonce)), expert_shape=shape))


def reported_waits(job: Job) -> list[tuple[int, int]]:
    return [(event.nodes, event.expert_slots) for event in job.events if isinstance(event, ev.JobWaiting)]


def started(shape: ExpertShape | None, nodes: int = 2) -> Job:
    """Return a job in its first generation, with a checkpoint of step 1."""
    job = Job(nodes=nodes).boot()
    for index in range(nodes):
        connect_with_worker(job, f"n{index}", shape)
    for index in range(nodes):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    job.step(1)
    job.machine.transaction.change(checkpoints=(KnownCheckpoint(step=1, name="step-1"),))
    return job


def test_a_job_that_starts_or_trains_reports_no_wait() -> None:
    job = Job(nodes=2).boot()
    connect_with_worker(job, "n0")
    job.tick(0.2)
    connect_with_worker(job, "n1")
    job.tick(0.2)
    assert reported_waits(job) == []


def test_a_job_without_nodes_reports_that_it_waits_for_one() -> None:
    job = started(None)
    job.lose("n0")
    job.lose("n1")
    for _ in range(3):
        job.tick(0.2)
    assert reported_waits(job) == [(1, 0)]
    assert job.machine.need_reporter.need is not None
    connect_with_worker(job, "n0", nonce="b")
    job.tick(0.2)
    assert job.orders(msg.Begin) == {}  # it was sent when the node arrived
    assert job.machine.state == "running"
    assert job.machine.need_reporter.need is None
    assert reported_waits(job) == [(1, 0)]


def test_a_job_waits_until_there_are_enough_expert_slots() -> None:
    job = started(SHAPE)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.expert_plan is not None
    job.lose("n1")
    job.tick(0.2)
    assert reported_waits(job) == [], "its report is still missing"
    job.report("n0", 1, state=msg.Holding(experts=plan.expert_plan.placement[0]))
    for _ in range(3):
        job.tick(0.2)
    assert reported_waits(job) == [(1, 2)]
    assert job.machine.state == "recovering"
    job.lose("n0")
    job.tick(0.2)
    assert reported_waits(job) == [(1, 2), (2, 8)]
    connect_with_worker(job, "n1", SHAPE, nonce="b")
    job.tick(0.2)
    assert reported_waits(job) == [(1, 2), (2, 8), (1, 2)]
    connect_with_worker(job, "n2", SHAPE)
    begin = job.orders(msg.Begin)[w("n2")]
    assert begin.decision.kind is msg.DecisionKind.ROLLBACK
    assert begin.plan.expert_plan is not None
    assert sum(decode_experts(blob, SHAPE) for blob in begin.plan.expert_plan.placement).min() > 0
    job.tick(0.2)
    assert job.machine.need_reporter.need is None


def test_connected_nodes_with_starting_workers_are_not_reported_missing() -> None:
    job = started(SHAPE)
    job.lose("n0")
    job.lose("n1")
    job.connect(hello("n0", session="b" * 8))
    job.connect(hello("n1", session="b" * 8))
    job.tick(0.2)
    assert reported_waits(job) == []


def test_a_new_coordinator_continues_the_wait() -> None:
    job = started(None)
    job.lose("n0")
    job.lose("n1")
    job.tick(0.2)
    job.boot(Position(seq=len(job.events), step=1))
    job.tick(0.2)
    assert reported_waits(job) == [(1, 0), (1, 0)]


def test_nodes_that_become_silent_together_are_expelled_together() -> None:
    job = started(None, nodes=3)
    job.lose("n2")
    job.report("n1", 1)
    for _ in range(32):
        job.tick(0.1)
    left = [event.node for event in job.events if isinstance(event, ev.NodeLeft)]
    assert left == ["n2", "n0", "n1"]
    generations = [event for event in job.events if isinstance(event, ev.GenerationStarted)]
    assert len(generations) == 1, "no generation contains another silent node"
    assert reported_waits(job) == [(1, 0)]
