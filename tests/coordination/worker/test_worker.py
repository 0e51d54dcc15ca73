"""Tests of the worker's phase machine: allowed steps, guarantees, and errors with the recent history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import numpy as np
import pytest
from machinery import commit as any_commit
from machinery import w

from holdfast.coordination.experts.blobs import encode_experts
from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.coordination.worker.boundaries import NEXT_PHASE, InvalidTransitionError
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import (
    Build,
    Compute,
    Done,
    Drop,
    Enter,
    Entering,
    Finish,
    Forward,
    Halt,
    Load,
    Move,
    Receive,
    SendToCoordinator,
    Wait,
    WorkerInstruction,
)
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, Phase
from holdfast.step_samples import StepSamples

ME, PEER = w("n0"), w("n1")
SAMPLES = StepSamples(seed=3, micro_batches=4, micro_batch=6)


def commit(loss: float = 1.0, *flags: msg.Flag, step: int = 1) -> msg.Commit:
    """Return the result of a step with each micro-batch once."""
    return msgspec.structs.replace(any_commit(loss, *flags), sample_hashes=SAMPLES.expected(step))


def plan(
    generation: int, *workers: str, term: int = 1, sources: dict[str, msg.StateSource] | None = None
) -> msg.GenerationPlan:
    members = tuple(msg.Member(worker=worker, host="h", state_port=1) for worker in workers or (ME, PEER))
    return msg.GenerationPlan(term=term, generation=generation, members=members, sources=sources or {})


def begin(generation: int, kind: DecisionKind, applied: int, **fields: object) -> msg.Begin:
    assignment = fields.pop("assignment", ())
    the_plan = fields.pop("plan", None) or plan(generation)
    return msg.Begin(plan=the_plan, decision=Decision(kind=kind, applied=applied, **fields), assignment=assignment)  # pyright: ignore[reportArgumentType]


def computing() -> WorkerMachine:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(begin(1, DecisionKind.START, 0))
    machine.finish_entering()
    return machine


def voted() -> WorkerMachine:
    machine = computing()
    for micro_batch in machine.share:
        assert machine.begin_micro_batch(micro_batch)
    assert machine.begin_reduction()
    machine.finish_reduction(commit())
    assert machine.begin_vote()
    return machine


def one_step(machine: WorkerMachine) -> msg.Applied:
    """Make a computing machine apply its step."""
    for micro_batch in machine.share:
        machine.begin_micro_batch(micro_batch)
    machine.begin_reduction()
    machine.finish_reduction(commit(step=machine.step))
    machine.begin_vote()
    machine.pass_vote(commit(step=machine.step))
    machine.begin_apply()
    (applied,) = [i.message for i in machine.finish_apply() if isinstance(i, SendToCoordinator)]
    assert isinstance(applied, msg.Applied)
    return applied


def receive(machine: WorkerMachine, passed: Sequence[msg.PassedStep], step: int) -> None:
    assert machine.begin_adoption(machine.generation)
    machine.finish_receive(passed, step)


def report_of(instructions: Sequence[object]) -> msg.Report:
    (report,) = [
        i.message for i in instructions if isinstance(i, SendToCoordinator) and isinstance(i.message, msg.Report)
    ]
    return report


def test_a_complete_step_leads_to_the_next_step() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    assert machine.task == Wait()
    told = machine.on_order(begin(1, DecisionKind.START, 0))
    assert [type(i) for i in told] == [Build]
    assert isinstance(machine.task, Enter)
    assert machine.finish_entering() == [SendToCoordinator(msg.Entered(worker=ME, generation=1, applied=0))]
    assert machine.task == Compute(1, (0, 2), ())
    assert machine.begin_micro_batch(0)
    assert machine.begin_micro_batch(2)
    assert machine.begin_reduction()
    assert machine.finish_reduction(commit()) == []
    assert machine.begin_vote()
    assert machine.pass_vote(commit()) == []
    assert machine.begin_apply()
    (tell,) = machine.finish_apply("hash")
    assert tell == SendToCoordinator(
        msg.Applied(worker=ME, generation=1, step=1, commit=commit(), world=2, state_hash="hash")
    )
    assert machine.task == Compute(2, (0, 2), ())


def test_a_stop_during_compute_is_answered_immediately() -> None:
    machine = computing()
    machine.begin_micro_batch(0)
    halt, _ = told = machine.on_order(msg.Stop(term=1, generation=1))
    assert isinstance(halt, Halt)
    report = report_of(told)
    assert (report.applied, report.phase, report.summed, report.result) == (0, Phase.COMPUTE, (0,), None)
    assert machine.task == Wait()
    assert not machine.begin_micro_batch(2)
    assert not machine.begin_reduction()


def test_a_stop_during_an_open_vote_is_answered_after_the_vote() -> None:
    machine = voted()
    assert machine.on_order(msg.Stop(term=1, generation=1)) == [Halt()]
    report = report_of(machine.pass_vote(commit()))
    assert (report.phase, report.passed) == (Phase.PASSED, msg.PassedStep(step=1, commit=commit()))
    assert not machine.begin_apply()


def test_an_abandoned_vote_is_reported_as_abandoned() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    report = report_of(machine.abandon_vote())
    assert (report.phase, report.passed, report.result) == (Phase.ABANDONED, None, msg.Holding())
    assert report.reduced == commit()


def test_a_stop_during_apply_is_answered_after_apply() -> None:
    machine = voted()
    machine.pass_vote(commit())
    machine.begin_apply()
    assert machine.on_order(msg.Stop(term=1, generation=1)) == [Halt()]
    applied, report = machine.finish_apply()
    assert isinstance(applied, SendToCoordinator)
    assert isinstance(applied.message, msg.Applied)
    assert report_of([report]).applied == 1


def test_forward_applies_the_recorded_step_result() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.abandon_vote()
    flagged = commit(1.0, msg.Flag.SWAP)
    machine.on_order(begin(2, DecisionKind.FORWARD, 1, commit=flagged, plan=plan(2, ME)))
    assert machine.task == Forward(plan(2, ME), 1, flagged)
    with pytest.raises(InvalidTransitionError, match="finish_entering is not allowed"):
        machine.finish_entering()
    assert machine.begin_apply()
    (tell,) = machine.finish_apply()
    assert isinstance(tell, SendToCoordinator)
    assert isinstance(tell.message, msg.Applied)
    assert tell.message.commit == flagged
    assert machine.applied == 1


def test_redo_keeps_the_local_gradients_of_the_step() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.abandon_vote()
    machine.on_order(begin(2, DecisionKind.REDO, 0, plan=plan(2, ME), assignment=((0, 2, 1, 3),)))
    machine.finish_entering()
    assert machine.task == Compute(1, (0, 2, 1, 3), (0, 2))


def test_an_assignment_applies_to_one_step_only() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(begin(1, DecisionKind.START, 0, assignment=((0, 1, 2), (3,))))
    machine.finish_entering()
    assert machine.share == (0, 1, 2)
    assert machine.begin_reduction()
    assert machine.finish_reduction(commit()) == []
    assert machine.begin_vote()
    machine.pass_vote(commit())
    assert machine.begin_apply()
    machine.finish_apply()
    assert machine.share == (0, 2), "the shares are even again"


def test_redo_without_an_assignment_discards_the_gradients() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.abandon_vote()
    machine.on_order(begin(2, DecisionKind.REDO, 0, plan=plan(2, ME)))
    machine.finish_entering()
    assert machine.task == Compute(1, (0, 1, 2, 3), ())


def test_stale_orders_change_nothing() -> None:
    machine = computing()
    machine.on_order(msg.Stop(term=2, generation=3))
    assert machine.on_order(begin(1, DecisionKind.REDO, 0)) == []
    assert machine.on_order(begin(3, DecisionKind.REDO, 0, plan=plan(3, term=2))) == []
    assert machine.on_order(begin(4, DecisionKind.REDO, 0, plan=plan(4, term=1))) == []
    assert machine.on_order(begin(4, DecisionKind.REDO, 0, plan=plan(4, PEER, term=2))) == []
    assert machine.on_order(msg.Stop(term=1, generation=9)) == []
    assert machine.on_order(msg.Prepare(plan=plan(3, term=2))) == []
    assert machine.frozen
    assert machine.generation == 1


def test_a_stop_of_an_older_term_or_generation_is_ignored() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(begin(3, DecisionKind.START, 0, plan=plan(3, term=2)))
    assert machine.on_order(msg.Stop(term=1, generation=9)) == []
    assert machine.on_order(msg.Stop(term=2, generation=2)) == []
    assert not machine.frozen


def joiner() -> WorkerMachine:
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(msg.Prepare(plan=plan(2, PEER, ME, sources={ME: msg.LiveSource(members=(PEER,))})))
    machine.on_group_ready(2)
    return machine


def test_a_joining_worker_enters_once_its_state_starts_to_arrive() -> None:
    machine = joiner()
    assert machine.task == Wait()
    assert machine.accept_push(2)
    assert isinstance(machine.task, Receive)
    assert machine.begin_adoption(2)
    assert machine.finish_receive([msg.PassedStep(step=3, commit=commit())], 3) == []
    assert machine.finish_entering(received_bytes=9) != []
    assert machine.task == Compute(4, (1, 3), ())


def test_a_state_carries_its_step_history_and_the_receiver_reports_it_first() -> None:
    passed = [msg.PassedStep(step=step, commit=commit(float(step)), generation=1, world=1) for step in (2, 3)]
    machine = joiner()
    machine.accept_push(2)
    receive(machine, passed, 3)
    known, entered = machine.finish_entering()
    assert known == SendToCoordinator(msg.ReceivedSteps(worker=ME, passed=tuple(passed)))
    assert entered == SendToCoordinator(msg.Entered(worker=ME, generation=2, applied=3))
    one_step(machine)
    assert machine.history == (*passed, msg.PassedStep(step=4, commit=commit(step=4), generation=2, world=2))
    machine.on_order(msg.Stop(term=1, generation=2))
    machine.on_order(begin(3, DecisionKind.ROLLBACK, 1, source=msg.CheckpointSource(name="one"), plan=plan(3, ME)))
    assert machine.finish_load(3, 1)
    assert machine.history == ()


def test_a_worker_stopped_before_entering_reports_its_received_steps() -> None:
    machine = joiner()
    machine.accept_push(2)
    receive(machine, [msg.PassedStep(step=3, commit=commit())], 3)
    kinds = [
        type(i.message) for i in machine.on_order(msg.Stop(term=1, generation=2)) if isinstance(i, SendToCoordinator)
    ]
    assert kinds == [msg.ReceivedSteps, msg.Report]


def test_only_a_witness_is_marked_in_the_applied_message() -> None:
    for witnesses, is_one in (((0,), True), ((1,), False)):
        machine = WorkerMachine(ME, samples=SAMPLES)
        chosen = msgspec.structs.replace(plan(1), witnesses=witnesses)
        machine.on_order(begin(1, DecisionKind.START, 0, plan=chosen))
        machine.finish_entering()
        assert one_step(machine).witness is is_one


def test_an_interrupted_transfer_leaves_neither_a_state_nor_a_fresh_one() -> None:
    machine = joiner()
    fresh = report_of(WorkerMachine(ME, samples=SAMPLES).on_order(msg.Stop(term=1, generation=2)))
    assert fresh.fresh
    machine.accept_push(2)
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.applied, report.fresh) == (None, False)
    assert not machine.begin_adoption(2)
    with pytest.raises(InvalidTransitionError, match="partly overwritten"):
        machine.on_order(begin(3, DecisionKind.START, 0, plan=plan(3, ME)))


def test_a_committed_swap_takes_effect_after_apply_unless_stopped() -> None:
    for stopped in (False, True):
        machine = voted()
        machine.on_order(msg.Prepare(plan=plan(2, ME, PEER, w("n2"), sources={w("n2"): msg.LiveSource(members=(ME,))})))
        machine.on_group_ready(2)
        machine.on_order(msg.Arm(term=1, generation=2))
        assert machine.generations.flags == (msg.Flag.SWAP,)
        machine.pass_vote(commit(1.0, msg.Flag.SWAP))
        machine.begin_apply()
        if stopped:
            machine.on_order(msg.Stop(term=1, generation=2))
        machine.finish_apply()
        assert machine.generation == (1 if stopped else 2)


def test_the_swap_flag_is_raised_once_the_group_is_ready_and_armed() -> None:
    machine = computing()
    assert machine.generations.flags == ()
    machine.on_order(msg.Prepare(plan=plan(2)))
    assert machine.generations.flags == ()
    machine.on_group_ready(2)
    assert machine.generations.flags == ()
    machine.on_order(msg.Arm(term=1, generation=2))
    assert machine.generations.flags == (msg.Flag.SWAP,)


def test_voiding_a_generation_lowers_the_swap_flag() -> None:
    machine = voted()
    machine.on_order(msg.Prepare(plan=plan(2, ME, PEER, w("n2"))))
    machine.on_group_ready(2)
    machine.on_order(msg.Arm(term=1, generation=2))
    machine.on_order(msg.Void(term=1, generation=2))
    assert machine.generations.flags == ()
    assert machine.generations.pending is None


def armed(machine: WorkerMachine) -> WorkerMachine:
    machine.on_order(msg.Prepare(plan=plan(2, ME, PEER, w("n2"), sources={w("n2"): msg.LiveSource(members=(ME,))})))
    machine.on_group_ready(2)
    machine.on_order(msg.Arm(term=1, generation=2))
    return machine


DISARM = msg.Disarm(term=1, generation=2)
DISARMED = SendToCoordinator(msg.Disarmed(worker=ME, term=1, generation=2))


def test_an_unused_swap_flag_is_disarmed_immediately() -> None:
    machine = armed(computing())
    assert machine.on_order(DISARM) == [DISARMED]
    assert machine.generations.flags == ()
    assert machine.on_order(msg.Void(term=1, generation=2)) == [Drop(2)]


def test_a_flag_in_an_open_vote_is_disarmed_after_a_step_without_swap() -> None:
    for swaps in (False, True):
        for passed in (False, True):  # the order comes before or after the others' flags are known
            machine = armed(voted())
            if not passed:
                assert machine.on_order(DISARM) == []
            machine.pass_vote(commit(1.0, *([msg.Flag.SWAP] if swaps else [])))
            if passed:
                assert machine.on_order(DISARM) == []
            machine.begin_apply()
            told = machine.finish_apply()
            assert (DISARMED in told, machine.generation) == ((False, 2) if swaps else (True, 1))
            assert machine.generations.flags == ()


def test_disarming_is_not_confirmed_after_an_abandoned_vote() -> None:
    machine = armed(voted())
    machine.abandon_vote()
    assert machine.on_order(DISARM) == []


def test_rearming_cancels_an_earlier_disarm_order() -> None:
    machine = armed(voted())
    machine.on_order(DISARM)
    machine.on_order(msg.Arm(term=2, generation=2))
    machine.pass_vote(commit(1.0))
    machine.begin_apply()
    assert DISARMED not in machine.finish_apply()
    assert machine.generations.flags == (msg.Flag.SWAP,)


@pytest.mark.parametrize("other", [msg.Disarm(term=0, generation=2), msg.Disarm(term=1, generation=3)])
def test_a_disarm_order_of_another_term_or_generation_is_ignored(other: msg.Disarm) -> None:
    machine = armed(computing())
    assert machine.on_order(other) == []
    assert machine.generations.flags == (msg.Flag.SWAP,)


def test_stopped_and_joining_workers_do_not_confirm_a_disarm() -> None:
    machine = armed(computing())
    machine.on_order(msg.Stop(term=1, generation=2))
    assert machine.on_order(DISARM) == []
    joiner = WorkerMachine(w("n2"), samples=SAMPLES)
    joiner.on_order(msg.Prepare(plan=plan(2, ME, PEER, w("n2"), sources={w("n2"): msg.LiveSource(members=(ME,))})))
    joiner.on_group_ready(2)
    assert joiner.on_order(DISARM) == [], "it takes part in no step whose flags it could know"


def test_the_end_of_the_job_interrupts_a_waiting_worker() -> None:
    machine = voted()
    assert machine.on_order(msg.JobDone()) == [Halt()]
    assert machine.task == Done()


ILLEGAL: list[tuple[str, Callable[[WorkerMachine], object]]] = [
    ("begin_reduction", lambda m: m.begin_reduction()),
    ("finish_reduction", lambda m: m.finish_reduction(commit())),
    ("begin_vote", lambda m: m.begin_vote()),
    ("pass_vote", lambda m: m.pass_vote(commit())),
    ("abandon_vote", lambda m: m.abandon_vote()),
    ("begin_apply", lambda m: m.begin_apply()),
    ("finish_apply", lambda m: m.finish_apply()),
    ("begin_micro_batch", lambda m: m.begin_micro_batch(0)),
    ("finish", lambda m: m.finish()),
    ("finish_entering", lambda m: m.finish_entering()),
]


@pytest.mark.parametrize(("name", "call"), ILLEGAL, ids=[name for name, _ in ILLEGAL])
def test_a_boundary_in_the_wrong_phase_raises_an_error_with_the_phase(
    name: str, call: Callable[[WorkerMachine], object]
) -> None:
    machine = WorkerMachine(ME, samples=SAMPLES)
    with pytest.raises(
        InvalidTransitionError, match=f"{ME}: the boundary {name} is not allowed in generation 0, phase idle"
    ):
        call(machine)


@pytest.mark.parametrize(
    "name", ["finish_reduction", "begin_vote", "pass_vote", "begin_apply", "finish_apply", "finish_entering"]
)
def test_a_phase_cannot_be_skipped(name: str) -> None:
    call = dict(ILLEGAL)[name]
    with pytest.raises(InvalidTransitionError, match="phase compute"):
        call(computing())


def test_an_abandoned_vote_cannot_pass() -> None:
    machine = voted()
    machine.abandon_vote()
    with pytest.raises(InvalidTransitionError, match="pass_vote is not allowed in generation 1, phase abandoned"):
        machine.pass_vote(commit())


def test_a_step_cannot_be_applied_twice() -> None:
    machine = voted()
    machine.pass_vote(commit())
    machine.begin_apply()
    with pytest.raises(InvalidTransitionError, match="begin_apply is not allowed in generation 1, phase applying"):
        machine.begin_apply()


def test_the_end_of_the_job_does_not_make_a_boundary_illegal() -> None:
    """The training thread still has a task from before JobDone, and learns of it when it requests the next one."""
    machine = WorkerMachine(ME, samples=SAMPLES)
    machine.on_order(begin(1, DecisionKind.START, 0))
    assert machine.on_order(msg.JobDone()) == [Halt()]
    assert machine.finish_entering() != []
    assert machine.task == Done()


def test_every_phase_can_be_reached_and_left() -> None:
    entering = {place for place, _ in NEXT_PHASE if not isinstance(place, Phase)}
    assert entering == set(get_args(Entering))
    assert set(NEXT_PHASE.values()) == set(Phase) - {Phase.IDLE}
    ends = {Phase.IDLE, Phase.FINISHED, Phase.ABANDONED, Phase.REFUSED}  # only a new generation leads on
    assert {place for place, _ in NEXT_PHASE if isinstance(place, Phase)} == set(Phase) - ends - {Phase.ENTERING}


def test_a_begin_that_does_not_fit_the_state_raises() -> None:
    machine = computing()
    machine.on_order(msg.Stop(term=1, generation=1))
    with pytest.raises(InvalidTransitionError, match="FORWARD without reduced gradients"):
        machine.on_order(begin(2, DecisionKind.FORWARD, 1, commit=commit()))
    machine = computing()
    machine.on_order(msg.Stop(term=1, generation=1))
    with pytest.raises(InvalidTransitionError, match="the local state is of step 0, the decision of step 3"):
        machine.on_order(begin(2, DecisionKind.REDO, 3))
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    with pytest.raises(InvalidTransitionError, match="before the promised report"):
        machine.on_order(begin(2, DecisionKind.REDO, 0))


def test_partial_gradients_are_discarded_by_workers_with_experts() -> None:
    machine = WorkerMachine(ME, samples=SAMPLES, holding=HeldExperts(SHAPE))
    machine.on_order(begin(1, DecisionKind.START, 0, plan=placed(1, b"", blob(0))))
    take_up(machine)
    machine.finish_entering()
    assert all(machine.begin_micro_batch(micro_batch) for micro_batch in machine.share)
    assert report_of(machine.on_order(msg.Stop(term=1, generation=1))).summed == ()


def test_a_pending_forward_is_reported_with_its_original_expert_placement() -> None:
    """It was stopped again before it could apply: its gradients belong to the previous generation's plan."""
    machine = WorkerMachine(ME, samples=SAMPLES, holding=HeldExperts(SHAPE))
    machine.on_order(begin(1, DecisionKind.START, 0, plan=placed(1, b"", blob(0))))
    take_up(machine)
    machine.finish_entering()
    assert machine.begin_reduction()
    machine.finish_reduction(commit())
    report = report_of(machine.on_order(msg.Stop(term=1, generation=1)))
    assert (report.state, report.result) == (msg.Holding(experts=blob(0, 1)), msg.Holding(experts=blob(0)))
    forward = begin(2, DecisionKind.FORWARD, 1, commit=commit(1), plan=placed(2, blob(0), blob(1)))
    machine.on_order(forward)
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.state, report.result) == (msg.Holding(experts=blob(0, 1)), msg.Holding(experts=blob(0)))


