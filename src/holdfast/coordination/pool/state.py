"""The pool's record, its connections and the time, and what the call under way changes, announces and tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.coordination.pool.instructions import (
    BeginJob,
    CloseJob,
    CloseNode,
    EmitPool,
    Foresee,
    PersistPool,
    PoolInstruction,
    StopOutdatedPool,
    TellJob,
    TellNode,
)
from holdfast.coordination.pool.share.interface import Policy
from holdfast.coordination.pool.share.next_plans import Foresight
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import NodeGrant, ToNode
from holdfast.protocol.pool.events import AnyPoolEvent, NodeGranted, NodeReleased, RoleChanged
from holdfast.protocol.pool.record import OVER, Grant, PooledJob, PoolNode, PoolRecord
from holdfast.protocol.pool.sharing import JobCosts, JobPace, JobShares, JobState, NodeUnfit, PoolWish

E = TypeVar("E", bound=AnyPoolEvent)

#: each is in the record, which is written as a whole
MOST_NODES = 8192
#: of jobs that are over, so many are remembered
KEPT_JOBS = 256
#: of nodes that were away, the newest count
KEPT_REPAIRS = 64
#: jobs are told how often nodes fail once that is off by so much: each writes it down
RATE_OFF_BY = 0.25
_WISHES: dict[str, PoolWish] = {"suspending": "suspend", "stopping": "stop"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Settings of a pool; times in seconds.

    reserve: nodes that no job but preemptible ones is given, for those that lose one; auto_reserve: how many is decided
    by what they are worth there (then `reserve` counts for nothing). expected: nodes that are known to
    come. lease_s: a node that says nothing for so long is gone. back_s: so long it may well be about to come back.
    forget_s: so long it is known; one whose name is of its process alone only for `back_s`. settle_s: so long a pool
    that has been started again waits for its nodes before it decides anything new. most_nodes: no more are known.
    """

    name: str
    policy: Policy
    reserve: int = 0
    auto_reserve: bool = False
    expected: int = 0
    lease_s: float = 3.0
    settle_s: float = 5.0
    back_s: float = 60.0
    forget_s: float = 86_400.0
    most_nodes: int = MOST_NODES
    #: of a pool whose record has none yet: a random name that no other pool has
    identity: str = ""


@dataclass(slots=True)
class Connected:
    """A node that is here."""

    name: str
    connection: int
    seen: float
    #: as of `NodeState`
    changes: int = 0


