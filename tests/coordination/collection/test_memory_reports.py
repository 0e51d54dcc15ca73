"""Tests of memory samples around a membership change: the asked nodes, the time, and the kept values."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.collection.memory_reports import AFTER_S, ANSWER_S, BEFORE_S
from holdfast.coordination.inputs import MoveNodes
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.memory import MemorySample
from holdfast.protocol.messages.progress import MemoryTaken, TakeMemory

SAMPLES = (MemorySample(ago_s=2.0, memory=100), MemorySample(ago_s=0.1, memory=400, received=50))


def shrunk() -> Job:
    """Return a job of three nodes that has continued without the third after its connection broke."""
    job = Job().start()
    job.step(1)
    job.tick(0.1)
    job.lose("n2")
    for node in ("n0", "n1"):
        job.report(node, 1)
    job.tick(0.1)
    assert not job.sent(TakeMemory)
    return job


def asked(job: Job) -> TakeMemory:
    for _ in range(40):
        job.tick(0.1)
        if told := job.sent(TakeMemory):
            return told[0]
    raise AssertionError("nobody was asked")


def test_no_memory_samples_are_requested_at_job_start() -> None:
    job = Job().start()
    for _ in range(60):
        job.tick(0.1)
        assert not job.sent(TakeMemory)


def test_memory_samples_of_one_remaining_node_are_requested_after_a_shrink() -> None:
    job = shrunk()
    question = asked(job)
    assert AFTER_S + BEFORE_S <= question.seconds < AFTER_S + BEFORE_S + 0.5
    assert len(job.sent(TakeMemory)) == 1, "only one of the remaining nodes is asked"
    job.deliver_from("n0", MemoryTaken(number=question.number, samples=SAMPLES))
    (told,) = job.emitted(ev.MemorySampled)
    assert told.since_generation == 1
    assert [(one.node, one.role, one.peak, one.samples) for one in told.nodes] == [("n0", "stayer", 400, SAMPLES)]


def test_unrequested_memory_samples_are_ignored() -> None:
    job = shrunk()
    question = asked(job)
    job.deliver_from("n1", MemoryTaken(number=question.number, samples=SAMPLES))
    job.deliver_from("n0", MemoryTaken(number=question.number + 1, samples=SAMPLES))
    assert not job.emitted(ev.MemorySampled)
    job.tick(ANSWER_S + 0.1)
    assert not job.emitted(ev.MemorySampled), "no answer is worth an event"


def test_a_move_samples_memory_of_a_leaver_a_joiner_and_a_stayer() -> None:
    job = Job().start()
    job.step(1)
    job.connect(msgspec.structs.replace(hello("s0"), standby=True))
    job.deliver(attach(w("s0")))
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    job.tick(0.1)
    job.feed(MoveNodes(("n1",), ()))
    everybody = job.join("s0", step=2)
    for _ in range(30):
        job.tick(0.1)
        assert not job.sent(TakeMemory), "the second half of the move follows"
        for node in everybody:
            job.deliver_from(node, msg.Heartbeat())
    job.step(3, *everybody, generation=2)
    for node in everybody:
        job.report(node, 3)
    for node in ("n0", "s0", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=3))
    question = asked(job)
    for node in ("n0", "n1", "s0"):
        assert not job.emitted(ev.MemorySampled)
        job.deliver_from(node, MemoryTaken(number=question.number, samples=SAMPLES))
    (told,) = job.emitted(ev.MemorySampled)
    assert {one.node: one.role for one in told.nodes} == {"n1": "leaver", "s0": "joiner", "n0": "stayer"}