SHAPE = msg.ExpertShape(layers=1, experts=2, slots=2)


def blob(*experts: int) -> bytes:
    return encode_experts(np.bincount(experts, minlength=2)[None])


def placed(
    generation: int, held: bytes, placement: bytes, sources: dict[str, msg.StateSource] | None = None
) -> msg.GenerationPlan:
    """Return a plan that gives this worker these experts; its peer has the others."""
    experts = msg.ExpertPlan(
        layers=1, experts=2, held=(held, b""), placement=(placement, b""), moves=1, asked=1, given=1
    )
    return msgspec.structs.replace(plan(generation, sources=sources), expert_plan=experts)


def take_up(machine: WorkerMachine) -> None:
    assert isinstance(machine.task, Move)
    assert machine.begin_move() is not None
    assert machine.end_move(machine.generation)


def with_experts() -> WorkerMachine:
    """Return a machine that has applied step 1, with expert 0."""
    machine = WorkerMachine(ME, samples=SAMPLES, holding=HeldExperts(SHAPE))
    machine.on_order(begin(1, DecisionKind.START, 0, plan=placed(1, b"", blob(0))))
    take_up(machine)
    machine.finish_entering()
    machine.begin_reduction()
    machine.finish_reduction(commit())
    machine.begin_vote()
    machine.pass_vote(commit())
    machine.begin_apply()
    machine.finish_apply()
    return machine


