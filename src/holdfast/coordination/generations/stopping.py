"""A broken generation: everybody was told to stop; reports are gathered until all members have spoken or are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import msgspec

from holdfast.coordination.failures.seen import no_report
from holdfast.coordination.inputs import Failure
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.recovery_cost import FAILURE
from holdfast.coordination.turn import Transaction
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import node_of

#: of one worker's failed transfers, this many count
_MAX_PEERS = 256


class Stopping:
    """The reports of one Stop. `stop` is None while no generation is broken."""

    def __init__(self, transaction: Transaction, progress: Progress) -> None:
        self.stop: Stop | None = None
        self.reports: dict[str, Report] = {}
        #: the members whose collectives failed, until it is known whose fault it was
        self.complaints: dict[str, Complaint] = {}
        #: why v was refused, where it was; all say the same
        self.refused = ""
        #: those of the members who may not have spoken yet are among these
        self._silent: deque[str] = deque()
        self._since = 0.0
        #: when the generation was broken, unix seconds: nothing passes after that
        self.begun = 0.0
        #: why; a failure, where there was one as well
        self.reason = FAILURE
        self._transaction = transaction
        self._progress = progress

    @property
    def since(self) -> float:
        """When everybody was told to stop, or was given the full time anew; unix seconds."""
        return self._since

    def begin(self, failed_at: float, *, reason: str = FAILURE) -> None:
        """A generation is broken: tell the members of the current and the pending plan to stop."""
        transaction = self._transaction
        if self.stop is not None or transaction.record.plan is None:
            self.reason = reason if reason == FAILURE else self.reason
            return
        self.reason = reason
        self._progress.failed(failed_at, asked=reason != FAILURE)
        self.stop = Stop(term=transaction.record.term, generation=transaction.record.generation)
        self.reports, self.complaints, self.refused = {}, {}, ""
        self._silent = deque(transaction.planned)
        self._since = self.begun = transaction.now
        transaction.order_all(transaction.planned, self.stop)

    def complain(self, complaint: Complaint) -> None:
        """Record that something of a member failed; failed transfers stay known if it complains again."""
        if (before := self.complaints.get(complaint.worker)) is not None:
            peers = dict.fromkeys((*before.transfer_peers, *complaint.transfer_peers))
            complaint = msgspec.structs.replace(complaint, transfer_peers=tuple(peers)[:_MAX_PEERS])
        self.complaints[complaint.worker] = complaint

    def explains(self, complaint: Complaint) -> bool:
        """Tell whether a collective failed since others were told to stop, for no failure, and let go of their group.

        Whoever has not heard of the Stop yet still waits in that.
        """
        planned = self.stop is not None and self.reason != FAILURE
        return planned and not (complaint.timed_out or complaint.unreachable)

    def gathered(self) -> dict[str, Report]:
        """Return the reports of all who have spoken, current members first, by rank."""
        reports = {worker: self.reports[worker] for worker in self._transaction.planned if worker in self.reports}
        return {**reports, **self.reports}

    def end(self) -> None:
        """All have spoken, and their reports were read."""
        self.stop, self.reports, self.complaints = None, {}, {}

    def asked(self, report: Report) -> bool:
        """Tell whether a report answers the Stop in force; one for another is stale."""
        return self.stop is not None and (report.term, report.generation) == (self.stop.term, self.stop.generation)

    def report(self, report: Report) -> None:
        """Take in a report that was asked for."""
        self.reports[report.worker] = report

    def forget(self, worker: str) -> None:
        """A worker is gone: what it has said does not count."""
        self.reports.pop(worker, None)
        self.complaints.pop(worker, None)

    def came(self, worker: str) -> None:
        """A worker is here (again)."""
        if self.stop is not None:
            self._silent.append(worker)

    def awaits(self, away: Set[str]) -> bool:
        """Tell whether a member owes a report; those of nodes that are `away` may still come back with one."""
        silent = self._silent
        while silent and not self._owes(silent[0], away):
            silent.popleft()  # (who owes none will owe none, unless it comes again)
        return bool(silent)

    def awaited(self, away: Set[str]) -> list[str]:
        """Return the members that owe a report."""
        return [worker for worker in self._transaction.planned if self._owes(worker, away)]

    def _owes(self, worker: str, away: Set[str]) -> bool:
        transaction = self._transaction
        if worker in self.reports or worker not in transaction.planned:
            return False
        return transaction.members.worker(worker) is not None or node_of(worker) in away

    def silent(self, away: Set[str], timeout_s: float) -> list[Failure]:
        """Return the nodes whose agents live and that have not answered in time, as failures."""
        if self.stop is None or self._transaction.now - self._since <= timeout_s:
            return []
        names = dict.fromkeys(map(node_of, self.awaited(away)))
        return [no_report(name, self._since) for name in names if name in self._transaction.members.nodes]

    def wait_anew(self) -> None:
        """Give everybody the full time again: the coordinator itself was away."""
        self._since = self._transaction.now
