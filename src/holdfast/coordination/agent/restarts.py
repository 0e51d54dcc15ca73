"""When a node's processes are not started again: the machine is broken, or they have died there too often."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.failures.budget import Budget
from holdfast.coordination.failures.classes import FailureClass, FailureClasses
from holdfast.protocol.failures import FailureRule, Severity
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.names import index_of


class Restarts:
    """The second rung of the ladder, on one node: all its places have one budget."""

    def __init__(self) -> None:
        self._classes = FailureClasses()
        self._most = MAX_RESTARTS
        self._budget = Budget()

    def allowed(self, most: int, rules: Sequence[FailureRule]) -> None:
        """Take over what the coordinator says: how many restarts there may be, and the site's classes of failures."""
        self._most, self._classes = most, FailureClasses(rules)

    def refuse(self, down: WorkerDown, now: float, *, free: bool = False) -> str:
        """A process has died: return why the node must go, "" where another takes its place.

        Args:
            free: it has only warmed up, and failed nobody by that: it uses up no try.
        """
        if self.broken(down):
            return f"{self._class_of(down).status}: {down.detail}"
        return "" if free else self.count(down.worker, down.detail, now)

    def count(self, worker: str, why: str, now: float) -> str:
        """Count a failure of a worker; return why the node must go, or "" if it may start another process."""
        tries = self._budget.count_try(now, index_of(worker))
        if tries > self._most:
            return f"its workers fail again and again, {tries} times in {self._budget.window_s:.0f} s: {why}"
        return ""

    def broken(self, down: WorkerDown) -> bool:
        """Tell whether the machine is, by what a process has died of."""
        return self._class_of(down).severity is Severity.NODE

    def _class_of(self, down: WorkerDown) -> FailureClass:
        return self._classes.classify(down.kind, down.detector, down.detail)