def beside_a_step() -> WorkerMachine:
    """Return a machine that swapped to a generation in which expert 1 arrives while step 2 is computed."""
    machine = with_experts()
    the_plan = placed(2, blob(0), blob(1))
    assert the_plan.expert_plan is not None
    experts = msgspec.structs.replace(the_plan.expert_plan, beside=True)
    machine.on_order(msg.Prepare(plan=msgspec.structs.replace(the_plan, expert_plan=experts)))
    machine.on_group_ready(2)
    machine.on_order(msg.Arm(term=1, generation=2))
    machine.begin_reduction()
    v = commit(1.0, step=2)
    machine.finish_reduction(v)
    machine.begin_vote()
    machine.pass_vote(msgspec.structs.replace(v, flags=(msg.Flag.SWAP,)))
    machine.begin_apply()
    machine.finish_apply()
    assert (machine.generation, machine.applied) == (2, 2)
    take_up(machine)
    return machine


def test_a_step_is_computed_during_expert_moves_and_ends_after_them() -> None:
    machine = beside_a_step()
    assert machine.finish_entering() == [], "it is reported once everything has arrived"
    assert isinstance(machine.task, Compute)
    assert machine.begin_reduction()
    with pytest.raises(InvalidTransitionError, match="without all experts"):
        machine.finish_reduction(commit(step=3))
    (told,) = machine.finish_background_transfer(received_bytes=5, transfer_s=0.5)
    assert isinstance(told, SendToCoordinator)
    assert isinstance(told.message, msg.Entered)
    assert (told.message.generation, told.message.applied, told.message.received_bytes) == (2, 2, 5)
    machine.finish_reduction(commit(step=3))
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.state, report.result) == (msg.Holding(experts=blob(0, 1)), msg.Holding(experts=blob(1)))


