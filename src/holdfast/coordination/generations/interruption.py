"""An interrupted generation: all members are ordered to stop, and their reports are collected."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import msgspec

from holdfast.coordination.failures.detections import no_report
from holdfast.coordination.inputs import Failure
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.recovery_cost import FAILURE
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import node_of

#: At most this many failed transfers of one worker are kept.
_MAX_PEERS = 256


class Interruption:
    """The interruption of a generation, with the reports of its members."""

    def __init__(self, transaction: Transaction, progress: Progress) -> None:
        #: The order to stop, or None if no generation is interrupted.
        self.stop: Stop | None = None
        self.reports: dict[str, Report] = {}
        #: Members with failed collectives, until the cause is known.
        self.complaints: dict[str, Complaint] = {}
        #: Why the step result was refused, or "" if it was not. All members report the same.
        self.refused = ""
        #: The members that may still owe a report are among these.
        self._silent: deque[str] = deque()
        self._since = 0.0
        #: When the generation was interrupted, in Unix seconds. No step passes after that.
        self.begun = 0.0
        #: The reason of the interruption. A failure replaces any other reason.
        self.reason = FAILURE
        self._transaction = transaction
        self._progress = progress

    @property
    def since(self) -> float:
        """The start of the current waiting time, in Unix seconds."""
        return self._since

    def start(self, failed_at: float, *, reason: str = FAILURE) -> None:
        """Interrupt the generation: order the members of the current and the pending plan to stop and report.

        If none is in force, or it is interrupted already, nothing is sent; a failure then replaces the reason of a
        planned change.

        Args:
            failed_at: when the cause began, in Unix seconds.
            reason: why; a failure, or a planned change.
        """
        transaction = self._transaction
        if self.stop is not None or transaction.record.plan is None:
            self.reason = reason if reason == FAILURE else self.reason
            return
        self.reason = reason
        self._progress.start_recovery(failed_at, asked=reason != FAILURE)
        self.stop = Stop(term=transaction.record.term, generation=transaction.record.generation)
        self.reports, self.complaints, self.refused = {}, {}, ""
        self._silent = deque(transaction.planned)
        self._since = self.begun = transaction.now
        transaction.order_all(transaction.planned, self.stop)

    def add_complaint(self, complaint: Complaint) -> None:
        """Record a member's newest complaint. Its earlier failed transfers are kept, at most 256."""
        if (before := self.complaints.get(complaint.worker)) is not None:
            peers = dict.fromkeys((*before.transfer_peers, *complaint.transfer_peers))
            complaint = msgspec.structs.replace(complaint, transfer_peers=tuple(peers)[:_MAX_PEERS])
        self.complaints[complaint.worker] = complaint

    def explains(self, complaint: Complaint) -> bool:
        """Return whether a planned stop explains a failed collective: no failure, no time-out, no unreachable peer.

        The others have left the group, and a member that has not received the order yet still waits in the collective.
        """
        planned = self.stop is not None and self.reason != FAILURE
        return planned and not (complaint.timed_out or complaint.unreachable)

    def collect_reports(self) -> dict[str, Report]:
        """Return all reports, planned members first, in their order."""
        reports = {worker: self.reports[worker] for worker in self._transaction.planned if worker in self.reports}
        return {**reports, **self.reports}

    def end(self) -> None:
        """End the interruption, once all reports were used: forget the order, the reports and the complaints."""
        self.stop, self.reports, self.complaints = None, {}, {}

    def is_answer(self, report: Report) -> bool:
        """Return whether a report answers the current order to stop; any other report is stale."""
        return self.stop is not None and (report.term, report.generation) == (self.stop.term, self.stop.generation)

    def add_report(self, report: Report) -> None:
        """Store a report."""
        self.reports[report.worker] = report

    def forget(self, worker: str) -> None:
        """Drop the reports of a lost worker."""
        self.reports.pop(worker, None)
        self.complaints.pop(worker, None)

    def on_worker_attached(self, worker: str) -> None:
        """Expect a report from a worker that has attached again, if it is planned and the generation is interrupted."""
        if self.stop is not None:
            self._silent.append(worker)

    def awaits(self, away: Set[str]) -> bool:
        """Return whether a report is missing. Members on the disconnected nodes `away` may still report."""
        silent = self._silent
        while silent and not self._owes(silent[0], away):
            # A member that owes no report will not owe one later, unless it attaches again.
            silent.popleft()
        return bool(silent)

    def awaited(self, away: Set[str]) -> list[str]:
        """Return the members with missing reports."""
        return [worker for worker in self._transaction.planned if self._owes(worker, away)]

    def _owes(self, worker: str, away: Set[str]) -> bool:
        """Return whether a planned worker that is connected, or on a disconnected node in `away`, has not reported."""
        transaction = self._transaction
        if worker in self.reports or worker not in transaction.planned:
            return False
        return transaction.members.worker(worker) is not None or node_of(worker) in away

    def silent(self, away: Set[str], timeout_s: float) -> list[Failure]:
        """Return a failure for each connected node without a report after the timeout; [] before it, or without an
        interruption.

        Args:
            away: the disconnected nodes that are expected back; they are not in the result.
        """
        if self.stop is None or self._transaction.now - self._since <= timeout_s:
            return []
        names = dict.fromkeys(map(node_of, self.awaited(away)))
        return [no_report(name, self._since) for name in names if name in self._transaction.members.nodes]

    def restart_timeout(self) -> None:
        """Restart the waiting time for reports: this process was paused, or a node still sends its news."""
        self._since = self._transaction.now
