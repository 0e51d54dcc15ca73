"""Whose word counts for a job, as its record says it: the members of its plans, and those that are owed."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.protocol.names import node_of
from holdfast.protocol.record import Record
from holdfast.simulation.world import World


class WhoCounts:
    """Follows the records as they are written."""

    def __init__(self) -> None:
        #: the workers that count
        self.workers: frozenset[str] = frozenset()
        #: those that did, and must not any more; who waits as a standby has left in good order
        self.expelled: set[str] = set()
        #: those that were owed once
        self.were_owed: set[str] = set()
        self._members: frozenset[str] = frozenset()

    def take(self, record: Record) -> frozenset[str]:
        """Follow a record; return those that were expelled, and count again."""
        plans = [plan.workers for plan in (record.plan, record.pending) if plan is not None]
        owed = frozenset(worker for one in record.leaving for worker in one.owed)
        self.workers = frozenset(worker for workers in plans for worker in workers) | owed
        self.were_owed |= owed
        waiting = {one.node for one in record.standbys if not one.promoted}
        again = self.workers & self.expelled
        gone = {worker for worker in self._members - self.workers if node_of(worker) not in waiting}
        self.expelled = (self.expelled - again) | gone
        self._members = frozenset(record.plan.workers if record.plan is not None else ()) | owed
        return again


def wrongly_taken_in(workers: Iterable[str], world: World) -> str:
    """Expelled workers are members again: say what is wrong, if any of them had heard that it was in a generation."""
    for worker in workers:
        process = world.worker(worker)
        if process is not None and process.machine.generation > 0:
            return f"{worker} was expelled in generation {process.machine.generation} and is a member again"
    return ""
