"""Tests of script errors: kept states, replaced workers, and the end of the job."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
from machinery import Job, applied, attach, commit, hello, kept, reduced, w, written

from holdfast.coordination.experts.blobs import find_lost_experts
from holdfast.coordination.instructions import EndJob
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, Phase
from holdfast.protocol.record import KnownCheckpoint

OOPS = "ValueError: oops (train.py, line 3)"


def error(
    step: int | None = 3, micro_batch: int | None = 4, place: str = "ValueError (train.py, line 3)"
) -> msg.ScriptError:
    phase = Phase.COMPUTE if step else Phase.IDLE
    return msg.ScriptError(place=place, step=step, micro_batch=micro_batch, phase=phase, traceback="Traceback: oops")


def raised(
    node: str, micro_batch: int | None = 4, generation: int = 1, *, code: int = 1, final: bool = False
) -> msg.Raised:
    return msg.Raised(
        worker=w(node), generation=generation, detail=OOPS, error=error(3, micro_batch), exit_code=code, final=final
    )


UNSAVED = "nothing could be saved: step 2 has no live copy"


def trained(nodes: int = 3, *, saves: bool = True) -> Job:
    job = Job(nodes=nodes).start(saves=saves)
    job.step(1)
    job.step(2)
    return job


def report_of(job: Job, worker: str, at: int | None, **fields: object) -> msg.Report:
    """Return the answer of a worker with any name to the current Stop."""
    stop = job.machine.context.interruption.stop
    assert stop is not None
    step = 3 if at is None else at + 1
    told = {"term": stop.term, "generation": stop.generation, "applied": at, "step": step, "phase": msg.Phase.COMPUTE}
    return msg.Report(worker=worker, **told, **fields)  # pyright: ignore[reportArgumentType]


def replaced(job: Job) -> list[str]:
    return [message.worker for message in job.sent(msg.Replace)]


def test_a_script_that_raises_on_one_node_is_restarted_and_the_others_continue() -> None:
    job = trained()
    job.deliver(raised("n1"))
    assert job.kinds == ["persist", "FailureDetected", "Stop", "Stop", "Stop"]
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.node, failure.kind, failure.detector, failure.severity) == ("n1", "exception", "exception", 2)
    assert (failure.step, failure.micro_batch, failure.phase) == (3, 4, "compute")
    job.report("n0", 2, summed=(0, 3))
    job.report("n2", 2, summed=(2,))
    assert not replaced(job)
    job.report("n1", 2)
    assert replaced(job) == [w("n1")]
    begins = job.orders(msg.Begin)
    assert set(begins) == {w("n0"), w("n2")}
    begin = begins[w("n0")]
    assert (begin.decision.kind, begin.decision.applied, begin.plan.last) == (DecisionKind.REDO, 2, False)
    assert sorted(begin.assignment[0] + begin.assignment[1]) == list(range(6)), (
        "other nodes compute all its micro-batches"
    )
    assert job.machine.members.worker(w("n1")) is None


def test_a_step_result_of_the_worker_that_raised_counts() -> None:
    """It has applied a step that the others have not: they go forward with its step result, without it."""
    job = trained()
    job.deliver(raised("n1"))
    passed = msg.PassedStep(step=3, commit=msg.Commit(grad_square=1.0, loss_sum=24.0, samples=24, nonfinite=0))
    job.deliver(applied(w("n1"), 1, 3))
    job.report("n1", 3, passed=passed)
    job.report("n0", 2, Phase.ABANDONED, **reduced(1.0))
    job.report("n2", 2, Phase.ABANDONED, **reduced(1.0))
    begin = job.orders(msg.Begin)[w("n0")]
    assert (begin.decision.kind, begin.decision.applied) == (DecisionKind.FORWARD, 3)
    assert replaced(job) == [w("n1")]


def test_the_same_error_on_a_second_node_saves_and_fails_the_job() -> None:
    job = trained()
    job.deliver(raised("n1"))
    for node in ("n0", "n1", "n2"):
        job.report(node, 2)
    job.deliver(raised("n2", generation=2))
    job.report("n0", 2)
    job.report("n2", 2)
    begins = job.orders(msg.Begin)
    assert set(begins) == {w("n0"), w("n2")}, "a worker that raised keeps its state, and may save it"
    assert all(begin.plan.last for begin in begins.values())
    for node in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=2))
    job.deliver(written("n0", 2, "writing-2", generation=3))
    job.deliver(kept("n0", 2, "step-2", generation=3))
    for node in ("n0", "n2"):
        job.deliver(msg.Finished(worker=w(node), generation=3, step=2))
    why = f"step 3, micro-batch 4: {OOPS} (on nodes n1, n2)"
    assert job.machine.over == EndJob(EXIT_FAILED, why)
    (failed,) = job.emitted(ev.JobFailed)
    assert (failed.why, failed.traceback) == (why, "Traceback: oops")


def all_raise(job: Job, *nodes: str) -> None:
    for number, node in enumerate(nodes):
        job.deliver(raised(node, micro_batch=number))
    for node in nodes:
        job.report(node, 2)


def test_workers_that_all_raise_keep_their_state_until_it_is_saved() -> None:
    job = trained()
    all_raise(job, "n0", "n1", "n2")
    begins = job.orders(msg.Begin)
    assert set(begins) == {w("n0"), w("n1"), w("n2")}
    assert all(begin.plan.last for begin in begins.values())
    assert not replaced(job)
    assert job.machine.record.will is not None
    assert job.machine.record.will.why == f"step 3, micro-batch 2: {OOPS} (on nodes n0, n1, n2)"


def test_without_checkpoints_an_error_on_two_nodes_fails_the_job_at_once() -> None:
    job = trained(saves=False)
    for node in ("n0", "n1", "n2"):
        job.deliver(raised(node))
        if job.machine.over is not None:
            break
    assert job.machine.over == EndJob(EXIT_FAILED, f"step 3, micro-batch 4: {OOPS} (on nodes n0, n1)")


def finish_last(job: Job, node: str = "n0") -> None:
    job.deliver(msg.Entered(worker=w(node), generation=2, applied=2))
    job.deliver(written(node, 2, "writing-2", generation=2))
    job.deliver(kept(node, 2, "step-2", generation=2))
    job.deliver(msg.Finished(worker=w(node), generation=2, step=2))


def test_the_only_copy_of_the_state_is_saved_before_its_worker_is_replaced() -> None:
    job = trained(1)
    all_raise(job, "n0")
    assert job.orders(msg.Begin)[w("n0")].plan.last
    finish_last(job)
    assert job.machine.over is None
    assert [refused.retry for refused in job.sent(msg.Refused)] == [True]
    job.connect(hello("n0", session="0" * 8))
    job.deliver(attach("n0/0/b"))
    (back,) = job.emitted(ev.RolledBack)
    assert back.to_step == 2
    begin = job.orders(msg.Begin)["n0/0/b"]
    assert (begin.decision.kind, begin.plan.last) == (DecisionKind.ROLLBACK, False)
    assert job.machine.record.will is None


def test_the_newest_checkpoint_is_restored_if_the_only_copy_dies_before_its_save() -> None:
    """A simulation (11434243472) found this: the job failed, although the work was not known to be at fault."""
    job = trained(1)
    job.deliver(written("n0", 1, "writing-1"))
    job.deliver(kept("n0", 1, "step-1"))
    all_raise(job, "n0")
    assert job.orders(msg.Begin)[w("n0")].plan.last
    job.deliver_from("n0", msg.WorkerDown(worker=w("n0"), kind=FailureKind.PROCESS_EXIT, detail="", exit_code=-9))
    assert job.machine.over is None
    job.deliver(attach("n0/0/b"))
    (back,) = job.emitted(ev.RolledBack)
    assert back.to_step == 1
    begin = job.orders(msg.Begin)["n0/0/b"]
    assert (begin.decision.kind, begin.plan.last) == (DecisionKind.ROLLBACK, False)
    assert job.machine.record.will is None


def went_back() -> Job:
    """Return a job rolled back to step 2: one worker has loaded the checkpoint and raises, others still load it."""
    name = "step-2-t1-g1-0"
    job = Job(nodes=2).boot(checkpoints=(KnownCheckpoint(name=name, step=2, term=1, generation=1),))
    for node in ("n0", "n1"):
        job.connect(hello(node))
        job.deliver(msgspec.structs.replace(attach(w(node)), saves=True))
    assert job.machine.record.decision.kind is DecisionKind.ROLLBACK
    assert job.machine.record.plan.workers == (w("n0"), w("n1"))
    return job


def test_the_restored_checkpoint_is_not_saved_again_after_an_error() -> None:
    """Found by simulation 11424588318: the first worker raised before the others had loaded the checkpoint.

    Each time the job saved and restarted all workers, so no other worker ever reached the step.
    """
    job = went_back()
    job.deliver(msg.Raised(worker=w("n0"), generation=1, detail=OOPS, error=error(3, 9), exit_code=1, final=False))
    job.deliver(report_of(job, w("n1"), None))
    job.deliver(report_of(job, w("n0"), 2))
    assert replaced(job) == [w("n0")]
    begins = job.orders(msg.Begin)
    assert set(begins) == {w("n1")}
    begin = begins[w("n1")]
    assert (begin.decision.kind, begin.decision.applied, begin.plan.last) == (DecisionKind.ROLLBACK, 2, False)
    assert job.machine.record.will is None


def test_steps_after_a_rollback_are_saved_after_an_error() -> None:
    job = went_back()
    job.deliver(msg.Entered(worker=w("n0"), generation=1, applied=2))
    job.deliver(applied(w("n0"), 1, 3))
    job.deliver(msg.Raised(worker=w("n0"), generation=1, detail=OOPS, error=error(4, 9), exit_code=1, final=False))
    job.deliver(report_of(job, w("n1"), None))
    job.deliver(report_of(job, w("n0"), 3, passed=msg.PassedStep(step=3, commit=commit())))
    assert not replaced(job)
    assert all(begin.plan.last for begin in job.orders(msg.Begin).values())


def test_a_new_coordinator_knows_that_a_restart_follows_the_save() -> None:
    job = trained(1)
    all_raise(job, "n0")
    job.boot(takeover=True)
    entered = msg.Entered(worker=w("n0"), generation=2, applied=2)
    job.connect(hello("n0", (attach(w("n0")), entered, raised("n0", 0))))
    finish_last(job)
    assert job.machine.over is None
    assert [refused.retry for refused in job.sent(msg.Refused)] == [True]
    assert len([event for event in job.events if isinstance(event, ev.FailureDetected)]) == 1, (
        "the failure was reported before"
    )


def test_without_checkpoints_an_error_of_the_only_worker_fails_the_job() -> None:
    job = trained(1, saves=False)
    all_raise(job, "n0")
    assert job.machine.over is not None
    assert job.machine.over.why.endswith("; then there is no other live copy of step 2")


def test_the_last_step_is_committed_before_the_job_fails() -> None:
    job = Job(nodes=1).start()
    job.deliver(raised("n0"))
    job.report("n0", 1, passed=msg.PassedStep(step=1, commit=commit()))
    assert [type(event) for event in job.last_events()][:2] == [ev.StepCommitted, ev.JobFailed]
    assert len(job.emitted(ev.StepCommitted)) == 1


def test_an_error_before_the_first_step_only_replaces_the_worker() -> None:
    job = Job(nodes=1).start(saves=True)
    job.deliver(raised("n0"))
    job.report("n0", 0)
    assert replaced(job) == [w("n0")]
    assert job.machine.over is None
    assert job.machine.record.plan is None


def test_a_joining_worker_that_raises_is_replaced_at_once() -> None:
    job = trained()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    job.deliver(msg.Raised(worker=w("n3"), generation=0, detail=OOPS, error=error(None, None), exit_code=1))
    assert replaced(job) == [w("n3")]
    assert len(job.emitted(ev.FailureDetected)) == 1
    assert job.machine.context.interruption.stop is None


def down(node: str, *, step: int | None = 3, phase: Phase = Phase.APPLYING) -> msg.WorkerDown:
    place = msg.ScriptError(place="RuntimeError (train.py, line 9)", step=step, phase=phase)
    return msg.WorkerDown(worker=w(node), kind=FailureKind.EXCEPTION, detail=OOPS, exit_code=1, error=place)


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("timed_out", [True, False])
def test_collectives_that_fail_because_of_a_script_error_are_not_a_second_failure(
    *, dies: bool, timed_out: bool
) -> None:
    """The messages may come in any order: a worker may answer Stop while it still formats its traceback."""
    complaints = [("complains", "n0"), ("complains", "n2")]
    reports = [("reports", node) for node in ("n0", "n1", "n2")]
    for order in permutations([*complaints, *reports, ("raises", "n1")]):
        turn = {said: place for place, said in enumerate(order)}
        if any(turn["complains", node] > turn["reports", node] for node in ("n0", "n2")):
            continue
        job = trained()
        for what, node in order:
            if what == "complains":
                job.deliver(msg.Complaint(worker=w(node), generation=1, detail="reset by peer", timed_out=timed_out))
            elif what == "raises":
                job.deliver_from(node, down(node)) if dies else job.deliver(raised(node))
            elif job.machine.members.worker(w(node)) is not None and job.machine.context.interruption.stop is not None:
                job.report(node, 2, ending=turn["raises", "n1"] > turn[what, node] and node == "n1")
        detected = [event.node for event in job.events if isinstance(event, ev.FailureDetected)]
        assert detected == ["n1"], order


def test_an_error_of_two_nodes_in_the_optimizer_step_is_the_scripts_fault() -> None:
    job = trained()
    job.deliver_from("n1", down("n1"))
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.step, failure.phase) == (3, "applying")
    job.deliver_from("n2", down("n2"))
    assert job.machine.record.will is not None
    assert "on nodes n1, n2" in job.machine.record.will.why
    job.deliver_from("n0", down("n0"))
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith(f"step 3: {OOPS} (on nodes n1, n2, n0); "), (
        "all nodes that have raised it by the end of the job"
    )


def test_a_node_with_another_error_is_not_named_in_the_failure() -> None:
    job = trained()
    job.deliver_from("n1", down("n1"))
    job.deliver_from("n2", down("n2"))
    place = msg.ScriptError(place="KeyError (train.py, line 9)", step=3, phase=Phase.APPLYING)
    job.deliver_from("n0", msgspec.structs.replace(down("n0"), error=place))
    assert "(on nodes n1, n2); " in job.emitted(ev.JobFailed)[0].why


def test_scripts_that_raise_before_they_have_attached() -> None:
    job = Job(nodes=2).boot()
    for node in ("n0", "n1"):
        job.connect(hello(node))
    job.deliver_from("n0", down("n0", step=None, phase=Phase.IDLE))
    assert job.machine.over is None
    job.deliver_from("n1", down("n1", step=None, phase=Phase.IDLE))
    assert job.machine.over == EndJob(EXIT_FAILED, f"{OOPS} (on nodes n0, n1)")


@pytest.mark.parametrize(("code", "ends"), [(7, EXIT_FAILED), (2, EXIT_BAD_INPUT)])
def test_a_final_script_error_saves_and_ends_the_job(code: int, ends: int) -> None:
    job = trained(1)
    job.deliver(raised("n0", code=code, final=True))
    job.report("n0", 2)
    finish_last(job)
    assert job.machine.over is not None
    assert job.machine.over.exit_code == ends
    assert job.machine.over.why == f"rank 0 on n0: step 3, micro-batch 4: {OOPS}"


@pytest.mark.parametrize(
    ("checkpoint", "unsaved"),
    [(0, UNSAVED), (1, f"{UNSAVED}, the newest checkpoint is of step 1"), (2, "")],
)
def test_an_optimizer_error_on_all_nodes_reports_that_nothing_was_saved(checkpoint: int, unsaved: str) -> None:
    job = Job(nodes=2).start(saves=True)
    for step in (1, 2):
        job.step(step)
        if step == checkpoint:
            job.deliver(written("n0", step, f"writing-{step}"))
            job.deliver(kept("n0", step, f"step-{step}"))
    for node in ("n0", "n1"):
        job.deliver_from(node, down(node))
    why = f"step 3: {OOPS} (on nodes n0, n1)"
    assert job.machine.over == EndJob(EXIT_FAILED, f"{why}; {unsaved}" if unsaved else why)


def test_a_worker_that_raised_with_the_newest_step_is_dropped_if_the_others_can_continue() -> None:
    """Without checkpoints the job failed, although the announced step before still existed (seed 22000003350)."""
    job = Job().start()
    job.step(1)
    job.deliver(raised("n1"))
    job.report("n0", 1)
    job.report("n1", 2)
    job.report("n2", 1)
    assert not job.emitted(ev.JobFailed)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n0", "n2"), "redo")


def test_the_others_wait_for_the_restarted_process_if_they_lack_expert_slots() -> None:
    """After the rollback they had to continue without it, and the job failed (seeds 24732507595, 24404105864)."""
    shape = msg.ExpertShape(layers=1, experts=4, slots=2)
    job, nodes = Job().boot(), ("n0", "n1", "n2")
    for name in nodes:
        job.connect(hello(name))
        job.deliver(msgspec.structs.replace(attach(w(name), experts=shape), saves=True))
    for name in nodes:
        job.deliver(msg.Entered(worker=w(name), generation=1, applied=0))
    job.step(1)
    for part, name in enumerate(nodes):
        job.deliver(written(name, 1, "writing-1", part=part, parts=3))
    job.deliver(kept("n0", 1, "step-1"))
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.expert_plan is not None
    held = dict(zip(nodes, plan.expert_plan.placement, strict=True))
    lost = next(
        name for name in nodes if find_lost_experts(shape, [blob for other, blob in held.items() if other != name])
    )
    stays, raiser = (name for name in nodes if name != lost)
    job.lose(lost)
    job.deliver(raised(raiser))
    job.report(stays, 1)
    job.report(raiser, 1)
    assert not job.emitted(ev.JobFailed)
    assert replaced(job) == [w(raiser)]
    job.deliver(attach(w(raiser, "b"), experts=shape))
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (sorted(begun.members), begun.decision) == (sorted((stays, raiser)), "rollback")