def test_experts_not_yet_received_during_a_step_are_not_reported() -> None:
    machine = beside_a_step()
    machine.finish_entering()
    machine.begin_reduction()
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.applied, report.state, report.result) == (2, msg.Holding(experts=blob(0)), None)
    assert machine.finish_background_transfer(received_bytes=5, transfer_s=0.5) == [], "the transfer ended too late"
    machine.on_order(begin(3, DecisionKind.REDO, 2, plan=placed(3, blob(0), blob(0, 1))))
    change = machine.begin_move()
    assert change is not None
    assert (change.fetch, change.during_step) == (True, False), "after a failure, all wait for the moves"


def test_a_sender_moves_experts_while_it_pushes_the_state() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    the_plan = placed(2, blob(0), blob(0, 1), sources={PEER: msg.LiveSource(members=(ME,))})
    machine.on_order(begin(2, DecisionKind.REDO, 1, plan=the_plan))
    assert machine.task == Move(the_plan, (PEER,))
    change = machine.begin_move()
    assert change is not None
    assert change.fetch
    assert machine.end_move(2)
    assert machine.task == Enter(the_plan, (PEER,))


def test_a_receiver_moves_experts_before_it_adopts_the_received_state() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    the_plan = placed(2, b"", blob(1), sources={ME: msg.LiveSource(members=(PEER,))})
    machine.on_order(begin(2, DecisionKind.REDO, 4, plan=the_plan))
    assert machine.accept_push(2)
    assert machine.task == Move(the_plan, ())
    with pytest.raises(InvalidTransitionError, match="begin_adoption"):
        machine.begin_adoption(2)
    with pytest.raises(InvalidTransitionError, match="finish_entering is not allowed"):
        machine.finish_entering()
    take_up(machine)
    assert machine.task == Receive(the_plan)
    receive(machine, (), 4)
    assert machine.task == Enter(the_plan, ())
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.applied, report.state.experts) == (4, blob(1))


