"""Tests of a job that ends with a checkpoint: its members save their current step despite other events."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, applied, attach, called, commit, hello, kept, reduced, w, written

from holdfast.coordination.inputs import Received, Shutdown
from holdfast.coordination.instructions import EndJob
from holdfast.errors import EXIT_DONE, EXIT_ENDED, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.position import Position
from holdfast.protocol.record import KnownCheckpoint
from made_events import made

SHRINK, RESTART = JobSpec(), JobSpec(recovery=RecoverySpec(on_node_failure="restart-all"))
CTRL_C = Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True)


def interrupted_job(at: int = 4, job: Job | None = None) -> Job:
    """Return a job of three nodes that have applied a step and are told to stop."""
    job = (job or Job()).start(saves=True)
    for step in range(1, at + 1):
        job.step(step)
    job.feed(CTRL_C)
    assert job.kinds == ["persist", "Stop", "Stop", "Stop"]
    return job


def all_report(job: Job, at: int, *nodes: str) -> msg.Begin:
    """Answer the Stop; return the order that begins the last generation."""
    for node in nodes or ("n0", "n1", "n2"):
        job.report(node, at)
    begins = job.orders(msg.Begin)
    assert set(begins) == {w(node) for node in nodes or ("n0", "n1", "n2")}
    begin = next(iter(begins.values()))
    assert begin.plan.last
    assert job.emitted(ev.GenerationStarted)[0].reason == "save"
    return begin


def all_save(job: Job, step: int, generation: int = 2, nodes: tuple[str, ...] = ("n0", "n1", "n2")) -> None:
    """Make the members enter, the first one save, and all finish."""
    for node in nodes:
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=step))
    job.deliver(written(nodes[0], step, f"writing-{step}", generation=generation))
    assert job.orders(msg.AcceptCheckpoint)[w(nodes[0])].step == step
    job.deliver(kept(nodes[0], step, f"step-{step}", generation=generation))
    for node in nodes:
        assert job.machine.over is None
        job.deliver(msg.Finished(worker=w(node), generation=generation, step=step))


@pytest.mark.parametrize("policy", [SHRINK, RESTART], ids=["shrink", "restart-all"])
def test_an_interrupted_job_is_saved_and_can_be_resumed(policy: JobSpec) -> None:
    job = interrupted_job(4, Job(spec=policy))
    begin = all_report(job, 4)
    assert begin.decision == msg.Decision(kind=DecisionKind.REDO, applied=4)
    all_save(job, 4)
    assert job.machine.over == EndJob(EXIT_INTERRUPTED, "Ctrl-C")
    assert [end.exit_code for end in job.sent(msg.EndNode)] == [EXIT_INTERRUPTED] * 3
    assert job.machine.record.outcome == ""
    assert job.machine.record.checkpoints[-1].step == 4
    (finished,) = job.emitted(ev.JobFinished)
    assert (finished.reason, finished.why, finished.steps, finished.outcome) == ("stopped", "Ctrl-C", 4, "stopped")


def test_a_step_that_a_member_has_passed_is_applied_and_saved() -> None:
    job = interrupted_job(4)
    passed = msg.PassedStep(step=5, commit=commit())
    job.report("n0", 4, msg.Phase.ABANDONED, **reduced(1.0))
    job.report("n1", 4, msg.Phase.PASSED, **reduced(1.0), passed=passed)
    job.report("n2", 4, msg.Phase.ABANDONED, **reduced(1.0))
    begin = job.orders(msg.Begin)[w("n0")]
    assert (begin.decision.kind, begin.decision.applied, begin.plan.last) == (DecisionKind.FORWARD, 5, True)
    for node in ("n0", "n1", "n2"):
        job.deliver(applied(w(node), 2, 5))
    all_save(job, 5)
    assert job.machine.over is not None
    assert [event.step for event in job.events if isinstance(event, ev.StepCommitted)][-1] == 5


def test_a_repeated_request_changes_nothing_and_one_without_saving_ends_at_once() -> None:
    job = interrupted_job()
    job.feed(CTRL_C, after=1.0)
    assert job.kinds == []
    all_report(job, 4)
    job.feed(CTRL_C, after=1.0)
    assert job.kinds == []
    job.feed(Shutdown(75, "SIGTERM"))
    assert job.machine.over == EndJob(75, "SIGTERM")


@pytest.mark.parametrize("reported", [True, False])
def test_a_save_that_takes_too_long_is_given_up(reported: bool) -> None:
    job = interrupted_job(job=Job(save_timeout_s=4.0))
    if reported:
        all_report(job, 4)
    for _ in range(4):
        assert job.machine.over is None
        for connection in job.connections.values():
            job.feed(Received(connection, msg.Heartbeat()))
        job.tick(1.0)
    job.tick(0.1)
    assert job.machine.over == EndJob(EXIT_INTERRUPTED, "Ctrl-C")
    assert job.machine.record.outcome == ""


def test_the_others_save_without_a_node_that_fails_during_the_save() -> None:
    job = interrupted_job()
    all_report(job, 4)
    job.lose("n0")
    assert job.kinds.count("Stop") == 2
    begin = all_report(job, 4, "n1", "n2")
    assert begin.plan.workers == (w("n1"), w("n2"))
    all_save(job, 4, generation=3, nodes=("n1", "n2"))
    assert job.machine.over == EndJob(EXIT_INTERRUPTED, "Ctrl-C")


def test_an_interrupted_recovery_ends_in_a_save() -> None:
    job = Job().start(saves=True)
    job.step(1)
    job.lose("n2")
    job.report("n0", 1)
    job.feed(CTRL_C)
    assert job.machine.over is None
    job.report("n1", 1)
    assert all(begin.plan.last for begin in job.orders(msg.Begin).values())
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n1")}


def test_no_node_joins_a_job_that_is_ending() -> None:
    job = interrupted_job()
    job.connect(hello("n3"))
    job.deliver(msgspec.structs.replace(attach(w("n3")), saves=True))
    all_report(job, 4)
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=4))
    job.tick(2.0)
    assert job.orders(msg.Prepare) == {}
    assert job.orders(msg.Stop) == {}


def test_a_job_that_cannot_save_ends_at_once() -> None:
    waiting = Job(nodes=2).boot()
    waiting.connect(hello("n0"))
    waiting.deliver(msgspec.structs.replace(attach(w("n0")), saves=True))
    waiting.feed(CTRL_C)
    assert waiting.kinds == ["JobFinished", "EndNode", "end"]
    unsaved = Job().start()
    unsaved.feed(CTRL_C)
    assert unsaved.kinds == ["JobFinished", "EndNode", "EndNode", "EndNode", "end"]


def test_a_job_at_its_time_limit_is_saved_and_can_be_resumed() -> None:
    job = Job(spec=JobSpec(time_limit=60.0)).start(saves=True)
    job.step(1)
    pass_time(job, 59.0)
    assert job.orders(msg.Stop) == {}
    pass_time(job, 2.0)
    assert job.machine.state == "stopping"
    all_report(job, 1)
    all_save(job, 1)
    assert job.machine.over == EndJob(EXIT_ENDED, "its time limit of 60 s is over")
    (finished,) = job.emitted(ev.JobFinished)
    assert (finished.reason, finished.resumable) == ("time_limit", True)


def test_the_time_limit_counts_for_a_run_across_coordinators() -> None:
    job = Job(spec=JobSpec(time_limit=60.0)).start(saves=True)
    since = job.machine.record.run_since
    pass_time(job, 30.0)
    job.boot(takeover=True)
    assert job.machine.record.run_since == since
    pass_time(job, 29.0)
    assert job.machine.over is None
    pass_time(job, 2.0)
    assert job.machine.over is not None  # no worker is connected that could save
    job.boot()
    assert job.machine.record.run_since > since + 60
    job.tick(1.0)
    assert job.machine.over is None


def pass_time(job: Job, seconds: float) -> None:
    """Advance the time while all nodes send heartbeats."""
    for _ in range(int(seconds)):
        for connection in job.connections.values():
            job.feed(Received(connection, msg.Heartbeat()))
        job.tick(1.0)


def test_a_node_that_connects_to_an_ended_job_is_ended() -> None:
    job = Job().start()
    job.feed(CTRL_C)
    job.connect(hello("n3"))
    assert [end.exit_code for end in job.sent(msg.EndNode)] == [EXIT_INTERRUPTED]


def test_a_lost_or_initial_state_is_not_saved() -> None:
    fresh = interrupted_job(at=0)
    for node in ("n0", "n1", "n2"):
        fresh.report(node, 0)
    assert fresh.machine.over == EndJob(EXIT_INTERRUPTED, "Ctrl-C")
    lost = Job().start(saves=True)
    lost.step(1)
    lost.deliver(written("n0", 1, "writing-1"))
    lost.deliver(kept("n0", 1, "step-1"))
    lost.step(2)
    lost.feed(CTRL_C)
    for node in ("n0", "n1", "n2"):
        lost.report(node, None)
    unsaved = "nothing could be saved: step 2 has no live copy, the newest checkpoint is of step 1"
    assert lost.machine.over == EndJob(EXIT_INTERRUPTED, f"Ctrl-C; {unsaved}")
    assert lost.machine.record.checkpoints == (KnownCheckpoint(step=1, name=called(1, "1"), term=1, generation=1),)


def test_a_new_coordinator_does_not_take_the_end_of_the_last_generation_as_success() -> None:
    job = interrupted_job()
    all_report(job, 4)
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        worker = w(node)
        said = (
            msgspec.structs.replace(attach(worker), saves=True),
            msg.Entered(worker=worker, generation=2, applied=4),
            msg.Finished(worker=worker, generation=2, step=4),
        )
        job.connect(hello(node, said))
    assert job.machine.over is not None
    assert job.machine.over.exit_code != EXIT_DONE
    assert job.machine.record.outcome == ""


def test_a_loop_that_ended_before_the_last_generation_does_not_count_as_saved() -> None:
    job = interrupted_job()
    all_report(job, 4)
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        said = (
            msgspec.structs.replace(attach(w(node)), saves=True),
            msg.Entered(worker=w(node), generation=2, applied=4),
            msg.Finished(worker=w(node), generation=1, step=4),
        )
        job.connect(hello(node, said))
    assert job.machine.over is None
    all_save(job, 4)
    assert job.machine.record.checkpoints[-1].step == 4


def test_repeated_requests_do_not_extend_the_time_for_the_save() -> None:
    job = interrupted_job(job=Job(save_timeout_s=4.0))
    all_report(job, 4)
    for _ in range(4):
        assert job.machine.over is None
        for connection in job.connections.values():
            job.feed(Received(connection, msg.Heartbeat()))
        job.feed(CTRL_C, after=0.5)
        job.tick(0.5)
    job.tick(0.1)
    assert job.machine.over == EndJob(EXIT_INTERRUPTED, "Ctrl-C")


def test_the_request_to_end_survives_a_takeover() -> None:
    """A failure in the last generation leads to another last one, also under a coordinator that received no request."""
    job = interrupted_job()
    all_report(job, 4)
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        entered = msg.Entered(worker=w(node), generation=2, applied=4)
        job.connect(hello(node, (msgspec.structs.replace(attach(w(node)), saves=True), entered)))
    job.lose("n2")
    all_report(job, 4, "n0", "n1")


def test_no_member_is_stopped_while_another_still_saves() -> None:
    job = interrupted_job(job=Job(report_timeout_s=2.0))
    all_report(job, 4)
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=4))
    for node in ("n1", "n2"):
        job.deliver(msg.Finished(worker=w(node), generation=2, step=4))
    for _ in range(8):
        for connection in job.connections.values():
            job.feed(Received(connection, msg.Heartbeat()))
        job.tick(1.0)
        assert job.orders(msg.Stop) == {}


RAISED = "after_apply raised at step 4 on n1, rank 1: ZeroDivisionError: of the script (train.py:33)"


def failed_job(spec: JobSpec = SHRINK) -> Job:
    """Return a job of three nodes that have applied step 4; the script of one has raised."""
    job = Job(spec=spec).start(saves=True)
    for step in range(1, 5):
        job.step(step)
    job.deliver(script_failed("n1"))
    assert job.kinds == ["persist", "Stop", "Stop", "Stop"]
    return job


def script_failed(node: str, generation: int = 1) -> msg.ScriptFailed:
    return msg.ScriptFailed(worker=w(node), generation=generation, step=4, why=RAISED.replace("n1", node))


@pytest.mark.parametrize("policy", [SHRINK, RESTART], ids=["shrink", "restart-all"])
def test_a_failed_script_fails_the_job_once_all_members_have_saved(policy: JobSpec) -> None:
    job = failed_job(policy)
    all_report(job, 4)
    all_save(job, 4)
    assert job.machine.over == EndJob(EXIT_FAILED, RAISED)
    assert job.machine.record.outcome == "failed"
    assert job.machine.record.checkpoints[-1].step == 4
    assert [event.why for event in job.events if isinstance(event, ev.JobFailed)] == [RAISED]


def test_collectives_that_fail_because_of_a_stop_are_not_a_failure() -> None:
    job = failed_job()
    job.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="connection closed by peer"))
    all_report(job, 4)
    all_save(job, 4)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
    hung = failed_job()
    hung.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="it was waited for in vain", timed_out=True))
    for node in ("n0", "n1", "n2"):
        hung.report(node, 4)
    assert [event.node for event in hung.events if isinstance(event, ev.FailureDetected)] == ["n2"]


def test_the_first_cause_of_the_end_is_reported() -> None:
    job = failed_job()
    job.deliver(script_failed("n2"))
    job.feed(CTRL_C)
    all_report(job, 4)
    all_save(job, 4)
    assert job.machine.over == EndJob(EXIT_FAILED, RAISED)
    at_once = failed_job()
    at_once.feed(Shutdown(75, "SIGTERM"))
    assert at_once.machine.over == EndJob(EXIT_FAILED, RAISED)


def test_a_script_that_fails_while_the_job_is_ending_fails_the_job() -> None:
    job = interrupted_job()
    job.deliver(script_failed("n1"))
    all_report(job, 4)
    all_save(job, 4)
    assert job.machine.over == EndJob(EXIT_FAILED, RAISED)


@pytest.mark.parametrize("begun", [False, True])
def test_the_cause_of_the_end_survives_a_takeover(begun: bool) -> None:
    job = failed_job()
    generation = 1
    if begun:
        all_report(job, 4)
        generation = 2
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        said = (msgspec.structs.replace(attach(w(node)), saves=True), msg.Begun(worker=w(node), generation=generation))
        said = (*said, msg.Entered(worker=w(node), generation=generation, applied=4))
        job.connect(hello(node, (*said, script_failed("n1")) if node == "n1" else said))
    if not begun:
        all_report(job, 4)
        all_save(job, 4)
    else:
        for node in ("n0", "n1", "n2"):
            job.deliver(msg.Finished(worker=w(node), generation=generation, step=4))
    assert job.machine.over == EndJob(EXIT_FAILED, RAISED)


def test_a_finished_job_ignores_an_interrupt() -> None:
    job = Job().start(saves=True)
    job.step(1)
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.Finished(worker=w(node), generation=1, step=1))
    assert job.machine.over == EndJob(EXIT_DONE, "done")
    job.feed(CTRL_C)
    assert job.kinds == []


def stopped_job(step: int = 1) -> Job:
    """Return a job of three nodes that have applied a step at which their scripts requested a stop."""
    job = Job().start(saves=True)
    v = msgspec.structs.replace(commit(), wishes=(msg.Wish.STOP,))
    for node in ("n0", "n1", "n2"):
        job.deliver(msgspec.structs.replace(applied(w(node), 1, step), commit=v))
    assert job.machine.record.stopped == msg.PassedStep(step=step, commit=v)
    return job


def test_a_job_stopped_by_its_script_finishes_with_the_scripts_reason() -> None:
    job = stopped_job()
    for node, why in (("n0", ""), ("n1", "good enough"), ("n2", "")):
        job.deliver(msg.Finished(worker=w(node), generation=1, step=1, stopped=True, why=why))
    (finished,) = job.emitted(ev.JobFinished)
    assert (finished.reason, finished.why, finished.resumable) == ("stopped", "good enough", False)
    assert job.machine.over == EndJob(EXIT_DONE, "done")
    assert job.machine.record.outcome == "finished"


def test_a_stop_requested_by_a_script_survives_all_processes() -> None:
    job = stopped_job()
    job.deliver(written("n0", 1, "writing-1"))
    job.deliver(kept("n0", 1, "step-1"))
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node, (msgspec.structs.replace(attach(w(node, "b")), saves=True),), session="later"))
    decision = next(iter(job.orders(msg.Begin).values())).decision
    assert (decision.kind, decision.applied) == (DecisionKind.ROLLBACK, 1)
    assert decision.commit is not None
    assert decision.commit.wishes == (msg.Wish.STOP,)


def test_a_later_run_resumes_from_its_checkpoint_once_its_nodes_have_joined() -> None:
    job = interrupted_job(4)
    all_report(job, 4)
    all_save(job, 4)
    (end,) = [event for event in job.events if isinstance(event, ev.JobFinished)]
    assert (end.steps, end.samples_since) == (4, 0)
    before = len(job.events)
    job.records.clear()
    job.boot(checkpoints=[KnownCheckpoint(step=4, name="step-4")], ended=(1, 2))
    job.tick(0.2)
    for node in ("n0", "n1", "n2"):
        assert not [event for event in job.events[before:] if isinstance(event, ev.GenerationStarted)]
        job.connect(hello(node, session="b" * 8))
        job.deliver(attach(w(node, "b")))
    later = job.events[before:]
    assert not [event for event in later if isinstance(event, ev.JobWaiting | ev.ActionRequested)]
    (back,) = [event for event in later if isinstance(event, ev.RolledBack)]
    assert (back.to_step, back.why) == (4, "the job resumes from its checkpoint")
    (started,) = [event for event in later if isinstance(event, ev.GenerationStarted)]
    assert (started.reason, started.members) == ("start", ("n0", "n1", "n2"))


def test_a_run_that_resumes_without_the_journal_counts_the_samples_since() -> None:
    job = Job().start()
    job.machine.transaction.position = Position(seq=1).after(made("rolled_back", seq=2, to_step=50))
    job.feed(Shutdown(EXIT_ENDED, "over", save=False))
    (end,) = job.emitted(ev.JobFinished)
    assert (end.steps, end.samples, end.samples_since, end.final_loss) == (50, 0, 50, None)
