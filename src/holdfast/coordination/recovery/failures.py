"""The single entry point for failures: emit the event, remove the lost workers, interrupt their generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.failures.class_table import MACHINE_CLASSES, REPLICA_DIFFERS
from holdfast.coordination.failures.classes import FailureClasses
from holdfast.coordination.failures.detections import collective_failed
from holdfast.coordination.failures.escalation import EscalationPolicy
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.generations.swap import PendingGeneration
from holdfast.coordination.inputs import Failure
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_FAILED
from holdfast.protocol.events import FailureDetected, NodeLeft
from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import EndNode, Refused
from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import index_of, node_of


class Failures:
    """Handles failures, and keeps the cause of the ones since the last committed step."""

    def __init__(
        self,
        transaction: Transaction,
        progress: Progress,
        stopping: Interruption,
        joining: PendingGeneration,
        absences: DisconnectedNodes,
        classes: FailureClasses,
        ladder: EscalationPolicy,
        aside: Sequence[Callable[[Failure], bool]],
    ) -> None:
        """`aside`: handlers of failures outside the world; each returns whether the failure was its own."""
        self._classes = classes
        self._escalation = ladder
        self._cause, self._raised = "", False
        self._transaction = transaction
        self._ledger, self._costs = progress.ledger, progress.costs
        self._interruption = stopping
        self._pending_generation = joining
        self._disconnected = absences
        self._aside = aside

    def handle(self, *failures: Failure) -> None:
        """Handle failures that were detected together: emit them, remove the lost nodes and workers, interrupt their
        generation.

        Together, so that no failed worker is part of the next decision. A lost process takes the others of its replica
        group with it: that counts as one failure, even if several are reported. Failures of standbys and draining nodes
        go to their own handlers.
        """
        mates = {one.worker: self._transaction.drop_group_of(one.worker) for one in failures if one.worker}
        failures = tuple(failure for failure in failures if not any(take(failure) for take in self._aside))
        if not failures:
            return
        lost: dict[str, None] = {}
        for failure in failures:
            if not failure.worker:
                lost |= dict.fromkeys(self._expel(self._classify(failure)))
            elif failure.worker not in lost:
                self._emit_failure(self._classify(failure), mates[failure.worker])
                lost |= dict.fromkeys((failure.worker, *mates[failure.worker]))
        self.remove_workers(lost, min(failure.since for failure in failures))

    def report_needed_worker(self, failure: Failure) -> None:
        """Report a failed process that still has needed state, and interrupt its generation. Nothing is removed."""
        self._emit_failure(self._classify(failure))
        self._interruption.start(failure.since)

    def remove_workers(self, workers: Collection[str], since: float) -> None:
        """Forget the reports of workers that failed or left, and interrupt or cancel the generation that they are in.

        Members of the plan in force interrupt it. Those of the pending one cancel it; if it is armed, first try to
        disarm it.

        Args:
            since: the last sign of life, in Unix seconds.
        """
        record = self._transaction.record
        for worker in workers:
            self._ledger.forget(worker)
            self._interruption.forget(worker)
        if record.plan is not None and any(record.plan.rank(worker) is not None for worker in workers):
            self._interruption.start(since)
        elif record.pending is not None and any(record.pending.rank(worker) is not None for worker in workers):
            stops = self._interruption.stop is not None or not self._pending_generation.armed
            if stops or not self._pending_generation.disarm(since):
                self.undo_pending(since)

    def undo_pending(self, since: float, suspects: Collection[str] | None = None) -> None:
        """Cancel the pending generation, if there is one. If it is armed, some members may have swapped: interrupt the
        current one.

        Ignored while a generation is interrupted.

        Args:
            suspects: the workers that cannot join now, if known.
        """
        if self._transaction.record.pending is None or self._interruption.stop is not None:
            return
        if self._pending_generation.armed:
            self._interruption.start(since)
        else:
            self._pending_generation.cancel(suspects)

    def retry_collective(self, complaint: Complaint, report: Report, node: str) -> bool:
        """Emit a failed collective of unknown cause, for another try with the same members; return False after too many
        tries.

        Args:
            report: the report of the worker that complained.
            node: the node to which the try is charged.
        """
        tries = self._emit_failure(self._classify(collective_failed(complaint, report, node, self._transaction.now)))
        return not self._escalation.is_exhausted(Severity.RETRY, tries)

    def find_self_accused(self, complaints: Iterable[Complaint]) -> dict[str, str]:
        """Return the nodes with complaints about a fault of their own process or machine, and its details."""
        kind, detector = FailureKind.CONNECTION_LOST, Detector.EXCEPTION
        own = (
            one for one in complaints if self._classes.classify(kind, detector, one.detail).severity < Severity.RETRY
        )
        return {node_of(complaint.worker): complaint.detail for complaint in own}

    def _classify(self, failure: Failure) -> Failure:
        """Return the failure with its class. The failure of a process also gets the class's severity, if that is more
        severe; that of a node keeps its own.
        """
        evidence = failure.evidence
        found = self._classes.classify(failure.kind, evidence.detector, evidence.detail)
        # Only for a process: for its machine, the agent finds the same and leaves.
        severity = min(failure.severity, found.severity) if failure.worker else failure.severity
        return replace(failure, severity=severity, evidence=replace(evidence, category=found.status))

    def _emit_failure(self, failure: Failure, mates: Sequence[str] = ()) -> int:
        """Count and emit a failure; return how often its escalation step was tried within the window.

        The first failure since the last committed step is kept as the cause, or the first exception, which causes
        others. A failure of the machine raises the node's failure rate.

        Args:
            mates: the workers that are lost together with it.
        """
        transaction, evidence, tries = self._transaction, failure.evidence, self._escalation.count_failure(failure)
        if failure.severity is Severity.NODE or evidence.category in MACHINE_CLASSES:
            transaction.members.count_failure(failure.node)
        transaction.emit(
            FailureDetected,
            node=failure.node,
            kind=failure.kind,
            detector=evidence.detector,
            severity=failure.severity,
            after_s=max(0.0, transaction.now - failure.since),
            category=evidence.category,
            step=evidence.step,
            phase=evidence.phase,
            micro_batch=evidence.micro_batch,
            detail=evidence.detail + _describe_mates(mates),
            tries=tries,
        )
        # An exception in user code causes the losses around it, and is not caused by them.
        raised = failure.kind is FailureKind.EXCEPTION
        if not self._cause or (raised and not self._raised):
            place = transaction.place_of(failure.worker) if failure.worker else f"node {failure.node}"
            self._cause, self._raised = f"{place}: {evidence.detail or failure.kind}", raised
        return tries

    def forget_cause(self) -> None:
        """Forget the cause, because a step was committed since; quarantine nodes that were given up before it."""
        self._cause, self._raised = "", False
        self._escalation.quarantine_given_up()

    def explain(self, consequence: str) -> str:
        """Return why the job ends: the first cause since the last committed step, if any, then its consequence."""
        return f"{self._cause}; then {consequence}" if self._cause else consequence

    def _is_the_machines(self, failure: Failure) -> bool:
        """Return whether any other process would also fail on that machine, by the failure's class.

        False for a lost connection or lease.
        """
        evidence = failure.evidence
        found = self._classes.classify(failure.kind, evidence.detector, evidence.detail)
        return found.severity is Severity.NODE and evidence.detector is not Detector.NODE_HEALTH

    def _expel(self, failure: Failure) -> list[str]:
        """Emit a node's failure and remove the node; return its lost workers.

        If the machine is at fault or has failed too often, the node is quarantined and told to end. If its worker hangs
        or differs, its agent is told to replace the workers and reconnect. Otherwise only its connection is closed.
        """
        transaction, tries = self._transaction, self._emit_failure(failure)
        self._disconnected.stop_expecting(failure.node)
        self._costs.record_loss(transaction.now)
        node, why = transaction.members.nodes.get(failure.node), failure.evidence.detail
        beyond = node is not None and (
            self._is_the_machines(failure) or self._escalation.is_exhausted(Severity.NODE, tries)
        )
        if node is not None and beyond:
            often = f"it has failed {tries} times in {WINDOW_S:.0f} s, most recently: "
            why = f"{'' if self._is_the_machines(failure) else often}{why or failure.kind}"
            transaction.send(node.connection, EndNode(exit_code=EXIT_FAILED, why=why, alone=True))
        elif node is not None and (failure.kind is FailureKind.HANG or failure.evidence.category == REPLICA_DIFFERS):
            # The agent is alive. It replaces the processes and reconnects.
            transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
        if node is not None and failure.kind is not FailureKind.CONNECTION_LOST:
            transaction.close(node.connection)
        workers = transaction.members.remove(node.name) if node is not None else transaction.planned_on(failure.node)
        if node is not None and beyond:
            self._escalation.quarantine(node.name, node.host, why)
        else:
            self._escalation.on_node_lost(failure.node)
        transaction.emit(
            NodeLeft, node=failure.node, reason="quarantined" if beyond else "failed", detail=why if beyond else ""
        )
        return list(workers)


def _describe_mates(mates: Sequence[str]) -> str:
    """Return which workers are replaced with a lost one, as the end of a sentence; "" without any."""
    if not mates:
        return ""
    names = sorted({index_of(mate) for mate in mates})
    one = len(names) == 1
    workers = f"worker{'' if one else 's'} {', '.join(map(str, names))} of its replica group {'is' if one else 'are'}"
    return f"; {workers} replaced with it"
