"""Tests of refused step results: the step is repeated with no kept gradients, and a second refusal counts."""

from __future__ import annotations

import pytest
from machinery import Job, applied, attach, hello, kept, w, written

from holdfast.coordination.failures.escalation import MAX_RETRIES
from holdfast.coordination.generations.refused_results import refusal_after, refused_again, refused_anew
from holdfast.errors import EXIT_FAILED
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind
from holdfast.protocol.record import Refusal

WHY = "step 1 is not made of each of its 6 micro-batches once"
HELD = {"n0": (0, 3), "n1": (1, 4), "n2": (2, 5)}


def refuses(job: Job, *nodes: str, generation: int = 1, step: int = 1) -> None:
    """Make these nodes' workers refuse a step result."""
    for node in nodes:
        job.deliver(msg.VoteRefused(worker=w(node), generation=generation, step=step, why=WHY))


def report_refusal(job: Job, *nodes: str, generation: int = 1, at: int = 0) -> None:
    for node in nodes:
        job.report(node, at, msg.Phase.REFUSED, summed=HELD[node], refused=generation)


def report_held(job: Job, *nodes: str, at: int = 0) -> None:
    for node in nodes:
        job.report(node, at, msg.Phase.REDUCING, summed=HELD[node])


def refused_job(*, saves: bool = False) -> Job:
    """Return a job in which two of three nodes have refused step 1, and generation 2 begins."""
    job = Job().start(saves=saves)
    refuses(job, "n0")
    assert job.kinds == ["Stop", "Stop", "Stop"]
    refuses(job, "n1")
    report_refusal(job, "n0", "n1")
    report_held(job, "n2")
    return job


def all_enter(job: Job, generation: int, *nodes: str) -> None:
    for node in nodes or ("n0", "n1", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=0))


def test_a_refused_step_is_repeated_without_kept_gradients() -> None:
    job = refused_job()
    (begin, *_) = job.orders(msg.Begin).values()
    assert begin.decision == Decision(kind=DecisionKind.REDO, applied=0)
    assert begin.assignment == ()
    assert begin.plan.workers == (w("n0"), w("n1"), w("n2"))
    assert job.records[-1].refusal == Refusal(step=1, clean_from=2)
    (found,) = job.emitted(ev.CorruptionFound)
    assert (found.step, found.what, found.detail, found.generation) == (1, "samples", WHY, 1)
    assert job.emitted(ev.FailureDetected) == []
    all_enter(job, 2)
    job.step(1, generation=2)
    (recovered,) = [event for event in job.events if isinstance(event, ev.Recovered)]
    assert (recovered.action, recovered.micro_batches_kept, recovered.micro_batches_redone) == ("retry", 0, 6)


def test_a_collective_broken_by_a_refusal_is_not_a_failure() -> None:
    """A worker that refused closes its groups on Stop, which may break a collective of workers without a result."""
    job = Job().start()
    refuses(job, "n0")
    job.deliver(msg.Complaint(worker=w("n2"), generation=1, detail="connection closed by peer"))
    report_refusal(job, "n0", "n1")
    report_held(job, "n2")
    assert job.emitted(ev.FailureDetected) == []
    assert len(job.orders(msg.Begin)) == 3


def test_no_gradients_are_kept_until_a_refused_step_is_applied() -> None:
    job = refused_job()
    all_enter(job, 2)
    job.lose("n2")
    report_held(job, "n0", "n1")
    (begin, *_) = job.orders(msg.Begin).values()
    assert (begin.plan.generation, begin.assignment) == (3, ())
    assert job.records[-1].refusal == Refusal(step=1, clean_from=2)
    assert job.emitted(ev.CorruptionFound) == []
    all_enter(job, 3, "n0", "n1")
    job.step(1, "n0", "n1", generation=3)
    job.lose("n1")
    job.report("n0", 1, summed=(0, 1))
    (begin,) = job.orders(msg.Begin).values()
    assert begin.assignment != ()
    assert job.records[-1].refusal is None


def test_a_replayed_refusal_of_an_earlier_attempt_is_not_counted_again() -> None:
    """Its sender never received generation 2: the coordinator died between writing and sending it."""
    job = refused_job()
    job.boot(takeover=True)
    for node in ("n0", "n1", "n2"):
        told = msg.VoteRefused(worker=w(node), generation=1, step=1, why=WHY)
        begun = msg.Begun(worker=w(node), generation=1)
        job.connect(hello(node, (attach(w(node)), begun, told)))
    report_refusal(job, "n0", "n1")
    report_held(job, "n2")
    assert job.machine.over is None
    assert job.emitted(ev.CorruptionFound) == []
    assert job.records[-1].refusal == Refusal(step=1, clean_from=2)
    assert job.machine.transaction.generation == 3


def test_a_second_refusal_without_kept_gradients_ends_the_job() -> None:
    job = refused_job()
    all_enter(job, 2)
    refuses(job, "n0", generation=2)
    report_refusal(job, "n0", "n1", "n2", generation=2)
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why.startswith(WHY)
    assert "had kept nothing" in failed.why
    assert job.machine.over is not None
    assert job.machine.over.exit_code == EXIT_FAILED


