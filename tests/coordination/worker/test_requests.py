"""Tests that all workers stop or save after the same step when one script requests it."""

from __future__ import annotations

import msgspec
import pytest
from machinery import commit, w

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.requests import Wishes, is_save_due
from holdfast.coordination.worker.tasks import Compute, Finish, SendToCoordinator
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind
from holdfast.step_samples import StepSamples

ME, PEER = w("n0"), w("n1")
SAMPLES = StepSamples(seed=3, micro_batches=4, micro_batch=6)


def passing(step: int, *wishes: msg.Wish) -> msg.Commit:
    """Return the result of a step with the right samples."""
    return msgspec.structs.replace(commit(), sample_hashes=SAMPLES.expected(step), wishes=wishes)


def begun(generation: int, kind: DecisionKind, applied: int, **fields: object) -> msg.Begin:
    members = tuple(msg.Member(worker=worker, host="h", state_port=1) for worker in (ME, PEER))
    the_plan = msg.GenerationPlan(term=1, generation=generation, members=members)
    return msg.Begin(plan=the_plan, decision=msg.Decision(kind=kind, applied=applied, **fields))  # pyright: ignore[reportArgumentType]


def computing() -> WorkerMachine:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(begun(1, DecisionKind.START, 0))
    machine.finish_entering()
    return machine


def applies(machine: WorkerMachine, *wishes: msg.Wish) -> None:
    """Make a machine apply its step, with a result that has these wishes."""
    for micro_batch in machine.share:
        assert machine.begin_micro_batch(micro_batch)
    assert machine.begin_reduction()
    machine.finish_reduction(passing(machine.step))
    assert machine.begin_vote()
    machine.pass_vote(passing(machine.step, *wishes))
    assert machine.begin_apply()
    machine.finish_apply()


def finished(machine: WorkerMachine) -> msg.Finished:
    (told,) = machine.finish()
    assert isinstance(told, SendToCoordinator)
    assert isinstance(told.message, msg.Finished)
    return told.message


@pytest.mark.parametrize(
    ("due", "wishes", "saves"),
    [
        (False, (), False),
        (True, (), True),
        (False, (msg.Wish.SAVE_IF_FREE,), True),
        (False, (msg.Wish.SAVE,), True),
        (True, (msg.Wish.STILL_SAVING,), False),
        (False, (msg.Wish.SAVE_IF_FREE, msg.Wish.STILL_SAVING), False),
        (True, (msg.Wish.SAVE, msg.Wish.STILL_SAVING), True),
    ],
)
def test_a_slow_worker_delays_all_saves_except_requested_ones(
    *, due: bool, wishes: tuple[msg.Wish, ...], saves: bool
) -> None:
    assert is_save_due(wishes, due=due) is saves


def test_all_workers_finish_after_a_step_committed_with_a_stop_request() -> None:
    asked, other = computing(), computing()
    asked.wishes.raise_wish(msg.Wish.STOP, "good enough")
    assert asked.wishes.raised == (msg.Wish.STOP,)
    assert other.wishes.raised == ()
    for machine in (asked, other):
        assert isinstance(machine.task, Compute)
        applies(machine, msg.Wish.STOP)
        assert machine.task == Finish(asked=True)
    assert asked.wishes.raised == ()
    assert (finished(asked).stopped, finished(other).stopped) == (True, True)


def test_only_the_requesting_worker_reports_the_reason_for_the_stop() -> None:
    asked, other = computing(), computing()
    asked.wishes.raise_wish(msg.Wish.STOP, "good enough")
    asked.wishes.raise_wish(msg.Wish.STOP, "said later")
    applies(asked, msg.Wish.STOP)
    applies(other)
    told = finished(asked)
    assert (told.stopped, told.why, told.step) == (True, "good enough", 1)
    assert not finished(other).stopped


def test_a_request_stays_raised_until_a_step_commits_with_it() -> None:
    machine = computing()
    machine.wishes.raise_wish(msg.Wish.SAVE)
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(begun(2, DecisionKind.REDO, 0))
    machine.finish_entering()
    assert machine.wishes.raised == (msg.Wish.SAVE,)
    applies(machine, msg.Wish.SAVE)
    assert machine.wishes.raised == ()
    assert isinstance(machine.task, Compute)


@pytest.mark.parametrize("unsaved", [True, False])
def test_a_save_request_stays_raised_if_the_checkpoint_failed(unsaved: bool) -> None:
    wishes = Wishes()
    wishes.drop_granted(passing(1, msg.Wish.SAVE), unsaved=unsaved)
    assert wishes.raised == ((msg.Wish.SAVE,) if unsaved else ())


def test_redone_and_joining_workers_also_finish_after_a_stop_request() -> None:
    redone = computing()
    applies(redone, msg.Wish.STOP)
    redone.on_order(msg.Stop(term=1, generation=1))
    redone.on_order(begun(2, DecisionKind.REDO, 1))
    redone.finish_entering()
    assert redone.task == Finish(asked=True)
    joined, order = WorkerMachine(ME, samples=SAMPLES), begun(2, DecisionKind.REDO, 1)
    plan = msgspec.structs.replace(order.plan, sources={ME: msg.LiveSource(members=(PEER,))})
    joined.on_order(msgspec.structs.replace(order, plan=plan))
    assert joined.accept_push(2)
    assert joined.begin_adoption(2)
    joined.finish_receive([msg.PassedStep(step=1, commit=passing(1, msg.Wish.STOP))], 1)
    joined.finish_entering()
    assert joined.task == Finish(asked=True)


@pytest.mark.parametrize(("wishes", "task"), [((msg.Wish.STOP,), Finish), ((), Compute)])
def test_loading_a_checkpoint_of_the_stopping_step_finishes_the_job(wishes: tuple[msg.Wish, ...], task: type) -> None:
    loads = computing()
    loads.on_order(msg.Stop(term=1, generation=1))
    v = passing(7, *wishes) if wishes else None
    loads.on_order(begun(2, DecisionKind.ROLLBACK, 7, source=msg.CheckpointSource(name="seven"), commit=v))
    assert loads.finish_load(2, 7)
    loads.finish_entering()
    assert isinstance(loads.task, task)


def test_training_continues_if_a_rollback_precedes_the_stop_request() -> None:
    machine = computing()
    applies(machine)
    applies(machine, msg.Wish.STOP)
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(begun(2, DecisionKind.ROLLBACK, 1, source=msg.CheckpointSource(name="one")))
    assert machine.finish_load(2, 1)
    machine.finish_entering()
    assert isinstance(machine.task, Compute)
