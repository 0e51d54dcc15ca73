"""Tests of events about failures and recoveries: the detector, the lost nodes and the costs."""

from __future__ import annotations

import pytest
from machinery import Job, hello, reduced, w

from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind, FailureRule, Severity
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Phase


def _enter(job: Job, *nodes: str, generation: int, at: int) -> None:
    for node in nodes:
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=at))


def fields_of(failure: ev.FailureDetected) -> tuple[str, str, int, int | None, str | None]:
    return failure.node, failure.detector, failure.severity, failure.step, failure.phase


def test_recovered_has_all_phases_and_the_kept_micro_batches_of_survivors() -> None:
    job = Job().start()
    job.step(1)
    job.now += 1.0
    job.lose("n2")
    (failure,) = job.emitted(ev.FailureDetected)
    assert fields_of(failure) == ("n2", "node_health", 1, None, None)
    assert failure.category == "lost_connection"
    job.now += 0.25
    job.report("n0", 1, Phase.REDUCING, summed=(0, 3))
    job.now += 0.25
    job.report("n1", 1, Phase.REDUCING, summed=(1,))
    job.now += 2.0
    _enter(job, "n0", "n1", generation=2, at=1)
    job.now += 4.0
    job.step(2, "n0", "n1", generation=2)
    (recovered,) = job.emitted(ev.Recovered)
    assert (recovered.action, recovered.state_source) == ("shrink", "none")
    phases = (recovered.detect_s, recovered.decide_s, recovered.regroup_s, recovered.redo_s)
    assert phases == pytest.approx((0.0, 0.5, 2.0, 4.0))
    assert recovered.down_s == pytest.approx(sum(phases))
    assert (recovered.micro_batches_kept, recovered.micro_batches_redone) == (3, None), "n2's share is not known"


def test_a_retry_with_the_same_members_counts_kept_and_redone_micro_batches() -> None:
    job = Job().start()
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n1"), generation=1, detail="reset by peer"))
    for node, summed in (("n0", (0, 3)), ("n1", (1, 4)), ("n2", (0, 5))):
        job.report(node, 1, Phase.REDUCING, summed=summed)
    (failure,) = job.emitted(ev.FailureDetected)
    assert fields_of(failure) == ("n1", "exception", 3, 2, "reducing")
    assert failure.category == "network_error"
    _enter(job, "n0", "n1", "n2", generation=2, at=1)
    job.step(2, generation=2)
    (recovered,) = job.emitted(ev.Recovered)
    assert recovered.action == "retry"
    assert (recovered.micro_batches_kept, recovered.micro_batches_redone) == (4, 2), (
        "n0 keeps the micro-batch that n2 also has"
    )


def test_a_step_finished_from_existing_sums_redoes_no_micro_batch() -> None:
    job = Job().start()
    job.lose("n2")
    passed = msg.PassedStep(step=1, commit=msg.Commit(grad_square=1.0, loss_sum=24.0, samples=24, nonfinite=0))
    job.report("n0", 0, Phase.PASSED, passed=passed, **reduced(1.0), summed=(0, 3))
    job.report("n1", 0, Phase.ABANDONED, **reduced(1.0), summed=(1, 4))
    _enter(job, "n0", "n1", generation=2, at=1)
    job.step(1, "n0", "n1", generation=2)
    (recovered,) = [event for event in job.events if isinstance(event, ev.Recovered)]
    assert (recovered.micro_batches_kept, recovered.micro_batches_redone) == (6, 0)


def test_the_end_of_a_process_is_a_failure_of_the_process_only() -> None:
    job = Job().start()
    job.deliver_from("n1", msg.WorkerDown(worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="killed", exit_code=-9))
    (failure,) = job.emitted(ev.FailureDetected)
    assert fields_of(failure) == ("n1", "process", 2, None, None)
    assert failure.category == "exited_abnormally"


def test_a_process_ended_by_a_hardware_error_is_a_failure_of_the_node() -> None:
    """Its agent finds the same class in the same table, and leaves."""
    job = Job().start()
    detail = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    job.deliver_from("n1", msg.WorkerDown(worker=w("n1"), kind=FailureKind.EXCEPTION, detail=detail, exit_code=1))
    (failure,) = job.emitted(ev.FailureDetected)
    assert fields_of(failure) == ("n1", "exception", 1, None, None)
    assert failure.category == "ecc_error"


def test_a_users_failure_classes_apply_and_are_sent_to_all_agents() -> None:
    rule = FailureRule(pattern="fan", status="fan_failed", severity=Severity.NODE)
    job = Job(rules=(rule,), spec=JobSpec(recovery=RecoverySpec(max_restarts=2))).start()
    job.connect(hello("n3"))
    (welcome,) = job.sent(msg.Welcome)
    assert (welcome.rules, welcome.max_restarts) == ((rule,), 2)
    job.deliver_from("n1", msg.WorkerDown(worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="no fan", exit_code=1))
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.category, failure.severity) == ("fan_failed", 1)


def test_the_member_that_the_others_wait_for_is_reported_with_its_step_and_phase() -> None:
    job = Job().start()
    job.step(1)
    job.deliver(msg.Complaint(worker=w("n0"), generation=1, detail="timed out", timed_out=True))
    job.report("n0", 1, Phase.REDUCING)
    job.report("n1", 1, Phase.COMPUTE)
    job.report("n2", 1, Phase.REDUCING)
    (failure,) = job.emitted(ev.FailureDetected)
    assert fields_of(failure) == ("n1", "timeout", 1, 2, "compute")
