"""Limits how often a node restarts processes: not on a broken machine, and not after too many failures."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.failures.budget import Budget
from holdfast.coordination.failures.classes import FailureClass, FailureClasses
from holdfast.protocol.failures import FailureRule, Severity
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.names import index_of


class Restarts:
    """The second escalation step, on one node: all its local ranks share one budget of restarts."""

    def __init__(self) -> None:
        self._classes = FailureClasses()
        self._most = MAX_RESTARTS
        self._budget = Budget()

    def set_limits(self, most: int, rules: Sequence[FailureRule]) -> None:
        """Set the coordinator's limit of restarts and the site's rules for classes of failures."""
        self._most = most
        self._classes = FailureClasses(rules)

    def refuse_restart(self, down: WorkerDown, now: float, *, free: bool = False) -> str:
        """Return why the node must leave after a process has died: its machine is broken, or its workers have failed
        too often.

        "" if the process may be replaced. The failure is counted unless `free`.

        Args:
            free: Whether the restart does not count, because the process was only warming up.
        """
        if self.is_machine_broken(down):
            return f"{self._class_of(down).status}: {down.detail}"
        return "" if free else self.count_failure(down.worker, down.detail, now)

    def count_failure(self, worker: str, why: str, now: float) -> str:
        """Count a failure of a worker; return why the node must leave if there were too many within the budget's
        window, or "".
        """
        tries = self._budget.count_try(now, index_of(worker))
        if tries > self._most:
            return f"its workers have failed {tries} times in {self._budget.window_s:.0f} s: {why}"
        return ""

    def is_machine_broken(self, down: WorkerDown) -> bool:
        """Return whether the cause of a process's end means that the machine is broken."""
        return self._class_of(down).severity is Severity.NODE

    def _class_of(self, down: WorkerDown) -> FailureClass:
        return self._classes.classify(down.kind, down.detector, down.detail)
