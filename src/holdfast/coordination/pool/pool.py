"""The pool's machine: who owns which node, as (input, now) -> instructions.

An input is taken in, then nodes are shared out as the policy says (`granting`). Within one call everything durable goes
into one PersistPool that precedes all that is told: a crash at any write leaves either the state before or the state
after, never a node that was told of an owner which the record does not have.

A grant is over only when its job's record does without it, or the node itself says that nothing of it runs there. What
jobs and nodes are told is how things stand: said again after each new connection, it needs no answer to be right.
"""

from __future__ import annotations

from math import inf

from holdfast.coordination.inputs import StoreBack, Tick
from holdfast.coordination.pool.granting import Granting
from holdfast.coordination.pool.inputs import Foreseen, JobLinked, JobSaid, NodeGone, NodeSaid, PoolInput
from holdfast.coordination.pool.instructions import EmitPool, PoolInstruction
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.nodes import PooledNodes
from holdfast.coordination.pool.places.moving import Moving
from holdfast.coordination.pool.requests import ask
from holdfast.coordination.pool.share.explaining import what_would_do
from holdfast.coordination.pool.share.interface import Demand
from holdfast.coordination.pool.state import Connected, PoolConfig, PoolState
from holdfast.coordination.pool.what_if import Change, changed
from holdfast.protocol.messages.pool import LeavePool, NodeAlive, NodeState, PoolHello
from holdfast.protocol.pool.events import AnyPoolEvent, PoolJournalRepaired, PoolStarted, PoolStoreReturned
from holdfast.protocol.pool.record import POOL_SCHEMA, PoolRecord


class Pool:
    """One pool's decisions. The shell feeds it inputs with the time and carries out what it returns, in order."""

    def __init__(self, config: PoolConfig, record: PoolRecord | None, last_seq: int = 0) -> None:
        """Take up a pool.

        Args:
            record: None for a new one. last_seq: of the newest event in the journal.
        """
        self.config = config
        record = record or PoolRecord(schema=POOL_SCHEMA, pool=config.name)
        self._lost = _lost_events(record, last_seq)
        self.state = PoolState(config, record)
        self._jobs = PooledJobs(self.state)
        self._nodes = PooledNodes(self.state)
        self.moving = Moving(self.state)
        self._granting = Granting(self.state, self._jobs, self.moving)
        self._last_tick = 0.0
        #: nothing new is decided before this, unless all nodes are here
        self._settles_at = 0.0
        #: the record is known to be the newest from then on, unless a node has shown otherwise
        self._proven_at = inf
        #: when something is due though nothing has happened
        self._due_at = inf

    @property
    def record(self) -> PoolRecord:
        """The durable state."""
        return self.state.record

    def start(self, now: float, url: str, pid: int) -> list[PoolInstruction]:
        """Open a new term. Nodes and jobs come back by themselves; until they are here nothing new is decided."""
        state, config = self.state, self.config
        state.now = self._last_tick = now
        self._settles_at = now + config.settle_s if state.nodes else now
        self._proven_at = now + config.settle_s
        state.away = dict.fromkeys(state.nodes, now)
        state.new_term(url)
        state.began_at = state.began_at or now
        state.emit(PoolStarted, url=url, pid=pid, policy=config.policy.name, reserve=state.reserve)
        self._jobs.restart()
        self._advance()
        return state.flush([EmitPool(event) for event in self._lost])

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        """Take in one input.

        Raises:
            BadInputError, UnreachableError, RefusedError: a user's request that is refused.
        """
        self.state.now = now = max(now, self.state.now)
        if isinstance(event, NodeSaid) and isinstance(event.message, NodeAlive):
            if here := self.state.by_connection.get(event.connection):
                here.seen = now
            return []
        if isinstance(event, Tick):
            self._tick(now)
            if now < self._due_at:
                return self.state.flush()
        else:
            self._take(event)
            if isinstance(event, Foreseen):
                return []  # (nothing has happened)
        self._advance()
        return self.state.flush()

    @property
    def reserve_why(self) -> str:
        """Why so many nodes are kept back, where the pool decides how many; else "" ."""
        return self._granting.reserve_why

    def explain(self, job: str) -> list[str]:
        """Return what would each let a job begin that waits, in words; why it waits is in the record."""
        waits = job in self.state.jobs and self.state.jobs[job].state == "queued"
        return what_would_do(self.config.policy, self._granting.demand(), job) if waits else []

    def changed(self, change: Change) -> tuple[Demand, Demand]:
        """Return how things stand, and would after a change, for `what_if`; nothing is done.

        Raises:
            BadInputError, UnreachableError: as of `plans.what_if.changed`.
        """
        demand = self._granting.demand()
        return demand, changed(self.state, demand, self._granting.bid, change)

    def _take(self, event: PoolInput) -> None:
        match event:
            case NodeSaid(connection, message):
                here = self.state.by_connection.get(connection)
                if isinstance(message, PoolHello):
                    if here is None:
                        self._nodes.hello(connection, message)
                elif here is not None:  # (else refused, or closed: nothing of it counts)
                    self._node_says(here, message)
            case NodeGone(connection):
                self._nodes.gone(connection)
            case JobLinked(name):
                self.state.tell_job(name)
            case JobSaid(name, report):
                self._jobs.said(name, report)
            case Foreseen():
                self._granting.foreseen(event)
            case StoreBack(away_s):
                self.state.emit(PoolStoreReturned, away_s=away_s)
            case Tick():
                pass
            case _:
                ask(self.state, self._jobs, self._nodes, self.moving, event)

    def _node_says(self, here: Connected, message: NodeState | NodeAlive | LeavePool) -> None:
        here.seen = self.state.now
        if isinstance(message, NodeState):
            self._nodes.stands(here, message)
        elif isinstance(message, LeavePool):
            self._nodes.leave(here, message)

    def _tick(self, now: float) -> None:
        if now - self._last_tick > self.config.lease_s / 3:
            self._nodes.renew_all()  # (it was us who did not listen)
        self._last_tick = now
        before = len(self.state.here)
        self._nodes.expire()
        if len(self.state.here) < before:
            self._due_at = now

    def _advance(self) -> None:
        """Share out what there is, where that can be said by now."""
        now = self.state.now
        here = bool(self.state.nodes) and self._nodes.all_here
        self.state.proven = self.state.proven or here or now >= self._proven_at
        if now < self._settles_at and not self._nodes.all_here:
            self._due_at = self._settles_at
            return
        self._settles_at = now
        self._granting.carry_out()
        self._due_at = self._granting.next_at()


def _lost_events(record: PoolRecord, last_seq: int) -> list[AnyPoolEvent]:
    """Return the events that the record knows of and the journal lacks, one that stands for those it has not kept."""
    lost = [event for event in record.outbox if event.seq > last_seq]
    first = lost[0].seq if lost else record.seq + 1
    if first <= last_seq + 1:
        return lost
    stands = PoolJournalRepaired(
        time=lost[0].time if lost else 0.0,
        pool=record.pool,
        term=record.term,
        seq=first - 1,
        from_seq=last_seq + 1,
        to_seq=first - 1,
    )
    return [stands, *lost]