def test_experts_without_the_rest_of_the_state_are_not_reported() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(
        begin(2, DecisionKind.REDO, 4, plan=placed(2, b"", blob(1), sources={ME: msg.LiveSource(members=(PEER,))}))
    )
    take_up(machine)
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.applied, report.state) == (None, msg.Holding(dense=False))


def test_experts_received_after_a_stop_are_ignored() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(begin(2, DecisionKind.REDO, 1, plan=placed(2, blob(0), blob(0, 1))))
    assert machine.begin_move() is not None
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert not machine.end_move(2)
    assert machine.begin_move() is None
    assert report.state.experts == blob(0)


def test_a_checkpoint_is_loaded_before_experts_are_moved() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    the_plan = placed(2, b"", blob(1))
    machine.on_order(begin(2, DecisionKind.ROLLBACK, 0, source=msg.CheckpointSource(name="c"), plan=the_plan))
    assert machine.task == Load(the_plan, msg.CheckpointSource(name="c"))
    with pytest.raises(InvalidTransitionError, match="begin_move"):
        machine.begin_move()
    assert machine.finish_load(2, 0)
    take_up(machine)
    assert report_of(machine.on_order(msg.Stop(term=1, generation=2))).state.experts == blob(1)


def test_a_plan_that_assumes_missing_experts_raises_an_error() -> None:
    machine = with_experts()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(begin(2, DecisionKind.REDO, 1, plan=placed(2, blob(1), blob(1))))
    with pytest.raises(InvalidTransitionError, match=r"the plan counts on .* generation 2"):
        machine.begin_move()


