"""Rank hold, `--on-process-failure hold`: the ranks of lost processes wait for their replacements."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.roles import unit_of
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.names import node_and_index_of, node_of

#: The wait is this many times the longest start of a process in this job.
_TIMES = 3.0
#: The shortest wait in seconds: a fork may have to wait for a core.
_LEAST_S = 1.0
#: The longest wait in seconds: a slower start is not worth waiting for.
_MOST_S = 30.0


class RankHold:
    """The ranks that wait for replacements; empty under other policies."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction = transaction
        self._holds = config.spec.recovery.holds_ranks
        #: Until when each rank waits, and since when, by node and index.
        self._seats: dict[str, tuple[float, float]] = {}
        self._longest_s = 0.0

    def hold_ranks(self, workers: Iterable[str]) -> None:
        """Hold the ranks of lost processes and of their replica groups: for 3 times the longest start, within 1 to 30
        seconds.

        Ignored under other policies, for workers without a rank, and in the last generation.
        """
        plan, now = self._transaction.record.plan, self._transaction.now
        if not self._holds or plan is None or plan.last:
            return
        wait_s = min(max(_TIMES * self._longest_s, _LEAST_S), _MOST_S)
        lost = {unit_of(worker, plan.places) for worker in workers if plan.rank(worker) is not None}
        for worker in plan.workers if lost else ():
            if unit_of(worker, plan.places) in lost:
                self._seats[node_and_index_of(worker)] = now + wait_s, now

    def on_process_attached(self, worker: str, since: float) -> None:
        """Release the rank that a new process attached to, and learn how long the start of a process takes.

        Args:
            since: when its node connected: its start began then, if no rank waited.
        """
        _, since = self._seats.pop(node_and_index_of(worker), (0.0, since))
        self._longest_s = max(self._longest_s, self._transaction.now - since)

    def stop_waiting(self) -> None:
        """Stop waiting: the decision was made without the missing processes."""
        self._seats.clear()

    @property
    def waits(self) -> bool:
        """Whether a replacement may still attach in time. Disconnected nodes do not count."""
        nodes, now = self._transaction.members.nodes, self._transaction.now
        return any(until > now and node_of(seat) in nodes for seat, (until, _) in self._seats.items())
