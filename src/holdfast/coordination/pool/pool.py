"""The state machine of a pool: it decides which job owns which node, as (input, now) -> instructions.

It applies an input, then divides the nodes as the policy says (`granting`). All durable changes of one call go into one
PersistPool, which precedes all messages. So a crash at any write leaves the state before or after the call. No node
ever learns of an owner that the record does not contain.

A grant ends only when its job's record no longer contains it, or the node itself reports that none of its processes
run. Messages to jobs and nodes contain the whole state, and are repeated on each new connection, so they need no
acknowledgement.
"""

from __future__ import annotations

from math import inf

from holdfast.coordination.inputs import StoreBack, Tick
from holdfast.coordination.pool.granting import Allocator
from holdfast.coordination.pool.inputs import (
    JobConnected,
    JobMessage,
    NextPlansSolved,
    NodeDisconnected,
    NodeMessage,
    PoolInput,
)
from holdfast.coordination.pool.instructions import EmitPool, PoolInstruction
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.node_selection.moving import MoveQueue
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.requests import handle_request
from holdfast.coordination.pool.share.explaining import find_remedies
from holdfast.coordination.pool.share.interface import Demand
from holdfast.coordination.pool.state import Connected, PoolConfig, PoolState
from holdfast.coordination.pool.what_if import Change, demand_after
from holdfast.protocol.messages.pool import LeavePool, NodeAlive, NodeState, PoolHello
from holdfast.protocol.pool.events import AnyPoolEvent, PoolJournalRepaired, PoolStarted, PoolStoreReturned
from holdfast.protocol.pool.record import POOL_SCHEMA, PoolRecord


