"""Constructs failures: one function for each way to detect one, with the evidence and the severity."""

from __future__ import annotations

from dataclasses import replace

from holdfast.coordination.inputs import Evidence, Failure
from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.progress import ThreadActivity
from holdfast.protocol.messages.worker import Complaint, Raised, Report, ScriptError
from holdfast.protocol.names import node_of


def node_lost(node: str, kind: FailureKind, since: float) -> Failure:
    """Return the failure of a node that was last heard from at `since`: its connection or its lease has ended."""
    return _node_failure(node, kind, since, Evidence(detector=Detector.NODE_HEALTH))


def no_report(node: str, since: float) -> Failure:
    """Return the failure of a node with a worker that does not answer to Stop, although its agent lives.

    Args:
        since: the last sign of life, in Unix seconds.
    """
    return _node_failure(
        node, FailureKind.HANG, since, Evidence(detector=Detector.TIMEOUT, detail="no report after Stop")
    )


def node_hung(last: Report, why: str, now: float) -> Failure:
    """Return the failure of a node for which the others have waited in vain; `last` is its worker's report."""
    evidence = Evidence(detector=Detector.TIMEOUT, detail=why, step=last.step, phase=last.phase)
    return _node_failure(node_of(last.worker), FailureKind.HANG, now, evidence)


def invalid_message(node: str, why: str, now: float) -> Failure:
    """Return the failure of a node that has sent an impossible message."""
    return _node_failure(node, FailureKind.EXCEPTION, now, Evidence(detector=Detector.EXCEPTION, detail=why))


def replica_differs(node: str, why: str, now: float) -> Failure:
    """Return the failure of a node with a worker that has other settings or state than most others."""
    evidence = Evidence(detector=Detector.STATISTICS, detail=f"replica differs: {why}")
    return _node_failure(node, FailureKind.EXCEPTION, now, evidence)


def process_ended(node: str, down: WorkerDown, now: float) -> Failure:
    """Return the failure of a worker with a process that has ended, with the evidence of its script's exception, if
    any.
    """
    evidence = _script_evidence(down.error) if down.error is not None else Evidence(detector=down.detector)
    return _process_failure(node, down.worker, down.kind, now, replace(evidence, detail=down.detail))


def script_raised(node: str, raised: Raised, now: float) -> Failure:
    """Return the failure of a worker with a script that has raised; its process keeps the state."""
    evidence = replace(_script_evidence(raised.error), detail=raised.detail)
    return _process_failure(node, raised.worker, FailureKind.EXCEPTION, now, evidence)


def worker_hung(node: str, stand: ThreadActivity, why: str, now: float) -> Failure:
    """Return the failure of a worker that was ended because its activity took too long.

    Args:
        stand: the activity of its training thread, which dates the failure.
        why: the reason, in words.
    """
    evidence = Evidence(
        detector=Detector.STATISTICS,
        detail=why,
        step=stand.step,
        phase=str(stand.activity),
        micro_batch=stand.micro_batch,
    )
    return _process_failure(node, stand.worker, FailureKind.HANG, now - stand.for_s, evidence)


def worker_missing(node: str, worker: str, now: float) -> Failure:
    """Return the failure of a worker that is missing after its node has reconnected."""
    detail = "it ended while there was no connection to its node"
    evidence = Evidence(detector=Detector.PROCESS, detail=detail)
    return _process_failure(node, worker, FailureKind.PROCESS_EXIT, now, evidence)


def collective_failed(complaint: Complaint, report: Report, node: str, now: float) -> Failure:
    """Return a failure of severity RETRY on `node`, for collectives or transfers that failed without evidence of a
    cause.

    Args:
        complaint: the complaint of a member
        report: its report
        node: the node that this try counts against
        now: unix seconds
    """
    detector = Detector.TIMEOUT if complaint.timed_out else Detector.EXCEPTION
    evidence = Evidence(detector=detector, detail=complaint.detail, step=report.step, phase=report.phase)
    kind = FailureKind.CONNECTION_LOST
    return Failure(kind=kind, node=node, severity=Severity.RETRY, since=now, evidence=evidence)


def _script_evidence(error: ScriptError) -> Evidence:
    """Return the evidence of an exception."""
    return Evidence(detector=Detector.EXCEPTION, step=error.step, phase=error.phase, micro_batch=error.micro_batch)


def _node_failure(node: str, kind: FailureKind, since: float, evidence: Evidence) -> Failure:
    """Return a failure that removes a node."""
    return Failure(kind=kind, node=node, severity=Severity.NODE, since=since, evidence=evidence)


def _process_failure(node: str, worker: str, kind: FailureKind, since: float, evidence: Evidence) -> Failure:
    """Return a failure that replaces a process."""
    severity = Severity.PROCESS
    return Failure(kind=kind, node=node, worker=worker, severity=severity, since=since, evidence=evidence)
