"""`--on-process-failure hold`: ranks whose processes are gone are kept for those that follow, for a while."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.roles import unit_of
from holdfast.coordination.turn import Transaction
from holdfast.protocol.names import node_and_index_of, node_of

#: of the longest that a process of this job has taken to come up, so many times; and at least, and at most (seconds):
#: a fork may have to wait for a core, and what takes longer than loading a large model is not waited for
_TIMES, _LEAST_S, _MOST_S = 3.0, 1.0, 30.0


class KeptRanks:
    """The seats that are waited for; none where the policy is another."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction = transaction
        self._holds = config.spec.recovery.holds_ranks
        #: until when each is waited for, and since when, by seat
        self._seats: dict[str, tuple[float, float]] = {}
        self._longest_s = 0.0

    def lost(self, workers: Iterable[str]) -> None:
        """Processes of these workers are gone; others follow in their places."""
        plan, now = self._transaction.record.plan, self._transaction.now
        if not self._holds or plan is None or plan.last:
            return
        wait_s = min(max(_TIMES * self._longest_s, _LEAST_S), _MOST_S)
        lost = {unit_of(worker, plan.places) for worker in workers if plan.rank(worker) is not None}
        for worker in plan.workers if lost else ():
            if unit_of(worker, plan.places) in lost:
                self._seats[node_and_index_of(worker)] = now + wait_s, now

    def came(self, worker: str, since: float) -> None:
        """A process is up; `since`: its node said Hello, if that is when it was begun."""
        _, since = self._seats.pop(node_and_index_of(worker), (0.0, since))
        self._longest_s = max(self._longest_s, self._transaction.now - since)

    def over(self) -> None:
        """Nobody is waited for any more: it is decided without them."""
        self._seats.clear()

    @property
    def waits(self) -> bool:
        """True while somebody may still come in time; a node that is gone brings nobody."""
        nodes, now = self._transaction.members.nodes, self._transaction.now
        return any(until > now and node_of(seat) in nodes for seat, (until, _) in self._seats.items())
