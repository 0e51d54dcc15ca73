"""Check that the job uses all work of the survivors: no reduced step and no micro-batch is computed again.

The check does not apply to models with experts, because their gradients also lie on other ranks. It does not apply if
every change restarts all workers, or if one worker's sums are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.coordination.roles import unit_of
from holdfast.protocol.messages.orders import Begin
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import index_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Phase
from tests.simulation.faults.plans import FaultKind, FaultPlan, Raises

#: the phases in which all reductions of the current step have returned
_READY = (Phase.READY, Phase.ABANDONED, Phase.PASSED)


class KeptWork:
    """Follows the newest report of each worker, and checks that the reported work is used."""

    def __init__(self, plan: FaultPlan) -> None:
        kinds = {fault.kind for fault in plan.faults}
        self._counts = not (plan.experts or plan.restart or FaultKind.CORRUPT_SUM in kinds)
        self._raises = FaultKind.RAISE in kinds or plan.raises is not Raises.NOTHING
        self._reports: dict[str, Report] = {}
        #: the newest report of each worker, kept after later Begin orders
        self._words: dict[str, Report] = {}
        #: the report before the last Begin that a worker obeyed, and the decision of that Begin
        self._before: dict[str, tuple[Report, Decision]] = {}

    def reported(self, report: Report, *, whole: bool) -> str:
        """Record a worker's answer to a Stop. Return an error if it has lost work since its previous answer, else "".

        Args:
            whole: Whether its state is complete.
        """
        if report.applied is not None and not whole:
            return f"{report.worker} reports an incomplete state: {report}"
        self._reports[report.worker] = self._words[report.worker] = report
        before, decision = self._before.get(report.worker, (None, None))
        if not self._counts or before is None or decision is None or before.applied is None:
            return ""
        gone_back = (DecisionKind.START, DecisionKind.ROLLBACK)
        if report.applied is None and decision.kind not in gone_back:
            return f"{report.worker} had the state of step {before.applied}, and has none since {decision}"
        same = report.applied == before.applied and report.reduced is None and not self._raises
        lost = set(before.summed) - set(report.summed) if same else set[int]()
        return f"{report.worker} had micro-batches {sorted(lost)} of step {before.step}" if lost else ""

    def began(self, worker: str, order: Begin) -> None:
        """Record that a worker obeys a Begin."""
        self._before.pop(worker, None)
        report = self._reports.pop(worker, None)
        if report is not None:
            summed = self._agreed(report, order.plan)
            self._before[worker] = msgspec.structs.replace(report, summed=summed), order.decision

    def _agreed(self, report: Report, plan: GenerationPlan) -> tuple[int, ...]:
        """Return the reported micro-batches that all workers of the replica group report.

        A worker also reports micro-batches that it proposed without success. Return () if the reports do not match, or
        if only some of the workers have the decided state.
        """
        rank = plan.rank(report.worker)
        places = plan.places
        if places == 1 or rank is None:
            return report.summed
        first = plan.unit_of(rank) * places
        words = [self._words.get(mate) for mate in plan.workers[first : first + places]]
        same = [word for word in words if word is not None and _stood(word) == _stood(report)]
        sent = {mate in plan.sources for mate in plan.workers[first : first + places]}
        if len(same) < places or len(sent) > 1:
            return ()
        return tuple(one for one in report.summed if all(one in word.summed for word in same))

    def left(self, worker: str) -> None:
        """Forget a worker that has left the job: its work is not needed."""
        self._before.pop(worker, None)
        self._reports.pop(worker, None)

    def undone_by(self, decision: Decision, members: Collection[str], places: int) -> str:
        """Return an error if a decision throws away the work of a member, else ""."""
        if places > 1:
            return self._undone_by_role(decision, members, places) if self._counts else ""
        for worker in members if self._counts else ():
            report = self._reports.get(worker)
            if report is None or report.applied is None:
                continue
            if decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
                return f"{decision} although {worker} has the state of step {report.applied}"
            if report.phase in _READY and decision.applied < report.step:
                return f"{decision} although {worker} is READY with step {report.step}"
        return ""

    def _undone_by_role(self, decision: Decision, members: Collection[str], places: int) -> str:
        """Do the same for replicas that span several workers, each with its role.

        A step counts if workers of every role have applied it, or if all workers of one replica group can apply it. If
        only some workers of a replica group are READY, their work may be thrown away.
        """
        stand: list[set[int]] = [set() for _ in range(places)]
        units: dict[tuple[str, int], list[set[int]]] = {}
        for report in filter(None, map(self._reports.get, members)):
            if report.applied is not None:
                stand[index_of(report.worker) % places].add(report.applied)
                ready = {report.step} if report.phase in _READY else set[int]()
                units.setdefault(unit_of(report.worker, places), []).append({report.applied} | ready)
        common = _in_all(stand)
        for can in units.values():
            common |= _in_all(can) if len(can) == places else set()
        newest = max(common, default=-1)
        gone_back = decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK)
        if newest >= 0 and (gone_back or decision.applied < newest):
            return f"{decision} although workers of every role can reach step {newest}"
        return ""

    def redone_by(self, worker: str, step: int, summed: Collection[int]) -> str:
        """Return an error if a worker computes micro-batches again at the start of an attempt, else "".

        Args:
            summed: The micro-batches with gradients that it continues from.
        """
        report, decision = self._before.get(worker, (None, None))
        if not self._counts or report is None or decision is None:
            return ""
        same = (step, decision.applied) == (report.step, report.applied)
        again = set(report.summed) - set(summed) if same else set[int]()
        return f"{worker} computes {sorted(again)} of step {report.step} again after {decision}" if again else ""


def _stood(report: Report) -> tuple[int, int, int | None]:
    """Return the Stop that a report answers, and the state that it reports."""
    return report.term, report.generation, report.applied


def _in_all(sets: Sequence[set[int]]) -> set[int]:
    """Return the elements that all sets have in common. There must be at least one set."""
    return {one for one in sets[0] if all(one in other for other in sets)}