class PoolState:
    """The record taken apart, to be changed; `flush` puts one PersistPool before all that anybody is told."""

    def __init__(self, config: PoolConfig, record: PoolRecord) -> None:
        self.config = config
        self.record = record
        self.now = 0.0
        self.nodes: dict[str, PoolNode] = dict(record.nodes)
        self.grants: dict[str, Grant] = dict(record.grants)
        self.jobs: dict[str, PooledJob] = dict(record.jobs)
        #: the grants of each job, by node
        self.of_job: dict[str, dict[str, Grant]] = {}
        for grant in record.grants.values():
            self.of_job.setdefault(grant.job, {})[grant.node] = grant
        self.here: dict[str, Connected] = {}
        #: since when the others are not; those that went last come last
        self.away: dict[str, float] = {}
        self.by_connection: dict[int, Connected] = {}
        #: nodes that a job would not take, as they are, as far as it has said; all that it has said of that; and the
        #: grants by which nodes train in it
        self.refused: dict[str, frozenset[str]] = {}
        self._unfit: dict[str, Mapping[str, NodeUnfit]] = {}
        #: nodes that have come anew, or been changed: what was said of them of grants up to this one counts no more
        self._anew: dict[str, int] = {}
        #: jobs that too few nodes would do for
        self.stranded: frozenset[str] = frozenset()
        self.trains: dict[str, frozenset[int]] = {}
        #: what a move costs a job, where it has said so
        self.move_s: dict[str, float] = {}
        #: what failures have cost each job, as far as it has said so
        self.costs: dict[str, JobCosts] = {}
        #: how fast each job has said that it trains, as it did last
        self.paces: dict[str, JobPace] = {}
        #: how often a node fails, per second, as jobs were told last; 0: nobody was told
        self.failure_rate = 0.0
        self._term, self._seq = record.term, record.seq
        self._identity = record.identity
        #: the newest record before this server
        self.found = record.term, record.version
        #: whether the record is known to be the newest: no node has shown otherwise when it had the time to
        self.proven = not record.identity
        self._last_grant, self._last_submission = record.last_grant, record.last_submission
        self.failures, self.began_at = record.failures, record.began_at
        self._url = record.url
        #: nodes that are kept back for jobs that lose one
        self.reserve = record.reserve if config.auto_reserve else config.reserve
        #: how long nodes were away that had failed, the newest; and since when the others are
        self.repairs: tuple[float, ...] = record.repairs
        self._failed_at: dict[str, float] = {}
        self._changed = False
        self._events: list[AnyPoolEvent] = []
        self._first: list[PoolInstruction] = []
        self._sends: list[PoolInstruction] = []
        self._nodes_to_tell: dict[str, None] = {}
        self._jobs_to_tell: dict[str, None] = {}

    def copy(self) -> PoolState:
        """Return how the pool stands, to see what would come of something: nobody is told of that."""
        other = PoolState(self.config, self.record)
        other.now = self.now
        for name in ("here", "by_connection", "away", "refused", "trains", "move_s", "costs", "_unfit", "_anew"):
            setattr(other, name, dict(getattr(self, name)))
        other.stranded = self.stranded
        return other

    # ---- what the record is to be ----

    @property
    def version(self) -> int:
        """That of the record which has what this call changes."""
        return self.record.version + 1

    def new_term(self, url: str) -> int:
        """Count another pool's server, which serves at `url`."""
        self._url = url
        self._term += 1
        self._identity = self._identity or self.config.identity
        self._changed = True
        return self._term

    @property
    def identity(self) -> str:
        """The random name of the pool, as in its record."""
        return self._identity

    def touch(self) -> None:
        """Write the record, though nothing of it changes: what this call says is said only if that succeeds."""
        self._changed = True

    def stop_outdated(self, newer: str) -> None:
        """End this server, not the pool: the store is older than the pool, as `newer` shows."""
        self.touch()  # (a server that another has followed ends at the write)
        self._sends.append(StopOutdatedPool(newer))

    def emit(self, event_type: type[E], /, **fields: Any) -> None:
        """Announce an event; it is in the record's outbox until it is in the journal."""
        self._seq += 1
        self._changed = True
        self._events.append(event_type(time=self.now, pool=self.record.pool, term=self._term, seq=self._seq, **fields))

    def put_node(self, node: PoolNode) -> None:
        """Write a node down."""
        self.nodes[node.name] = node
        self._changed = True

    def drop_node(self, name: str) -> None:
        """Forget a node that nobody owns."""
        assert name not in self.grants, name
        del self.nodes[name]
        self.repaired(name)
        self._anew.pop(name, None)
        self.away.pop(name, None)
        self._changed = True

    def new_submission(self) -> int:
        """Return a number that no other job has."""
        self._last_submission += 1
        return self._last_submission

    def put_job(self, job: PooledJob, **changes: Any) -> PooledJob:
        """Write a job down; what it is told follows from that."""
        changed = replace(job, **changes) if changes else job
        known = self.jobs.get(job.name)
        self.jobs[job.name] = changed
        self._changed = True
        if known is None or (known.state, known.unsaved) != (changed.state, changed.unsaved):
            self._jobs_to_tell[job.name] = None
        return changed

    def forget_old_jobs(self, room: int = 0, size: Callable[[JobSpec], int] = lambda _: 0) -> None:
        """Keep no more jobs that are over than anybody looks at, and those that came last where they do not fit."""
        over = sorted((job for job in self.jobs.values() if job.state in OVER), key=lambda one: -one.submission)
        for place, job in enumerate(over):
            room -= size(job.spec)
            if place >= KEPT_JOBS or room < 0:
                del self.jobs[job.name]

    # ---- what jobs say ----

    def said(self, job: str, report: JobState) -> None:
        """A job says which nodes it would not take, on which it trains, and what a move costs it."""
        self._unfit[job], self.trains[job] = report.refuses, report.trains
        self.refused[job] = frozenset(self.unfit(job))
        if report.move_s is not None:
            self.move_s[job] = report.move_s
        self.costs[job] = report.costs

    def unfit(self, job: str) -> dict[str, str]:
        """Return the nodes that a job would not take, as they are, and why."""
        known = self._unfit.get(job, {}).items()
        return {node: one.why for node, one in known if not 0 < one.grant <= self._anew.get(node, 0)}

    def came_anew(self, node: str) -> None:
        """A node is another than jobs have seen: it may do for those that would not take it."""
        self._anew[node] = self._last_grant
        for job, known in self._unfit.items():
            if node in known:
                self.refused[job] = frozenset(self.unfit(job))

    def said_no_more(self, job: str) -> None:
        """Forget what a job has said."""
        for said in (self._unfit, self.refused, self.trains, self.move_s, self.costs, self.paces):
            said.pop(job, None)

    def keep_back(self, nodes: int) -> bool:
        """Keep so many nodes back for jobs that lose one; return whether these are others than before."""
        if nodes == self.reserve:
            return False
        self.reserve, self._changed = nodes, True
        return True

    def repaired(self, node: str) -> None:
        """A node is back, or given up: if it had failed, so long that has taken."""
        failed_at = self._failed_at.pop(node, None)
        if failed_at is not None:
            self.repairs = (*self.repairs, max(0.0, self.now - failed_at))[-KEPT_REPAIRS:]

    def tell_rate(self, failure_rate: float) -> None:
        """Let jobs know how often nodes fail, where that is much else than they know."""
        known = self.failure_rate
        if abs(failure_rate - known) > RATE_OFF_BY * known:
            self.failure_rate = failure_rate
            for job in self.jobs:
                self.tell_job(job)

    def strand(self, jobs: frozenset[str]) -> None:
        """These jobs, and no other ones, have too few nodes that would do for them: they are told."""
        for job in jobs ^ self.stranded:
            self.tell_job(job)
        self.stranded = jobs

    # ---- grants ----

    def give(self, node: str, job: str, *, standby: bool = False) -> None:
        """Grant a free node to a job, as one of its own or as a standby."""
        assert node not in self.grants, f"node {node} has an owner: {self.grants[node]}"
        self._last_grant += 1
        session = self.nodes[node].session
        number, version = self._last_grant, self.version
        grant = Grant(number=number, node=node, session=session, job=job, version=version, standby=standby)
        self._put(grant)
        self.emit(NodeGranted, node=node, job=job, grant=grant.number, standby=standby)

    def recall(self, node: str) -> None:
        """Have a job leave a node."""
        self._put(replace(self.grants[node], recalled=True))

    def replace(self, node: str) -> None:
        """Have a job leave a node once another trains that it has for it."""
        self._put(replace(self.grants[node], replaced=True))

    def keep(self, node: str) -> None:
        """Have a job keep a node that another was to replace."""
        self._put(replace(self.grants[node], replaced=False))

    def call(self, node: str) -> None:
        """Have a standby join its job: what that has said of it before it hears of this counts no more."""
        self._put(replace(self.grants[node], standby=False, version=self.version))
        self._role_changed(node, by="pool")

    def waits(self, node: str, *, standby: bool) -> None:
        """A job says whether a node of its own waits there, or not."""
        if self.grants[node].standby != standby:
            self._put(replace(self.grants[node], standby=standby))
            self._role_changed(node, by="job")

    def _role_changed(self, node: str, by: str) -> None:
        grant = self.grants[node]
        self.emit(RoleChanged, node=node, job=grant.job, grant=grant.number, standby=grant.standby, by=by)

    def _put(self, grant: Grant) -> None:
        self.grants[grant.node] = grant
        self.of_job.setdefault(grant.job, {})[grant.node] = grant
        self._told(grant)

    def release(self, grant: Grant, by: str, *, failed: bool = False) -> None:
        """A grant is over, as its job's record or the node itself has said; `failed`: nobody had asked for that."""
        self.failures += failed
        if failed and grant.node not in self.here:
            self._failed_at[grant.node] = self.away.get(grant.node, self.now)
        del self.grants[grant.node]
        del self.of_job[grant.job][grant.node]
        self._told(grant)
        self.emit(NodeReleased, node=grant.node, job=grant.job, grant=grant.number, by=by)

    def _told(self, grant: Grant) -> None:
        self._changed = True
        self._nodes_to_tell[grant.node] = None
        self._jobs_to_tell[grant.job] = None

    def grants_of(self, job: str) -> Iterable[Grant]:
        """Return a job's grants, those that it is to give back among them."""
        return tuple(self.of_job.get(job, {}).values())

    def own(self, job: str) -> list[str]:
        """Return the nodes that are a job's own, and stay so far: none that waits there, none that is drained."""
        return [
            node
            for node, grant in self.of_job.get(job, {}).items()
            if not (grant.recalled or grant.replaced or grant.standby or self.nodes[node].drained)
        ]

    def has(self, job: str) -> int:
        """Return how many nodes are a job's own, and stay so far."""
        return len(self.own(job))

    def standbys(self, job: str) -> list[str]:
        """Return the nodes that wait in a job to take the place of one that is lost, and stay so far."""
        return [
            node
            for node, grant in self.of_job.get(job, {}).items()
            if grant.standby and not (grant.recalled or self.nodes[node].drained)
        ]

    def free(self) -> list[str]:
        """Return the nodes that are here and nobody's, and may be given to somebody."""
        return [name for name in self.here if name not in self.grants and not self.nodes[name].drained]

    def usable(self, job: str) -> int:
        """Return how many nodes would do for a job: that are here, may well come back, or are known to come."""
        before = self.now - self.config.back_s
        there = [name for name in self.nodes if name in self.grants or self.away.get(name, self.now) > before]
        refused = self.refused.get(job, frozenset())
        return sum(name not in refused for name in there) + max(0, self.config.expected - len(self.nodes))

    # ---- what is told ----

    def tell_node(self, name: str) -> None:
        """Tell a node whose it is, after this call."""
        self._nodes_to_tell[name] = None

    def tell_job(self, name: str) -> None:
        """Tell a job which nodes it has, after this call."""
        self._jobs_to_tell[name] = None

    def send(self, connection: int, message: ToNode) -> None:
        """Send to an agent."""
        self._sends.append(TellNode(connection, message))

    def close(self, connection: int) -> None:
        """Close an agent's connection."""
        self._sends.append(CloseNode(connection))

    def begin_job(self, job: PooledJob) -> None:
        """Have a coordinator for a job."""
        self._first.append(BeginJob(job))

    def close_job(self, job: PooledJob) -> None:
        """A job needs no coordinator any more; one that is begun again in the same call needs another."""
        self._first.append(CloseJob(job.name, job.submission))

    def foresee(self, question: Foresight) -> None:
        """Have plans made for what can happen next."""
        self._sends.append(Foresee(question))

    def flush(self, before: Sequence[PoolInstruction] = ()) -> list[PoolInstruction]:
        """Return everything gathered, in order, and start anew; `before`: what comes first of all."""
        out: list[PoolInstruction] = list(before)
        if self._changed:
            self.record = PoolRecord(
                schema=self.record.schema,
                pool=self.record.pool,
                term=self._term,
                version=self.version,
                last_grant=self._last_grant,
                last_submission=self._last_submission,
                nodes=dict(self.nodes),
                grants=dict(self.grants),
                jobs=dict(self.jobs),
                seq=self._seq,
                outbox=tuple(self._events),
                failures=self.failures,
                began_at=self.began_at,
                reserve=self.reserve if self.config.auto_reserve else 0,
                repairs=self.repairs,
                identity=self._identity,
                url=self._url,
            )
            out.append(PersistPool(self.record))
        out += [EmitPool(event) for event in self._events]
        out += self._first
        out += self._told_by_record()
        out += self._sends
        self._changed = False
        self._events, self._first, self._sends = [], [], []
        self._nodes_to_tell, self._jobs_to_tell = {}, {}
        return out

    def _told_by_record(self) -> list[PoolInstruction]:
        """Say how things stand, by the record as it is now."""
        out: list[PoolInstruction] = []
        for name in self._nodes_to_tell:
            if name in self.here:
                out.append(TellNode(self.here[name].connection, self._whose(name)))
        for name in self._jobs_to_tell:
            job = self.jobs.get(name)
            if job is not None and job.state in ("admitted", "suspending", "stopping"):
                out.append(TellJob(name, self._shares(job)))
        return out

    def _whose(self, node: str) -> NodeGrant:
        term, version, grant = self.record.term, self.record.version, self.grants.get(node)
        if grant is None or grant.session != self.nodes[node].session:
            return NodeGrant(term=term, version=version, identity=self._identity)
        return NodeGrant(
            identity=self._identity,
            term=term,
            version=version,
            grant=grant.number,
            job=grant.job,
            submission=self.jobs[grant.job].submission,
            standby=grant.standby,
        )

    def _shares(self, job: PooledJob) -> JobShares:
        grants = self.of_job.get(job.name, {})
        return JobShares(
            term=self.record.term,
            version=self.record.version,
            submission=job.submission,
            grants={node: grant.number for node, grant in grants.items()},
            leaving=frozenset(grant.number for grant in grants.values() if grant.recalled),
            standbys=frozenset(grant.number for grant in grants.values() if grant.standby),
            role_versions={node: grant.version for node, grant in grants.items()},
            wish="stop_now" if job.state == "stopping" and job.unsaved else _WISHES.get(job.state, "run"),
            stranded=job.name in self.stranded,
            failure_rate=self.failure_rate,
        )