def test_a_checkpoint_is_saved_before_a_refused_job_ends() -> None:
    job = Job().start(saves=True)
    job.step(1)
    for generation in (1, 2):
        refuses(job, "n0", "n1", "n2", generation=generation, step=2)
        report_refusal(job, "n0", "n1", "n2", generation=generation, at=1)
        for node in ("n0", "n1", "n2"):
            job.deliver(msg.Entered(worker=w(node), generation=generation + 1, applied=1))
    assert job.machine.record.plan is not None
    assert job.machine.record.plan.last
    job.deliver(written("n0", 1, "writing-1", generation=3))
    job.deliver(kept("n0", 1, "step-1", generation=3))
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.Finished(worker=w(node), generation=3, step=1))
    (failed,) = [event for event in job.events if isinstance(event, ev.JobFailed)]
    assert "had kept nothing" in failed.why


RESTARTS = JobSpec(recovery=RecoverySpec(on_node_failure="restart-all"))


def refused_and_restarted(job: Job, nonce: str, *, step: int = 1) -> None:
    """Make all workers with this nonce refuse a step in the newest generation, and restart."""
    generation = job.machine.record.generation
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.VoteRefused(worker=w(node, nonce), generation=generation, step=step, why=WHY))
    stop = job.machine.context.interruption.stop
    assert stop is not None
    for node in ("n0", "n1", "n2"):
        job.deliver(
            msg.Report(
                worker=w(node, nonce),
                term=stop.term,
                generation=generation,
                applied=step - 1,
                step=step,
                phase=msg.Phase.REFUSED,
                refused=generation,
            )
        )


def fresh(job: Job, nonce: str) -> None:
    """Connect all nodes with fresh workers."""
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node, (attach(w(node, nonce)),), session=f"{ord(nonce):08x}"))
    for node in ("n0", "n1", "n2"):
        job.deliver(msg.Entered(worker=w(node, nonce), generation=job.machine.record.generation, applied=0))


def test_a_step_refused_again_after_a_full_restart_ends_the_job() -> None:
    job = Job(spec=RESTARTS).start()
    refused_and_restarted(job, "a")
    assert len(job.emitted(ev.CorruptionFound)) == 1
    assert len(job.sent(msg.Refused)) == 3
    fresh(job, "b")
    assert job.records[-1].refusal == Refusal(step=1, clean_from=2)
    refused_and_restarted(job, "b")
    (failed,) = job.emitted(ev.JobFailed)
    assert "had kept nothing" in failed.why


def test_too_many_full_restarts_for_refused_steps_end_the_job() -> None:
    job = Job(spec=RESTARTS).start()
    for number in range(MAX_RETRIES + 1):
        nonce, step = "abcdefgh"[number], 1 + number % 2
        if number:
            fresh(job, nonce)
        for before in range(1, step):
            for node in ("n0", "n1", "n2"):
                job.deliver(applied(w(node, nonce), job.machine.record.generation, before))
        assert job.machine.over is None
        refused_and_restarted(job, nonce, step=step)
        job.now += 5.0
    (failed,) = job.emitted(ev.JobFailed)
    assert failed.why == f"{WHY}; {MAX_RETRIES + 1} times in 300 s steps were refused"


def test_a_stale_refusal_stops_no_worker() -> None:
    job = refused_job()
    all_enter(job, 2)
    refuses(job, "n0", generation=1)
    assert job.kinds == []
    assert job.machine.context.interruption.stop is None


def report(refused: int, step: int = 5) -> msg.Report:
    phase = msg.Phase.REFUSED if refused else msg.Phase.VOTED
    return msg.Report(worker=w("n0"), term=1, generation=9, applied=step - 1, step=step, phase=phase, refused=refused)


REDO, FORWARD = (Decision(kind=kind, applied=4) for kind in (DecisionKind.REDO, DecisionKind.FORWARD))
BEFORE = Refusal(step=5, clean_from=7)


@pytest.mark.parametrize(
    ("before", "decision", "after"),
    [
        (None, REDO, None),
        (BEFORE, REDO, BEFORE),
        (BEFORE, FORWARD, BEFORE),
        (BEFORE, Decision(kind=DecisionKind.REDO, applied=5), None),
        (BEFORE, Decision(kind=DecisionKind.ROLLBACK, applied=2), BEFORE),
        (BEFORE, Decision(kind=DecisionKind.START, applied=0), BEFORE),
    ],
)
def test_the_refusal_in_force_after_a_decision(
    before: Refusal | None, decision: Decision, after: Refusal | None
) -> None:
    assert refusal_after(before, decision) == after


@pytest.mark.parametrize(
    ("before", "refused", "again", "anew"),
    [
        (None, (0, 0), False, 0),
        (None, (6, 0), False, 5),
        (BEFORE, (6, 6), False, 0),
        (BEFORE, (6, 7), True, 5),
        (BEFORE, (0, 8), True, 5),
        (Refusal(step=4, clean_from=3), (6, 6), False, 5),
    ],
)
def test_repeated_and_new_refusals_are_distinguished(
    before: Refusal | None, refused: tuple[int, ...], again: bool, anew: int
) -> None:
    assert refused_again(before, [report(generation) for generation in refused]) is again
    assert refused_anew(before, [report(generation) for generation in refused]) == anew