def test_a_timed_out_worker_sends_its_complaint_before_its_report() -> None:
    """Another worker complained first. Without this evidence, the wrong node would be removed."""
    machine = computing()
    assert machine.on_wait_timeout(1)
    assert machine.on_order(msg.Stop(term=1, generation=1)) == [Halt()]
    told = machine.complain(1, "timed out", timed_out=True, unreachable=(PEER,))
    fault = msg.Complaint(worker=ME, generation=1, detail="timed out", timed_out=True, unreachable=(PEER,))
    assert told[0] == SendToCoordinator(fault)
    assert report_of(told).generation == 1


def test_a_worker_stopped_before_its_timeout_does_not_complain() -> None:
    machine = computing()
    machine.on_order(msg.Stop(term=1, generation=1))
    assert not machine.on_wait_timeout(1)
    assert machine.complain(1, "timed out", timed_out=True) == []


def test_a_timed_out_pending_group_does_not_block_the_report() -> None:
    machine = computing()
    machine.on_order(msg.Prepare(plan=plan(2, ME, PEER, w("n2"))))
    assert machine.on_wait_timeout(2)
    machine.on_order(msg.Stop(term=1, generation=1))
    assert machine.complain(1, "broken") == []
    assert report_of(machine.complain(2, "timed out", timed_out=True)).generation == 1


