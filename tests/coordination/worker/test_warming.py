"""Tests of warm-ups of a worker in no generation: their start, interruption and effect on its state."""

from __future__ import annotations

import pytest
from machinery import w

from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import Done, SendToCoordinator, Wait, WarmUp
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
    assert machine.on_order(msg.Warm(term=term)) == []
    return machine


def warming() -> WorkerMachine:
    machine = asked()
    assert machine.task == WarmUp()
    assert machine.warming.start()
    return machine


def test_a_worker_warms_up_once_and_reports_it() -> None:
    machine = warming()
    assert machine.warming.is_running
    assert machine.task == WarmUp()
    assert machine.warming.finish(2.5) == [SendToCoordinator(msg.Warmed(worker=ME, seconds=2.5))]
    assert not machine.warming.is_running
    assert machine.task == Wait()


def test_a_failed_warm_up_is_reported_and_retried_only_on_request() -> None:
    machine = warming()
    assert machine.warming.finish(0.5, "no room") == [
        SendToCoordinator(msg.Warmed(worker=ME, seconds=0.5, error="no room"))
    ]
    assert machine.task == Wait()
    machine.on_order(msg.Warm(term=1))
    assert machine.task == WarmUp()


def test_a_warm_up_order_of_an_older_term_is_ignored() -> None:
    machine = asked(term=3)
    machine.warming.start()
    machine.warming.finish(1.0)
    machine.on_order(msg.Warm(term=2))
    assert machine.task == Wait()


def test_a_member_of_a_generation_does_not_warm_up() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(msg.Begin(plan=plan(1), decision=Decision(kind=DecisionKind.START, applied=0)))
    machine.finish_entering()
    machine.on_order(msg.Warm(term=1))
    assert not machine.warming.is_due
    assert not machine.warming.start()


def test_a_started_warm_up_invalidates_the_fresh_state() -> None:
    machine = asked()
    (_, fresh) = machine.on_order(msg.Stop(term=1, generation=1))
    assert isinstance(fresh, SendToCoordinator)
    assert isinstance(fresh.message, msg.Report)
    assert fresh.message.fresh  # a Warm that never started costs nothing
    machine = warming()
    (_, told) = machine.on_order(msg.Stop(term=1, generation=1))
    assert isinstance(told, SendToCoordinator)
    assert isinstance(told.message, msg.Report)
    assert not told.message.fresh
    assert told.message.applied is None


def test_a_job_cannot_start_from_a_warmed_state() -> None:
    machine = warming()
    machine.warming.finish(1.0)
    with pytest.raises(InvalidTransitionError):
        machine.on_order(msg.Begin(plan=plan(1), decision=Decision(kind=DecisionKind.START, applied=0)))


def test_a_warm_up_marks_the_experts_as_not_initial() -> None:
    holding = HeldExperts(ExpertShape(layers=1, experts=2, slots=2))
    machine = WorkerMachine(ME, samples=SAMPLES, holding=holding)
    machine.on_order(msg.Warm(term=1))
    machine.warming.start()
    assert not holding.initial


@pytest.mark.parametrize("kind", ["begin", "prepare", "stop", "done"])
def test_generation_orders_interrupt_a_warm_up(kind: str) -> None:
    machine = warming()
    orders: dict[str, msg.GenerationOrder] = {
        "begin": msg.Begin(plan=plan(4, receives=True), decision=Decision(kind=DecisionKind.REDO, applied=7)),
        "prepare": msg.Prepare(plan=plan(4, receives=True)),
        "stop": msg.Stop(term=1, generation=3),
        "done": msg.JobDone(),
    }
    machine.on_order(orders[kind])
    assert machine.task != WarmUp()
    assert machine.warming.is_running  # until its training thread has left the shadow step
    machine.warming.interrupt()
    assert not machine.warming.is_running
    if kind == "done":
        assert machine.task == Done()


def test_a_joining_worker_receives_its_state_after_an_interrupted_warm_up() -> None:
    machine = warming()
    machine.on_order(msg.Prepare(plan=plan(4, receives=True)))
    machine.warming.interrupt()
    machine.on_group_ready(4)
    assert machine.accept_push(4)
    assert machine.begin_adoption(4)
    machine.finish_receive((), 7)
    assert machine.applied == 7


def test_a_warm_up_restarts_if_the_pending_generation_is_voided() -> None:
    machine = warming()
    machine.on_order(msg.Prepare(plan=plan(4, receives=True)))
    machine.warming.interrupt()
    assert machine.task == Wait()
    machine.on_order(msg.Void(term=1, generation=4))
    assert machine.task == WarmUp()
