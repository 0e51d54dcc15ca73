"""A worker in no generation that is to warm up: when it does, what cuts it short, what becomes of its state."""

from __future__ import annotations

import pytest
from machinery import w

from holdfast.coordination.experts.holding import HeldExperts
from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import Done, Tell, Wait, WarmUp
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, ExpertShape
from holdfast.protocol.state import LiveSource
from holdfast.step_samples import StepSamples

ME, PEER = w("n0"), w("n1")
SAMPLES = StepSamples(seed=3, micro_batches=4, micro_batch=6)


def plan(generation: int, *, receives: bool = False) -> msg.GenerationPlan:
    members = tuple(msg.Member(worker=worker, host="h", state_port=1) for worker in (ME, PEER))
    sources: dict[str, msg.StateSource] = {ME: LiveSource(members=(PEER,))} if receives else {}
    return msg.GenerationPlan(term=1, generation=generation, members=members, sources=sources)


def asked(term: int = 1) -> WorkerMachine:
    machine = WorkerMachine(ME, samples=SAMPLES)
    assert machine.order(msg.Warm(term=term)) == []
    return machine


def warming() -> WorkerMachine:
    machine = asked()
    assert machine.task == WarmUp()
    assert machine.warming.begin()
    return machine


def test_it_warms_up_once_and_tells() -> None:
    machine = warming()
    assert machine.warming.under_way
    assert machine.task == WarmUp()
    assert machine.warming.end(2.5) == [Tell(msg.Warmed(worker=ME, seconds=2.5))]
    assert not machine.warming.under_way
    assert machine.task == Wait()


def test_a_failure_is_told_and_it_is_not_tried_again_unasked() -> None:
    machine = warming()
    assert machine.warming.end(0.5, "no room") == [Tell(msg.Warmed(worker=ME, seconds=0.5, error="no room"))]
    assert machine.task == Wait()
    machine.order(msg.Warm(term=1))
    assert machine.task == WarmUp()


def test_an_older_coordinator_is_not_heard() -> None:
    machine = asked(term=3)
    machine.warming.begin()
    machine.warming.end(1.0)
    machine.order(msg.Warm(term=2))
    assert machine.task == Wait()


def test_a_member_has_no_time_for_it() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.order(msg.Begin(plan=plan(1), decision=Decision(kind=DecisionKind.START, applied=0)))
    machine.entered()
    machine.order(msg.Warm(term=1))
    assert not machine.warming.due
    assert not machine.warming.begin()


def test_its_state_is_nobodys_from_the_first_shadow_step_on() -> None:
    machine = asked()
    (_, fresh) = machine.order(msg.Stop(term=1, generation=1))
    assert isinstance(fresh, Tell)
    assert isinstance(fresh.message, msg.Report)
    assert fresh.message.fresh  # (a Warm that was never taken up costs nothing)
    machine = warming()
    (_, told) = machine.order(msg.Stop(term=1, generation=1))
    assert isinstance(told, Tell)
    assert isinstance(told.message, msg.Report)
    assert not told.message.fresh
    assert told.message.applied is None


def test_no_job_starts_from_it() -> None:
    machine = warming()
    machine.warming.end(1.0)
    with pytest.raises(InvalidTransitionError):
        machine.order(msg.Begin(plan=plan(1), decision=Decision(kind=DecisionKind.START, applied=0)))


def test_its_experts_are_not_the_initial_ones_any_more() -> None:
    holding = HeldExperts(ExpertShape(layers=1, experts=2, slots=2))
    machine = WorkerMachine(ME, samples=SAMPLES, holding=holding)
    machine.order(msg.Warm(term=1))
    machine.warming.begin()
    assert not holding.initial


@pytest.mark.parametrize("kind", ["begin", "prepare", "stop", "done"])
def test_what_concerns_a_member_cuts_it_short(kind: str) -> None:
    machine = warming()
    orders: dict[str, msg.GenerationOrder] = {
        "begin": msg.Begin(plan=plan(4, receives=True), decision=Decision(kind=DecisionKind.REDO, applied=7)),
        "prepare": msg.Prepare(plan=plan(4, receives=True)),
        "stop": msg.Stop(term=1, generation=3),
        "done": msg.JobDone(),
    }
    machine.order(orders[kind])
    assert machine.task != WarmUp()
    assert machine.warming.under_way  # until its training thread has left the shadow step
    machine.warming.leave()
    assert not machine.warming.under_way
    if kind == "done":
        assert machine.task == Done()


def test_a_joiner_that_was_warming_receives_everything() -> None:
    machine = warming()
    machine.order(msg.Prepare(plan=plan(4, receives=True)))
    machine.warming.leave()
    machine.prepared(4)
    assert machine.pushed(4)
    assert machine.adopting(4)
    machine.received((), 7)
    assert machine.applied == 7


def test_it_begins_anew_where_the_generation_that_it_was_to_join_is_void() -> None:
    machine = warming()
    machine.order(msg.Prepare(plan=plan(4, receives=True)))
    machine.warming.leave()
    assert machine.task == Wait()
    machine.order(msg.Void(term=1, generation=4))
    assert machine.task == WarmUp()