def reducing() -> WorkerMachine:
    machine = computing()
    for micro_batch in machine.share:
        machine.begin_micro_batch(micro_batch)
    machine.begin_reduction()
    return machine


def refused(**wrong: int) -> tuple[WorkerMachine, list[WorkerInstruction]]:
    """Return a machine with wrong samples after its reductions, and its instructions."""
    machine = reducing()
    return machine, machine.finish_reduction(msgspec.structs.replace(commit(), **wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample_hashes": SAMPLES.expected(1) + SAMPLES.hash_of(1, 2)},
        {"sample_hashes": SAMPLES.expected(1) + SAMPLES.hash_of(1, 2) - SAMPLES.hash_of(1, 3)},
        {"sample_hashes": SAMPLES.expected(2)},
        {"sample_hashes": -1},
        {"samples": 30},
        {"samples": -1},
    ],
)
def test_a_step_result_with_wrong_samples_is_refused(wrong: dict[str, int]) -> None:
    machine, said = refused(**wrong)
    (told,) = [i.message for i in said if isinstance(i, SendToCoordinator)]
    assert isinstance(told, msg.VoteRefused)
    assert (told.generation, told.step) == (1, 1)
    assert "not made of each of its 4 micro-batches once" in told.why
    assert machine.task == Wait()
    assert machine.passed is None
    with pytest.raises(InvalidTransitionError, match="begin_vote is not allowed"):
        machine.begin_vote()


def test_a_refusal_is_reported_with_its_generation_and_without_a_result() -> None:
    machine, _ = refused(samples=30)
    for stop in (1, 3):
        report = report_of(machine.on_order(msg.Stop(term=1, generation=stop)))
        assert (report.phase, report.refused, report.passed, report.result) == (Phase.REFUSED, 1, None, None)
    machine.on_order(begin(4, DecisionKind.REDO, 0))
    machine.finish_entering()
    assert machine.task == Compute(1, (0, 2), ())
    assert report_of(machine.on_order(msg.Stop(term=1, generation=4))).refused == 0


def test_a_worker_stopped_during_reductions_neither_is_ready_nor_refuses() -> None:
    for samples in (24, 30):
        machine = reducing()
        report = report_of(machine.on_order(msg.Stop(term=1, generation=1)))
        assert (report.phase, report.result, report.reduced) == (Phase.REDUCING, None, None)
        assert machine.finish_reduction(msgspec.structs.replace(commit(), samples=samples)) == []
        assert machine.phase is Phase.REDUCING


# ---- workers that lack the decided step ----


def lagging() -> WorkerMachine:
    """Return a machine in the middle of step 2; its peer is READY with step 2, and will send it that state."""
    machine = computing()
    one_step(machine)
    machine.begin_micro_batch(0)
    machine.on_order(msg.Stop(term=1, generation=1))
    sources: dict[str, msg.StateSource] = {ME: msg.LiveSource(members=(PEER,))}
    forward = begin(2, DecisionKind.FORWARD, 2, commit=commit(step=2), plan=plan(2, PEER, ME, sources=sources))
    machine.on_order(forward)
    return machine


