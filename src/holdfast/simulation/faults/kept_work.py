"""What survivors have must be used: no step is done again that one of them has reduced, nor any of their micro-batches.

Not with experts, whose gradients lie on other ranks as well; where all workers are started again at every change; or
where somebody's sums are wrong.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol.messages.orders import Begin
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision, DecisionKind, Phase
from holdfast.simulation.faults.plans import FaultKind, FaultPlan, Raises

#: all reductions of the step in progress have returned
_READY = (Phase.READY, Phase.ABANDONED, Phase.PASSED)


class KeptWork:
    """The newest report of each worker, and what became of it."""

    def __init__(self, plan: FaultPlan) -> None:
        kinds = {fault.kind for fault in plan.faults}
        self._counts = not (plan.experts or plan.restart or FaultKind.CORRUPT_SUM in kinds)
        self._raises = FaultKind.RAISE in kinds or plan.raises is not Raises.NOTHING
        self._reports: dict[str, Report] = {}
        #: what was reported before the Begin that a worker has obeyed last
        self._before: dict[str, tuple[Report, Decision]] = {}

    def reported(self, report: Report, *, whole: bool) -> str:
        """A worker answers a Stop; say what it has lost since it answered the one before, "" for nothing.

        Args:
            whole: its state is.
        """
        if report.applied is not None and not whole:
            return f"{report.worker} reports a state that is not whole: {report}"
        self._reports[report.worker] = report
        before, decision = self._before.get(report.worker, (None, None))
        if not self._counts or before is None or decision is None or before.applied is None:
            return ""
        if report.applied is None and decision.kind is not DecisionKind.ROLLBACK:
            return f"{report.worker} had the state of step {before.applied}, and has none since {decision}"
        same = report.applied == before.applied and report.reduced is None and not self._raises
        lost = set(before.summed) - set(report.summed) if same else set[int]()
        return f"{report.worker} had micro-batches {sorted(lost)} of step {before.step}" if lost else ""

    def began(self, worker: str, order: Begin) -> None:
        """A worker obeys a Begin."""
        self._before.pop(worker, None)
        report = self._reports.pop(worker, None)
        if report is not None:
            self._before[worker] = report, order.decision

    def left(self, worker: str) -> None:
        """A worker has no part in the job any more: what it has is of no use."""
        self._before.pop(worker, None)
        self._reports.pop(worker, None)

    def undone_by(self, decision: Decision, members: Collection[str]) -> str:
        """Say which member's work a decision throws away, "" for none."""
        for worker in members if self._counts else ():
            report = self._reports.get(worker)
            if report is None or report.applied is None:
                continue
            if decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
                return f"{decision} although {worker} has the state of step {report.applied}"
            if report.phase in _READY and decision.applied < report.step:
                return f"{decision} although {worker} is READY with step {report.step}"
        return ""

    def redone_by(self, worker: str, step: int, summed: Collection[int]) -> str:
        """Say which of a worker's micro-batches it computes again, at the beginning of an attempt.

        Args:
            summed: those whose gradients it goes on from.
        """
        report, decision = self._before.get(worker, (None, None))
        if not self._counts or report is None or decision is None:
            return ""
        same = (step, decision.applied) == (report.step, report.applied)
        again = set(report.summed) - set(summed) if same else set[int]()
        return f"{worker} computes {sorted(again)} of step {report.step} again after {decision}" if again else ""
