"""Tests of steps that change no parameter: they are reported at once, and too many in a row fail the job."""

from __future__ import annotations

from math import inf, nan

import msgspec
import pytest
from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.instructions import EndJob
from holdfast.errors import EXIT_FAILED
from holdfast.protocol import events as ev
from holdfast.protocol.commit import Commit
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg

NODES = ("n0", "n1", "n2")
BAD = msgspec.structs.replace(commit(nan), nonfinite=7)
OVERFLOW = msgspec.structs.replace(commit(), nonfinite=7, overflow=True)


def job(at_most: int = 3, *, saves: bool = False) -> Job:
    return Job(spec=JobSpec(recovery=RecoverySpec(max_skipped_steps=at_most))).start(saves=saves)


def apply_step(job: Job, step: int, v: Commit, generation: int = 1) -> None:
    for node in NODES:
        job.deliver(applied(w(node), generation, step, v))


def rows(job: Job) -> list[tuple[int, int]]:
    return [(event.step, event.in_a_row) for event in job.events if isinstance(event, ev.StepSkipped)]


def failed(job: Job) -> list[str]:
    return [event.why for event in job.events if isinstance(event, ev.JobFailed)]


def test_each_skipped_step_is_emitted_and_the_first_requests_an_action() -> None:
    one = job()
    apply_step(one, 1, commit())
    apply_step(one, 2, BAD)
    (skipped,) = [event for event in one.events if isinstance(event, ev.StepSkipped)]
    assert skipped.why == "7 elements of the gradients are NaN or infinite; the loss is nan"
    apply_step(one, 3, BAD)
    assert rows(one) == [(2, 1), (3, 2)]
    asked = [event for event in one.events if isinstance(event, ev.ActionRequested)]
    assert [(event.about, event.about_seq) for event in asked] == [("step_skipped", skipped.seq)]


def test_a_skipped_step_is_written_to_the_record() -> None:
    one = job()
    apply_step(one, 1, BAD)
    assert any(isinstance(event, ev.StepSkipped) for event in one.records[-1].outbox)


def test_too_many_skipped_steps_in_a_row_fail_the_job() -> None:
    one = job(3)
    for step, v in enumerate((commit(), BAD, BAD, BAD), 1):
        assert failed(one) == []
        apply_step(one, step, v)
    (why,) = failed(one)
    assert why.startswith("3 steps in a row were skipped")
    assert "the last good step is 1" in why
    (end,) = [i for i in one.last if isinstance(i, EndJob)]
    assert end.exit_code == EXIT_FAILED


def test_too_many_skipped_steps_stop_all_members_if_checkpoints_are_kept() -> None:
    one = job(2, saves=True)
    for step, v in enumerate((commit(), BAD, BAD), 1):
        apply_step(one, step, v)
    assert one.kinds.count("Stop") == 3
    for node in NODES:
        one.report(node, 3)
    assert {order.plan.last for order in one.orders(msg.Begin).values()} == {True}


@pytest.mark.parametrize("at_most", [0, 4])
def test_fewer_skipped_steps_or_no_limit_do_not_fail_the_job(at_most: int) -> None:
    one = job(at_most)
    for step, v in enumerate((BAD, BAD, BAD, commit(), BAD, BAD, BAD), 1):
        apply_step(one, step, v)
    assert rows(one) == [(1, 1), (2, 2), (3, 3), (5, 1), (6, 2), (7, 3)]
    assert failed(one) == []


def test_steps_skipped_by_a_loss_scale_neither_count_nor_end_a_row() -> None:
    one = job(3)
    for step, v in enumerate((OVERFLOW, OVERFLOW, OVERFLOW, BAD, OVERFLOW, BAD), 1):
        apply_step(one, step, v)
    assert rows(one) == [(4, 1), (6, 2)]
    assert failed(one) == []
    assert [event.overflow for event in one.events if isinstance(event, ev.StepCommitted)][3:5] == [False, True]
    apply_step(one, 7, BAD)
    assert len(failed(one)) == 1


