"""What a coordinator does with the thousands of steps that were applied while there was none."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, commit, hello, w

from holdfast.coordination.progress.announced import AT_ONCE
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

STEPS = 3 * AT_ONCE


def pages(node: str) -> list[msg.AppliedSteps]:
    lanes = msg.Lanes(**msgspec.structs.asdict(commit()))
    steps = [msg.KeptStep(step=step, generation=1, world=2, time=0.0, commit=lanes) for step in range(2, STEPS + 1)]
    tops = {w(node): STEPS}
    size = msg.PAGE_STEPS
    return [msg.AppliedSteps(workers=tops, steps=tuple(steps[at : at + size])) for at in range(0, len(steps), size)]


def test_a_node_that_claims_more_steps_than_can_have_been_done_is_expelled() -> None:
    """Each of them would be counted, for ever."""
    job = Job(nodes=3).start()
    job.tell("n0", msg.AppliedSteps(workers={w("n0"): 1 << 53}, given_up=1 << 53))
    assert [failure.node for failure in job.said(ev.FailureDetected)] == ["n0"]
    job.report("n1", 1 << 53)
    assert [failure.node for failure in job.said(ev.FailureDetected)] == ["n1"]
    job.report("n2", 0)
    assert [event.members for event in job.said(ev.GenerationStarted)] == [("n2",)]


def test_no_record_holds_all_the_steps_of_an_outage_in_which_a_member_died() -> None:
    before = Job(nodes=2).start()
    before.step(1)
    job = Job(nodes=2, records=before.records, events=before.events, now=before.now + 1000.0).boot(takeover=True)
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=0)), term=1))
    for page in pages("n0"):
        job.tell("n0", page)
    while job.machine.parts.stopping.stop is None:
        job.tell("n0", msg.Heartbeat())
        job.tick(0.5)
    job.report("n0", STEPS, passed=msg.Passed(step=STEPS, commit=commit()))
    while not job.orders(msg.Begin):
        job.tick(0.1)
    job.say(msg.Entered(worker=w("n0"), generation=2, applied=STEPS))
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)] == list(range(1, STEPS + 1))
    assert max(len(record.outbox) + len(record.passed) for record in job.records) <= AT_ONCE + 100
