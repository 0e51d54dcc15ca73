"""The workers that count for a job by its record: the members of its plans, and the retained workers.

Also checks that standbys replace draining nodes correctly.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.generations.assignment import share_of
from holdfast.coordination.membership import Membership
from holdfast.protocol.names import index_of, node_of
from holdfast.protocol.record import Record
from tests.simulation.world import World


class WhoCounts:
    """Follows the written records."""

    def __init__(self) -> None:
        #: the workers that count
        self.workers: frozenset[str] = frozenset()
        #: the workers that counted once and must not count again, except workers of standbys, which left in order
        self.expelled: set[str] = set()
        #: the workers that were retained once
        self.were_owed: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._owed: frozenset[str] = frozenset()

    def take(self, record: Record) -> frozenset[str]:
        """Follow a record; return the workers that were expelled and count again."""
        plans = [plan.workers for plan in (record.plan, record.pending) if plan is not None]
        owed = frozenset(worker for one in record.leaving for worker in one.owed)
        self.workers = frozenset(worker for workers in plans for worker in workers) | owed
        self.were_owed |= owed
        waiting = {one.node for one in record.standbys if not one.promoted}
        # A node that gave up its ranks is a standby, and may be needed again in the same transaction.
        waiting |= {one.node for one in record.standbys} & {node_of(worker) for worker in self._owed}
        again = self.workers & self.expelled
        gone = {worker for worker in self._members - self.workers if node_of(worker) not in waiting}
        self.expelled = (self.expelled - again) | gone
        self._members = frozenset(record.plan.workers if record.plan is not None else ()) | owed
        self._owed = owed
        return again


def still_known(expelled: Iterable[str], members: Membership, world: World) -> str:
    """Return an error if the coordinator still knows an expelled worker, else "".

    A worker that never learned of its generation has the initial state, and may return like a new node.
    """
    for worker in expelled:
        if members.worker(worker) is None or members.nodes[node_of(worker)].aside:
            continue
        process = world.worker(worker)
        if process is not None and process.machine.generation > 0:
            return f"{worker} was expelled, but the coordinator still accepts its messages"
    return ""


def wrongly_moved(before: Record, record: Record) -> str:
    """Return an error if standbys replace other nodes wrongly, else ""."""
    for plan in filter(None, (record.plan, record.pending)):
        beside = record.replacements_among({member.node for member in plan.members})
        ranks = [rank for rank, member in enumerate(plan.members) if member.node in beside]
        if plan.expert_plan is None and any(share_of(plan, record.micro_batches, rank) for rank in ranks):
            return f"{beside} compute in generation {plan.generation} before they have replaced other nodes"
    if before.plan is None or record.plan is None or record.plan.generation == before.plan.generation:
        return ""
    members = list(dict.fromkeys(member.node for member in before.plan.members))
    beside = before.replacements_among(members)
    gone = {one.node for one in record.leaving if one.owed}
    taken = {whose: name for name, whose in beside.items() if whose in gone}
    # If workers have joined or left as well, the world changes anyway, and others may get other ranks.
    places = [(member.node, index_of(member.worker)) for member in before.plan.members]
    due = [(taken.get(name, name), index) for name, index in places if name not in taken.values()]
    now = [(member.node, index_of(member.worker)) for member in record.plan.members]
    if taken and set(due) == set(now) and due != now:
        return f"after the replacements {taken} the ranks are {now}, not {due}"
    return ""


def wrongly_taken_in(workers: Iterable[str], world: World) -> str:
    """Return an error if an expelled worker that had learned of its generation is a member again, else ""."""
    for worker in workers:
        process = world.worker(worker)
        if process is not None and process.machine.generation > 0:
            return f"{worker} was expelled in generation {process.machine.generation} and is a member again"
    return ""