class Pool:
    """The decisions of one pool. The shell feeds it inputs with the time, and executes the instructions in order."""

    def __init__(self, config: PoolConfig, record: PoolRecord | None, last_seq: int = 0) -> None:
        """Load a pool.

        Args:
            config: its settings
            record: its record, or None for a new pool
            last_seq: number of the newest event in the journal
        """
        self.config = config
        record = record or PoolRecord(schema=POOL_SCHEMA, pool=config.name)
        self._lost = _missing_events(record, last_seq)
        self.state = PoolState(config, record)
        self._jobs = PooledJobs(self.state)
        self._nodes = PooledNodes(self.state)
        self.moves = MoveQueue(self.state)
        self._allocator = Allocator(self.state, self._jobs, self.moves)
        self._last_tick = 0.0
        #: nothing new is decided before this time, unless all nodes are connected
        self._settles_at = 0.0
        #: from this time on the record counts as the newest, unless a node has proved otherwise
        self._proven_at = inf
        #: when to allocate again even without an event
        self._due_at = inf

    @property
    def record(self) -> PoolRecord:
        """The durable state."""
        return self.state.record

    def start(self, now: float, url: str, pid: int) -> list[PoolInstruction]:
        """Open a new term: emit events that the journal lacks, start the coordinators of the jobs, and return all
        instructions.

        Nodes and jobs reconnect on their own. Until all nodes have, or time is up, nothing new is decided.
        """
        state, config = self.state, self.config
        state.now = self._last_tick = now
        self._settles_at = now + config.settle_s if state.nodes else now
        self._proven_at = now + config.settle_s
        state.away = dict.fromkeys(state.nodes, now)
        state.open_term(url)
        state.began_at = state.began_at or now
        state.emit(PoolStarted, url=url, pid=pid, policy=config.policy.name, reserve=state.reserve)
        self._jobs.start_coordinators()
        self._allocate_if_settled()
        return state.flush([EmitPool(event) for event in self._lost])

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        """Apply one input, allocate nodes again, and return all resulting instructions.

        A tick allocates only if that is due; signs of life and prepared plans do not.

        Raises:
            BadInputError, UnreachableError, RefusedError: The pool refuses a user's request.
        """
        self.state.now = now = max(now, self.state.now)
        if isinstance(event, NodeMessage) and isinstance(event.message, NodeAlive):
            if here := self.state.by_connection.get(event.connection):
                here.seen = now
            return []
        if isinstance(event, Tick):
            self._tick(now)
            if now < self._due_at:
                return self.state.flush()
        else:
            self._apply_input(event)
            if isinstance(event, NextPlansSolved):
                return []  # The pool is unchanged.
        self._allocate_if_settled()
        return self.state.flush()

    @property
    def reserve_reason(self) -> str:
        """Why this many nodes are reserved, if the pool chooses the number; else ""."""
        return self._allocator.reserve_reason

    def explain(self, job: str) -> list[str]:
        """Return changes that would each let a waiting job start at once, in words.

        The record contains the reason why it waits.
        """
        waits = job in self.state.jobs and self.state.jobs[job].state == "queued"
        return find_remedies(self.config.policy, self._allocator.build_demand(), job) if waits else []

    def preview_change(self, change: Change) -> tuple[Demand, Demand]:
        """Return the demand now and after a change, for `compute_what_if`; the pool does not change.

        Raises:
            BadInputError, UnreachableError: as in `what_if.demand_after`
        """
        demand = self._allocator.build_demand()
        return demand, demand_after(self.state, demand, self._allocator.build_bid, change)

    def _apply_input(self, event: PoolInput) -> None:
        """Pass an input to its handler. A node's first message on a known connection, and others on an unknown one, are
        ignored.

        Raises as `handle_request`.
        """
        match event:
            case NodeMessage(connection, message):
                here = self.state.by_connection.get(connection)
                if isinstance(message, PoolHello):
                    if here is None:
                        self._nodes.on_hello(connection, message)
                elif here is not None:  # Otherwise the node was refused or disconnected: ignore it.
                    self._on_node_message(here, message)
            case NodeDisconnected(connection):
                self._nodes.on_disconnect(connection)
            case JobConnected(name):
                self.state.notify_job(name)
            case JobMessage(name, report):
                self._jobs.on_report(name, report)
            case NextPlansSolved():
                self._allocator.on_next_plans(event)
            case StoreBack(away_s):
                self.state.emit(PoolStoreReturned, away_s=away_s)
            case Tick():
                pass
            case _:
                handle_request(self.state, self._jobs, self._nodes, self.moves, event)

    def _on_node_message(self, here: Connected, message: NodeState | NodeAlive | LeavePool) -> None:
        """Record that a connected node is alive, and handle its state or that it leaves."""
        here.seen = self.state.now
        if isinstance(message, NodeState):
            self._nodes.on_state(here, message)
        elif isinstance(message, LeavePool):
            self._nodes.on_leave(here, message)

    def _tick(self, now: float) -> None:
        """Expire silent nodes; if there were any, an allocation is due.

        After a pause of this server itself, renew all leases first.
        """
        if now - self._last_tick > self.config.lease_s / 3:
            self._nodes.renew_leases()  # This server did not listen.
        self._last_tick = now
        before = len(self.state.connected)
        self._nodes.expire_nodes()
        if len(self.state.connected) < before:
            self._due_at = now

    def _allocate_if_settled(self) -> None:
        """Allocate nodes and set when that is due again, unless a new server still waits for nodes to reconnect.

        Once all have, or time is up, the record counts as the newest.
        """
        now = self.state.now
        here = bool(self.state.nodes) and self._nodes.all_connected
        self.state.is_newest = self.state.is_newest or here or now >= self._proven_at
        if now < self._settles_at and not self._nodes.all_connected:
            self._due_at = self._settles_at
            return
        self._settles_at = now
        self._allocator.allocate()
        self._due_at = self._allocator.next_due_at()


def _missing_events(record: PoolRecord, last_seq: int) -> list[AnyPoolEvent]:
    """Return the events of the record that the journal lacks after number `last_seq`.

    If the record no longer has all of them, one `PoolJournalRepaired` stands for the lost ones.
    """
    lost = [event for event in record.outbox if event.seq > last_seq]
    first = lost[0].seq if lost else record.seq + 1
    if first <= last_seq + 1:
        return lost
    repaired = PoolJournalRepaired(
        time=lost[0].time if lost else 0.0,
        pool=record.pool,
        term=record.term,
        seq=first - 1,
        from_seq=last_seq + 1,
        to_seq=first - 1,
    )
    return [repaired, *lost]