def test_a_lagging_worker_keeps_its_state_until_the_new_one_is_complete() -> None:
    machine = lagging()
    assert isinstance(machine.task, Receive), "it has no result to apply"
    assert machine.accept_push(2)
    assert machine.keeps
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.applied, report.step, report.summed, report.result) == (1, 2, (0,), None)
    assert report.state == msg.Holding()
    machine.on_order(begin(3, DecisionKind.REDO, 1, plan=plan(3, ME), assignment=((0, 1, 2, 3),)))
    machine.finish_entering()
    assert machine.task == Compute(2, (0, 1, 2, 3), (0,)), "the step is repeated with its kept gradients"


def test_a_stop_during_adoption_is_answered_after_the_state_is_replaced() -> None:
    machine = lagging()
    machine.accept_push(2)
    assert machine.begin_adoption(2)
    assert machine.on_order(msg.Stop(term=1, generation=2)) == [Halt()]
    told = machine.finish_receive([msg.PassedStep(step=2, commit=commit(step=2))], 2)
    report = report_of(told)
    assert (report.applied, report.step, report.summed, report.phase) == (2, 3, (), Phase.ENTERING)
    assert not machine.keeps


def test_a_state_received_after_a_stop_is_not_adopted() -> None:
    machine = lagging()
    machine.accept_push(2)
    machine.on_order(msg.Stop(term=1, generation=2))
    assert not machine.begin_adoption(2)
    assert machine.applied == 1


def test_a_received_state_that_does_not_fit_leaves_no_state() -> None:
    machine = lagging()
    machine.accept_push(2)
    machine.begin_adoption(2)
    machine.on_order(msg.Stop(term=1, generation=2))
    report = report_of(machine.void_received_state())
    assert (report.applied, report.fresh) == (None, False)


def test_gradients_of_another_attempt_are_never_applied() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.abandon_vote()
    with pytest.raises(InvalidTransitionError, match="FORWARD with"):
        machine.on_order(begin(2, DecisionKind.FORWARD, 1, commit=commit(7.0), plan=plan(2, ME)))


def test_gradients_of_the_next_step_survive_a_forward_of_the_others() -> None:
    machine = computing()
    one_step(machine)
    machine.begin_micro_batch(2)
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.on_order(begin(2, DecisionKind.FORWARD, 1, commit=commit(), assignment=((0, 2), (1, 3))))
    machine.finish_entering()
    assert machine.task == Compute(2, (0, 2), (2,))


def test_a_repeated_step_is_reported_as_neither_reduced_nor_passed() -> None:
    machine = voted()
    machine.on_order(msg.Stop(term=1, generation=1))
    machine.pass_vote(commit())
    machine.on_order(begin(2, DecisionKind.REDO, 0, plan=plan(2, ME)))
    report = report_of(machine.on_order(msg.Stop(term=1, generation=2)))
    assert (report.passed, report.result, report.reduced) == (None, None, None)


def test_an_ended_script_keeps_its_state_and_no_partial_gradients() -> None:
    machine = computing()
    one_step(machine)
    machine.begin_micro_batch(0)
    assert machine.keep_state_only()
    assert machine.task == Wait(), "nothing more is computed"
    report = report_of(machine.on_order(msg.Stop(term=1, generation=1)))
    assert (report.applied, report.phase, report.summed) == (1, Phase.COMPUTE, ())


def test_an_ended_script_takes_part_in_the_last_save() -> None:
    machine = computing()
    one_step(machine)
    assert machine.keep_state_only()
    machine.on_order(msg.Stop(term=1, generation=1))
    last = msgspec.structs.replace(plan(2), last=True)
    machine.on_order(begin(2, DecisionKind.REDO, 1, plan=last))
    assert isinstance(machine.task, Enter)
    machine.finish_entering()
    assert machine.task == Finish(asked=False)


def test_an_incomplete_or_changing_state_is_not_kept() -> None:
    assert not WorkerMachine(ME, samples=SAMPLES).keep_state_only(), "a fresh machine has no state of the job"
    machine = voted()
    assert not machine.keep_state_only(), "the step may pass elsewhere"
    machine.pass_vote(commit())
    machine.begin_apply()
    assert not machine.keep_state_only()
    machine.finish_apply()
    assert machine.keep_state_only()


def test_a_start_decision_discards_the_earlier_state() -> None:
    machine = computing()
    machine.on_order(msg.Stop(term=1, generation=1))
    sent = plan(2, sources={ME: msg.LiveSource(members=(PEER,))})
    machine.on_order(begin(2, DecisionKind.START, 0, plan=sent))
    assert (machine.applied, machine.keeps) == (None, False)
