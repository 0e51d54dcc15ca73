"""One transaction of the coordinator: the changes, events and messages of one call, in their required order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, KeysView
from typing import Any, TypeVar

import msgspec

from holdfast.coordination.instructions import (
    Broadcast,
    Close,
    Emit,
    EndJob,
    Instruction,
    Persist,
    PlanExperts,
    Send,
    SendToPool,
    StopOutdated,
)
from holdfast.coordination.membership import Membership
from holdfast.coordination.operator_alerts import request_of
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
    """The workers that the two plans name, and the retained ones, computed once for each change of the record."""

    def __init__(self, record: Record) -> None:
        self.of = record.plan, record.pending, record.leaving
        plans = [plan.workers for plan in self.of[:2] if plan is not None]
        retained = [one.owed for one in record.leaving]
        self.workers = dict.fromkeys(worker for workers in (*plans, *retained) for worker in workers)
        self.by_node: defaultdict[str, list[str]] = defaultdict(list)
        for worker in self.workers:
            self.by_node[node_of(worker)].append(worker)


class Transaction:
    """The record, the members and the time, and the changes, events and messages of the current call.

    `flush` puts one Persist before all events and messages. So a crash leaves the state before the call or the state
    after it, and no message is sent without its record.
    """

    def __init__(self, record: Record, position: Position) -> None:
        self.record = record
        self.members = Membership(record.places)
        self.members.unit_places = record.layout.places
        self.now = 0.0
        #: The job was over and runs again: it has no plan yet, and resumes from its checkpoint.
        self.begins_again = False
        #: The state that results from all events, including this call's.
        self.position = position
        #: The position as of the last record.
        self.recorded = position
        self._begun_at = position
        self._named = _Named(record)
        self._changed = False
        #: Fields of `coordinator_restarted`, for terms that this coordinator opens after its first one.
        self.origin: dict[str, Any] = {}
        self._events: list[AnyEvent] = []
        self._sends: list[Instruction] = []

    @property
    def generation(self) -> int:
        """The generation in force, or 0."""
        return self.record.plan.generation if self.record.plan else 0

    @property
    def planned(self) -> KeysView[str]:
        """The workers of the current and the pending plan, and the retained workers."""
        return self._plans_named.workers.keys()

    def planned_on(self, node: str) -> list[str]:
        """Return the planned workers on a node."""
        return self._plans_named.by_node.get(node, [])

    @property
    def usable_retained(self) -> list[str]:
        """The live retained workers without a script error. They become members again if they are needed."""
        retained = [worker for one in self.record.leaving for worker in one.owed]
        return [worker for worker in retained if (info := self.members.worker(worker)) is not None and not info.raised]

    @property
    def nodes_planned(self) -> KeysView[str]:
        """The nodes of the planned workers."""
        return self._plans_named.by_node.keys()

    @property
    def _plans_named(self) -> _Named:
        """The planned and retained workers, computed again if a plan or the draining nodes have changed."""
        record, of = self.record, self._named.of
        if of[0] is not record.plan or of[1] is not record.pending or of[2] is not record.leaving:
            self._named = _Named(record)
        return self._named

    def is_member(self, worker: str) -> bool:
        """Return whether the plan in force names a worker."""
        return self.record.plan is not None and self.record.plan.rank(worker) is not None

    def place_of(self, worker: str) -> str:
        """Return a worker's name for users: its rank, or its local rank if it has none."""
        rank = self.record.plan.rank(worker) if self.record.plan is not None else None
        node = node_of(worker)
        return f"worker {index_of(worker)} of {node}" if rank is None else f"rank {rank} on {node}"

    def left_behind(self, message: Complaint) -> bool:
        """Return whether a member's commit operation failed although all others passed it and swapped.

        That is a complaint of an older generation that this worker entered and never left.
        """
        info = self.members.worker(message.worker)
        return info is not None and info.entered <= message.generation < self.generation

    def change(self, **changes: Any) -> None:
        """Replace fields of the record. Even without fields, `flush` then writes the record."""
        self._changed = True
        self.record = msgspec.structs.replace(self.record, **changes)
        self.members.unit_places = self.record.layout.places

    def open_term(self, term: int) -> None:
        """Continue as the coordinator of a higher term: change the record and emit `coordinator_restarted`."""
        self.change(term=term)
        self.emit(CoordinatorRestarted, **self.origin)

    def drop_group_of(self, worker: str) -> tuple[str, ...]:
        """Remove the other workers of a lost worker's replica group, which are useless without it; return them.

        Their agent ends them, too. Its later reports about them are ignored. Return () if groups have one worker, or if
        the group has been restarted since.
        """
        places, name = self.members.unit_places, node_of(worker)
        if places == 1:
            return ()
        node, unit, planned = self.members.nodes.get(name), index_of(worker) // places, self.planned_on(name)
        workers = list(node.workers) if node is not None else []
        if any(index_of(one) == index_of(worker) and one != worker for one in workers):
            # The loss was reported late, by a node that was disconnected: the group has been restarted since.
            workers = []
        # Plans name complete groups. So other workers here belong to the next group, which the agent may report first.
        here = planned if worker in planned else workers
        mates = tuple(one for one in dict.fromkeys(here) if one != worker and index_of(one) // places == unit)
        if node is not None:
            for mate in mates:
                self.members.drop(node, mate)
            node.broken.update(mates)
        return mates

    def emit(self, event_type: type[E], /, **fields: Any) -> None:
        """Emit an event of this moment, with job, term, generation and sequence number; see `emit_at`."""
        self.emit_at(self.now, event_type, **fields)

    def emit_at(self, time: float, event_type: type[E], /, **fields: Any) -> None:
        """Emit an event that happened at another time, with job, term, generation and the next sequence number.

        If it needs a person's action, `action_requested` follows.
        """
        record, seq = self.record, self.position.seq + 1
        event = event_type(time=time, job=record.job, term=record.term, generation=self.generation, seq=seq, **fields)
        request = request_of(event, self.position.step)
        self.position = self.position.after(event)
        self._events.append(event)
        if request is not None:
            self.emit(ActionRequested, **request)

    def send(self, connection: int, message: CoordinatorMessage) -> None:
        """Send a message on an agent's connection."""
        self._sends.append(Send(connection, message))

    def broadcast(self, connections: Iterable[int], message: CoordinatorMessage) -> None:
        """Send the same message on several connections; nothing without connections."""
        if numbers := tuple(connections):
            self._sends.append(Broadcast(numbers, message))

    def order_all(self, workers: Iterable[str], order: NodeOrder) -> None:
        """Send an order once to each agent that has a live one of these workers. The agents pass it to the workers that
        it concerns.
        """
        here = dict.fromkeys(node_of(worker) for worker in self.members.live(workers))
        self.broadcast((self.members.nodes[name].connection for name in here), order)

    def order(self, worker: str, order: WorkerOrder) -> None:
        """Send an order to one worker, if it is live and its node is connected."""
        connection = self.members.connection_of(worker)
        if connection is not None and self.members.worker(worker) is not None:
            self.send(connection, ToWorker(worker=worker, order=order))

    def order_node(self, name: str, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Send an order to a node's agent, if it is connected."""
        if name in self.members.nodes:
            self.send(self.members.nodes[name].connection, order)

    def close(self, connection: int) -> None:
        """Close a connection."""
        self._sends.append(Close(connection))

    def end(self, job: EndJob) -> None:
        """End the job."""
        self._sends.append(job)

    def stop_outdated(self, newer: str) -> None:
        """End this coordinator but not the job: `newer` shows that the store is older than the job."""
        self._sends.append(StopOutdated(newer))

    def send_to_pool(self, stands: JobState) -> None:
        """Send the job's state to its pool."""
        self._sends.append(SendToPool(stands))

    def compute(self, order: PlanExperts) -> None:
        """Request the search for an expert placement."""
        self._sends.append(order)

    def flush(self) -> list[Instruction]:
        """Return the instructions of this transaction, and begin the next one.

        In order: the record with all events in its outbox, if it changed; then the events; then messages and other
        effects.
        """
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
