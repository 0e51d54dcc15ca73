"""A broken epoch: everybody was told to stop, and reports are gathered until all members have spoken or are gone."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.membership import Membership
from holdfast.coordination.turn import Turn
from holdfast.protocol.names import node_of
from holdfast.protocol.orders import Stop
from holdfast.protocol.worker import Report


class Stopping:
    """The reports of one Stop. `stop` is None while no epoch is broken."""

    def __init__(self, turn: Turn) -> None:
        self.stop: Stop | None = None
        self.reports: dict[str, Report] = {}
        #: a collective that failed at a node, until it is known whose fault it was
        self.complaint: tuple[str, str] | None = None
        self._since = 0.0
        self._turn = turn

    def begin(self) -> None:
        """Tell the members of the current and the pending plan to stop."""
        turn = self._turn
        self.stop = Stop(term=turn.record.term, epoch=turn.record.epoch)
        self.reports = {}
        self._since = turn.now
        for worker in self._turn.planned:
            turn.order(worker, self.stop)

    def end(self) -> dict[str, Report]:
        """All have spoken: return their reports, current members first, by rank."""
        reports = {worker: self.reports[worker] for worker in self._turn.planned if worker in self.reports}
        reports.update(self.reports)
        self.stop, self.complaint = None, None
        return reports

    def report(self, report: Report) -> None:
        """Take in a report; one for another Stop is stale."""
        if self.stop is not None and (report.term, report.epoch) == (self.stop.term, self.stop.epoch):
            self.reports[report.worker] = report

    def awaited(self, members: Membership, absent: Iterable[str]) -> list[str]:
        """Return the members that owe a report; those of absent nodes may still come back with one."""
        away = set(absent)
        expected = (w for w in self._turn.planned if members.worker(w) is not None or node_of(w) in away)
        return [worker for worker in expected if worker not in self.reports]

    def waited(self) -> float:
        """Return for how long reports have been awaited, in seconds."""
        return self._turn.now - self._since if self.stop is not None else 0.0

    def renew(self) -> None:
        """Give everybody the full time again: the coordinator itself was away."""
        self._since = self._turn.now