def test_the_count_of_skipped_steps_is_part_of_the_position() -> None:
    one = job(3)
    apply_step(one, 1, BAD)
    apply_step(one, 2, BAD)
    position = one.machine.transaction.position
    assert position.skipped_in_a_row == 2
    assert position.after(one.events[-1]).skipped_in_a_row == 2


def test_a_rollback_resets_the_count_of_skipped_steps() -> None:
    one = job(3)
    apply_step(one, 1, BAD)
    back = ev.RolledBack(time=1.0, job="j", term=1, generation=2, seq=9, to_step=0, why="w")
    assert one.machine.transaction.position.after(back).skipped_in_a_row == 0


def test_an_infinite_loss_with_finite_gradients_is_emitted_once_and_not_counted() -> None:
    one = job(2)
    for step, loss in enumerate((1.0, inf, -inf, 1.0, nan), 1):
        apply_step(one, step, commit(loss))
    told = [event for event in one.events if isinstance(event, ev.LossNotFinite)]
    assert [(event.step, event.loss) for event in told] == [(2, "inf"), (5, "nan")]
    assert rows(one) == []


def test_an_infinite_first_loss_is_emitted() -> None:
    one = job()
    apply_step(one, 1, commit(inf))
    assert [event.step for event in one.events if isinstance(event, ev.LossNotFinite)] == [1]


def swap_at(job: Job, step: int, v: Commit) -> None:
    """Put the pending plan with n3 in force at this step, before any member enters it."""
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    pending = job.machine.record.pending
    assert pending is not None
    for worker in pending.workers:
        job.deliver(msg.Prepared(worker=worker, generation=pending.generation))
    apply_step(job, step, msgspec.structs.replace(v, flags=(msg.Flag.SWAP,)))


def finish(job: Job, step: int, *nodes: str) -> None:
    for node in nodes:
        job.deliver(msg.Finished(worker=w(node), generation=job.machine.transaction.generation, step=step))


@pytest.mark.parametrize("at_most", [2, 3])
def test_too_many_skipped_steps_fail_a_job_whose_loops_end_at_a_swap(at_most: int) -> None:
    """The members ended their loops, and never entered the generation that began with their last step."""
    one = job(at_most)
    apply_step(one, 1, BAD)
    swap_at(one, 2, BAD)
    assert one.machine.transaction.generation == 2
    finish(one, 2, *NODES, "n3")
    assert rows(one) == [(1, 1), (2, 2)]
    assert bool(failed(one)) is (at_most == 2)
    assert [event.reason for event in one.events if isinstance(event, ev.JobFinished)] == ["completed"] * (at_most - 2)


def test_a_restarted_job_is_not_failed_for_steps_that_it_will_roll_back() -> None:
    """The job was killed while it saved; its record has the plan under which too many steps were skipped."""
    one = job(2, saves=True)
    apply_step(one, 1, BAD)
    apply_step(one, 2, BAD)
    assert one.machine.context.closing.under_way
    one.boot()
    one.tick(0.1)
    assert one.machine.record.plan is not None
    assert not one.machine.context.closing.under_way


def left(node: str, step: int) -> msg.WorkerDown:
    """Return the end of a worker after its script has left its loop at this step."""
    end = {"kind": FailureKind.PROCESS_EXIT, "detail": "the script ended", "exit_code": 0, "final": True}
    return msg.WorkerDown(worker=w(node), applied=step, **end)  # pyright: ignore[reportArgumentType]


def test_too_many_skipped_steps_fail_a_job_whose_scripts_ended_at_a_swap() -> None:
    """n3 waits for a state that no process holds any longer."""
    one = job(2)
    apply_step(one, 1, BAD)
    swap_at(one, 2, BAD)
    for node in NODES:
        one.deliver_from(node, left(node, 2))
    one.report("n3", None, msg.Phase.ENTERING, fresh=True)
    assert one.machine.record.outcome == "failed"
    assert "the last good step is 0" in failed(one)[0]
