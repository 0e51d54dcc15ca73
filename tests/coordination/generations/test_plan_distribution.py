"""Tests of plan distribution: small deltas shared by many nodes, and the complete plan on request."""

from __future__ import annotations

import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.generations import plan_distribution as plans
from holdfast.coordination.generations.plan_delta import change_of
from holdfast.coordination.generations.plan_distribution import MAX_ASKED
from holdfast.coordination.instructions import Broadcast, Close
from holdfast.errors import EXIT_FAILED
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.state import LiveSource


def broadcasts(job: Job, kind: type[msg.BeginNode] | type[msg.PrepareNode]) -> dict[tuple[int, ...], msg.PlanChange]:
    """Return the plans sent for the last input, by their target connections."""
    found = [i for i in job.last if isinstance(i, Broadcast) and isinstance(i.message, kind)]
    return {i.connections: i.message.plan for i in found if isinstance(i.message, msg.BeginNode | msg.PrepareNode)}


def test_members_are_sent_a_plan_delta_and_joining_nodes_the_complete_plan() -> None:
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    told = broadcasts(job, msg.PrepareNode)
    assert [(connections, change.base) for connections, change in told.items()] == [((1, 2, 3), 1), ((4,), 0)]
    change = told[1, 2, 3]
    assert change.members[0] == msg.Stayers(0, 3)
    assert (change.holders, change.sources) == (0, {3: LiveSource(members=(w("n0"), w("n1"), w("n2")))})
    assert job.orders(msg.Prepare)[w("n3")] == job.orders(msg.Prepare)[w("n0")]


def test_the_delta_after_a_loss_contains_only_the_remaining_ranges() -> None:
    job = Job().start()
    job.lose("n1")
    for node in ("n0", "n2"):
        job.report(node, 0)
    assert {connections: change.members for connections, change in broadcasts(job, msg.BeginNode).items()} == {
        (1, 3): (msg.Stayers(0, 1), msg.Stayers(2, 1))
    }


def test_a_node_that_requests_the_complete_plan_too_often_is_refused() -> None:
    job = Job().start()
    job.lose("n1")
    for node in ("n0", "n2"):
        job.report(node, 0)
    begin = job.orders(msg.Begin)[w("n0")]
    for _ in range(MAX_ASKED):
        job.deliver_from("n2", msg.AskPlan(generation=2))
        (whole,) = job.sent(msg.BeginNode)
        assert (whole.plan.base, whole.decision) == (0, begin.decision)
        assert job.orders(msg.Begin) == {w("n2"): begin}
    job.deliver_from("n2", msg.AskPlan(generation=2))
    (refused,) = job.sent(msg.Refused)
    assert (refused.exit_code, refused.retry) == (EXIT_FAILED, False)
    assert refused.why == "node n2 asks for the plan of generation 2 again and again"
    assert Close(job.connections["n2"]) in job.last
    assert [event.detail for event in job.emitted(ev.FailureDetected)] == [refused.why]
    assert job.orders(msg.Stop).keys() == {w("n0")}, "the other nodes continue without it"


def test_the_complete_plan_is_built_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thousand nodes that lack the previous plan would each cost the time of building one."""
    job = Job().start()
    job.lose("n1")
    for node in ("n0", "n2"):
        job.report(node, 0)
    made: list[int] = []

    def counted(plan: msg.GenerationPlan, base: msg.GenerationPlan | None) -> msg.PlanChange:
        made.append(plan.generation)
        return change_of(plan, base)

    monkeypatch.setattr(plans, "change_of", counted)
    for node in ("n0", "n2", "n0"):
        job.deliver_from(node, msg.AskPlan(generation=2))
        assert job.sent(msg.BeginNode)
    assert made == [2]


def test_requests_for_an_outdated_plan_are_counted_but_not_answered() -> None:
    job = Job().start()
    for _ in range(MAX_ASKED):
        job.deliver_from("n2", msg.AskPlan(generation=7))
        assert not job.last
    job.deliver_from("n2", msg.AskPlan(generation=1))
    assert job.sent(msg.Refused)


def test_plan_requests_are_counted_separately_for_each_generation() -> None:
    job = Job().start()
    for generation in range(2, 8):
        job.machine.context.interruption.start(job.now)
        for node in ("n0", "n1", "n2"):
            job.report(node, 0)
        job.deliver_from("n2", msg.AskPlan(generation=generation))
        assert job.sent(msg.BeginNode)
