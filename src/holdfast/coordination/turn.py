"""What one call of the coordinator's machine brings about, gathered in the order in which it must happen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, KeysView
from typing import Any, TypeVar

import msgspec

from holdfast.coordination.attention import request_of
from holdfast.coordination.instructions import (
    Broadcast,
    Close,
    Emit,
    EndJob,
    Instruction,
    Persist,
    PlanExperts,
    Send,
    StopOutdated,
    TellPool,
)
from holdfast.coordination.membership import Membership
from holdfast.protocol.events import ActionRequested, AnyEvent, CoordinatorRestarted
from holdfast.protocol.messages.agent import CoordinatorMessage, NodeOrder, ToWorker
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints, WorkerOrder
from holdfast.protocol.messages.worker import Complaint
from holdfast.protocol.names import index_of, node_of
from holdfast.protocol.pool.sharing import JobState
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record

E = TypeVar("E", bound=AnyEvent)


class _Named:
    """The workers that two plans name, and those that are owed: gone through once for all."""

    def __init__(self, record: Record) -> None:
        self.of = record.plan, record.pending, record.leaving
        plans = [plan.workers for plan in self.of[:2] if plan is not None]
        owed = [one.owed for one in record.leaving]
        self.workers = dict.fromkeys(worker for workers in (*plans, *owed) for worker in workers)
        self.by_node: defaultdict[str, list[str]] = defaultdict(list)
        for worker in self.workers:
            self.by_node[node_of(worker)].append(worker)


class Transaction:
    """The record, the members and the time, and what the call under way changes, announces and sends.

    `position` is where the job stands by its events, those of this call included; `recorded`, where it stood with the
    last record. `flush` puts one Persist before all events and messages: a crash at any write leaves either the state
    before the call or the state after it, never a promise without its record.
    """

    def __init__(self, record: Record, position: Position) -> None:
        self.record = record
        self.members = Membership(record.places)
        self.members.unit_places = record.layout.places
        self.now = 0.0
        #: a later run of a job that is over: it has no plan yet, and goes on from its checkpoint
        self.begins_again = False
        self.position = self.recorded = position
        self._begun_at = position
        self._named = _Named(record)
        self._changed = False
        #: of `coordinator_restarted`, for terms that this coordinator opens after its first
        self.origin: dict[str, Any] = {}
        self._events: list[AnyEvent] = []
        self._sends: list[Instruction] = []

    @property
    def generation(self) -> int:
        """The generation in force, 0 where there is none."""
        return self.record.plan.generation if self.record.plan else 0

    @property
    def planned(self) -> KeysView[str]:
        """The workers that the current or the pending plan names, and those that have left but count still."""
        return self._plans_named.workers.keys()

    def planned_on(self, node: str) -> list[str]:
        """Return those of the planned workers that are on a node."""
        return self._plans_named.by_node.get(node, [])

    @property
    def nodes_planned(self) -> KeysView[str]:
        """The nodes of the planned workers."""
        return self._plans_named.by_node.keys()

    @property
    def _plans_named(self) -> _Named:
        record, of = self.record, self._named.of
        if of[0] is not record.plan or of[1] is not record.pending or of[2] is not record.leaving:
            self._named = _Named(record)
        return self._named

    def is_member(self, worker: str) -> bool:
        """Tell whether the plan in force names a worker."""
        return self.record.plan is not None and self.record.plan.rank(worker) is not None

    def place_of(self, worker: str) -> str:
        """Say which worker it is, as people name it."""
        rank = self.record.plan.rank(worker) if self.record.plan is not None else None
        node = node_of(worker)
        return f"worker {index_of(worker)} of {node}" if rank is None else f"rank {rank} on {node}"

    def left_behind(self, message: Complaint) -> bool:
        """Tell whether a member's commit operation failed, although all others passed it, and swapped."""
        info = self.members.worker(message.worker)
        return info is not None and info.entered <= message.generation < self.generation

    def change(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self._changed = True
        self.record = msgspec.structs.replace(self.record, **changes)
        self.members.unit_places = self.record.layout.places

    def open_term(self, term: int) -> None:
        """Go on as a coordinator of a higher term."""
        self.change(term=term)
        self.emit(CoordinatorRestarted, **self.origin)

    def break_unit(self, worker: str) -> tuple[str, ...]:
        """A worker is gone, and with it the others of its unit, which are of no use without it; return these.

        Their agent ends them, too; what it still says of them does not count.
        """
        places, name = self.members.unit_places, node_of(worker)
        if places == 1:
            return ()
        node, unit, planned = self.members.nodes.get(name), index_of(worker) // places, self.planned_on(name)
        there = list(node.workers) if node is not None else []
        if any(index_of(one) == index_of(worker) and one != worker for one in there):
            there = []  # (heard of late, from a node that was away: the unit has been started anew since)
        # (Plans have whole units: what else is here is of the one that follows, which its agent may have said first.)
        here = planned if worker in planned else there
        mates = tuple(one for one in dict.fromkeys(here) if one != worker and index_of(one) // places == unit)
        if node is not None:
            for mate in mates:
                self.members.drop(node, mate)
            node.broken.update(mates)
        return mates

    def emit(self, event_type: type[E], /, **fields: Any) -> None:
        """Announce an event, stamped with time, job, term, generation and its place in the journal."""
        self.emit_at(self.now, event_type, **fields)

    def emit_at(self, time: float, event_type: type[E], /, **fields: Any) -> None:
        """Announce an event that happened at another time than now."""
        record, seq = self.record, self.position.seq + 1
        event = event_type(time=time, job=record.job, term=record.term, generation=self.generation, seq=seq, **fields)
        request = request_of(event, self.position.step)
        self.position = self.position.after(event)
        self._events.append(event)
        if request is not None:
            self.emit(ActionRequested, **request)

    def send(self, connection: int, message: CoordinatorMessage) -> None:
        """Send to the agent behind a connection."""
        self._sends.append(Send(connection, message))

    def broadcast(self, connections: Iterable[int], message: CoordinatorMessage) -> None:
        """Send the same to several agents."""
        if numbers := tuple(connections):
            self._sends.append(Broadcast(numbers, message))

    def order_all(self, workers: Iterable[str], order: NodeOrder) -> None:
        """Send to the agents of these workers, each once; they hand it to those of their workers that it concerns."""
        here = dict.fromkeys(node_of(worker) for worker in self.members.live(workers))
        self.broadcast((self.members.nodes[name].connection for name in here), order)

    def order(self, worker: str, order: WorkerOrder) -> None:
        """Send to one worker; to one that is gone nothing is said."""
        connection = self.members.connection_of(worker)
        if connection is not None and self.members.worker(worker) is not None:
            self.send(connection, ToWorker(worker=worker, order=order))

    def order_node(self, name: str, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Send to the agent of a node; to one that is gone nothing is said."""
        if name in self.members.nodes:
            self.send(self.members.nodes[name].connection, order)

    def close(self, connection: int) -> None:
        """Close a connection."""
        self._sends.append(Close(connection))

    def end(self, job: EndJob) -> None:
        """End the job."""
        self._sends.append(job)

    def stop_outdated(self, newer: str) -> None:
        """End this coordinator, not the job: the store is older than the job, as `newer` shows."""
        self._sends.append(StopOutdated(newer))

    def tell_pool(self, stands: JobState) -> None:
        """Tell the job's pool how it stands."""
        self._sends.append(TellPool(stands))

    def compute(self, order: PlanExperts) -> None:
        """Have a placement computed."""
        self._sends.append(order)

    def flush(self) -> list[Instruction]:
        """Return everything gathered, in order, and start anew."""
        out: list[Instruction] = []
        if self._changed:
            self.record = msgspec.structs.replace(self.record, position=self._begun_at, outbox=tuple(self._events))
            self.recorded = self.position
            out.append(Persist(self.record))
        out += [Emit(event) for event in self._events]
        out += self._sends
        self._changed, self._events, self._sends = False, [], []
        self._begun_at = self.position
        return out
