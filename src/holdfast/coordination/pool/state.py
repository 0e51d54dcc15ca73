"""The state of a pool: record, connections, time, and the changes, events and messages of the current call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.coordination.pool.instructions import (
    DisconnectNode,
    EmitPool,
    PersistPool,
    PoolInstruction,
    SendToJob,
    SendToNode,
    SolveNextPlans,
    StartCoordinator,
    StopCoordinator,
    StopOutdatedPool,
)
from holdfast.coordination.pool.share.interface import Policy
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import NodeGrant, ToNode
from holdfast.protocol.pool.events import AnyPoolEvent, NodeGranted, NodeReleased, RoleChanged
from holdfast.protocol.pool.record import OVER, Grant, PooledJob, PoolNode, PoolRecord
from holdfast.protocol.pool.sharing import JobCosts, JobPace, JobShares, JobState, NodeUnfit, PoolWish

E = TypeVar("E", bound=AnyPoolEvent)

#: Limit of nodes. Each is in the record, which is written as a whole.
MAX_NODES = 8192
#: how many ended jobs are remembered
KEPT_JOBS = 256
#: how many repairs count, the newest ones
KEPT_REPAIRS = 64
#: Relative change of the failure rate from which jobs get it. Each job writes it to its record.
RATE_CHANGE = 0.25
_WISHES: dict[str, PoolWish] = {"suspending": "suspend", "stopping": "stop"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Settings of a pool; times in seconds."""

    name: str
    policy: Policy
    #: nodes reserved for jobs that lose one; only preemptible jobs use them meanwhile
    reserve: int = 0
    #: choose the reserve by its worth, and ignore `reserve`
    auto_reserve: bool = False
    #: number of nodes that will join
    expected: int = 0
    #: a node that is silent this long is disconnected
    lease_s: float = 3.0
    #: how long a restarted server waits for its nodes before it decides anything new
    settle_s: float = 5.0
    #: how long a disconnected node is expected back
    back_s: float = 60.0
    #: how long a disconnected node is remembered; one with a temporary name only `back_s`
    forget_s: float = 86_400.0
    #: most nodes that the pool remembers
    most_nodes: int = MAX_NODES
    #: random name of the pool, used if its record has none
    identity: str = ""


@dataclass(slots=True)
class Connected:
    """A node of the pool whose agent is connected."""

    name: str
    connection: int
    #: when the node last sent something, unix seconds
    seen: float
    #: as in `NodeState`
    changes: int = 0


class PoolState:
    """The record in parts that can be changed; `flush` puts one PersistPool before all messages."""

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
        self.connected: dict[str, Connected] = {}
        #: when each other node disconnected, in that order
        self.away: dict[str, float] = {}
        self.by_connection: dict[int, Connected] = {}
        #: by job, the nodes that it refuses in their present state
        self.refused: dict[str, frozenset[str]] = {}
        #: by job, all refusals that it has reported
        self._unfit: dict[str, Mapping[str, NodeUnfit]] = {}
        #: by changed node, the newest grant before the change: refusals up to that grant are outdated
        self._unfit_outdated: dict[str, int] = {}
        #: jobs for which too few nodes are usable
        self.stranded: frozenset[str] = frozenset()
        #: by job, the grants of the nodes that train
        self.training_grants: dict[str, frozenset[int]] = {}
        #: by job, the measured cost of a move, seconds
        self.move_s: dict[str, float] = {}
        #: by job, the measured costs of failures
        self.costs: dict[str, JobCosts] = {}
        #: by job, its last report of its pace
        self.paces: dict[str, JobPace] = {}
        #: failures of a node per second, as last sent to jobs; 0 before the first time
        self.failure_rate = 0.0
        self._term = record.term
        self._seq = record.seq
        self._identity = record.identity
        #: term and version of the newest record before this server
        self.found_version = record.term, record.version
        #: whether the record counts as the newest: every node had time to prove otherwise
        self.is_newest = not record.identity
        self._last_grant = record.last_grant
        self._last_submission = record.last_submission
        self.failures = record.failures
        self.began_at = record.began_at
        self._url = record.url
        #: nodes reserved for jobs that lose one
        self.reserve = record.reserve if config.auto_reserve else config.reserve
        #: how long failed nodes were away, the newest
        self.repairs: tuple[float, ...] = record.repairs
        #: when the failed nodes that are still away failed
        self._failed_at: dict[str, float] = {}
        self._changed = False
        self._events: list[AnyPoolEvent] = []
        self._first: list[PoolInstruction] = []
        self._sends: list[PoolInstruction] = []
        self._nodes_to_notify: dict[str, None] = {}
        self._jobs_to_notify: dict[str, None] = {}

    def copy(self) -> PoolState:
        """Return a copy for forecasts; nothing is sent from it.

        It is made from the last written record, with the connections and reports of now.
        """
        other = PoolState(self.config, self.record)
        other.now = self.now
        for name in (
            "connected",
            "by_connection",
            "away",
            "refused",
            "training_grants",
            "move_s",
            "costs",
            "_unfit",
            "_unfit_outdated",
        ):
            setattr(other, name, dict(getattr(self, name)))
        other.stranded = self.stranded
        return other

    # ---- the next record ----

    @property
    def version(self) -> int:
        """Version of the record that will contain the changes of this call."""
        return self.record.version + 1

    def open_term(self, url: str) -> int:
        """Open the term of a new server at `url`; return its number."""
        self._url = url
        self._term += 1
        self._identity = self._identity or self.config.identity
        self._changed = True
        return self._term

    @property
    def identity(self) -> str:
        """The pool's random name, as in its record."""
        return self._identity

    def force_write(self) -> None:
        """Write the record even if it is unchanged.

        The messages of this call are sent only if the write succeeds.
        """
        self._changed = True

    def stop_outdated(self, newer: str) -> None:
        """End this server, not the pool: the store is older than the pool, as `newer` proves."""
        self.force_write()  # If another server has replaced this one, this one ends at the write.
        self._sends.append(StopOutdatedPool(newer))

    def emit(self, event_type: type[E], /, **fields: Any) -> None:
        """Emit an event; it stays in the record's outbox until it is in the journal."""
        self._seq += 1
        self._changed = True
        self._events.append(event_type(time=self.now, pool=self.record.pool, term=self._term, seq=self._seq, **fields))

    def put_node(self, node: PoolNode) -> None:
        """Record a node."""
        self.nodes[node.name] = node
        self._changed = True

    def drop_node(self, name: str) -> None:
        """Forget a node, which must have no grant. If it had failed, its absence counts as a repair time."""
        assert name not in self.grants, name
        del self.nodes[name]
        self.record_repair(name)
        self._unfit_outdated.pop(name, None)
        self.away.pop(name, None)
        self._changed = True

    def new_submission(self) -> int:
        """Return a number that no other job has."""
        self._last_submission += 1
        return self._last_submission

    def put_job(self, job: PooledJob, **changes: Any) -> PooledJob:
        """Record a job with changes, and return it.

        Its coordinator is notified if the job is new, or if its state or whether it ends unsaved has changed.
        """
        changed = replace(job, **changes) if changes else job
        known = self.jobs.get(job.name)
        self.jobs[job.name] = changed
        self._changed = True
        if known is None or (known.state, known.unsaved) != (changed.state, changed.unsaved):
            self._jobs_to_notify[job.name] = None
        return changed

    def forget_old_jobs(self, room: int = 0, size: Callable[[JobSpec], int] = lambda _: 0) -> None:
        """Forget the oldest ended jobs, beyond `KEPT_JOBS` and beyond the room in the record.

        By default, only their number counts.

        Args:
            room: bytes for all ended jobs that stay
            size: returns the bytes of a job's specification
        """
        over = sorted((job for job in self.jobs.values() if job.state in OVER), key=lambda job: -job.submission)
        for index, job in enumerate(over):
            room -= size(job.spec)
            if index >= KEPT_JOBS or room < 0:
                del self.jobs[job.name]

    # ---- reports of jobs ----

    def record_report(self, job: str, report: JobState) -> None:
        """Remember a job's report: refused nodes, training grants, and measured costs."""
        self._unfit[job], self.training_grants[job] = report.refuses, report.trains
        self.refused[job] = frozenset(self.unfit_nodes(job))
        if report.move_s is not None:
            self.move_s[job] = report.move_s
        self.costs[job] = report.costs

    def unfit_nodes(self, job: str) -> dict[str, str]:
        """Return the nodes that a job refuses in their present state, and why."""
        known = self._unfit.get(job, {}).items()
        return {node: unfit.why for node, unfit in known if not 0 < unfit.grant <= self._unfit_outdated.get(node, 0)}

    def outdate_unfit(self, node: str) -> None:
        """Ignore refusals of a node by grants up to now, because it has changed: jobs may accept it again."""
        self._unfit_outdated[node] = self._last_grant
        for job, known in self._unfit.items():
            if node in known:
                self.refused[job] = frozenset(self.unfit_nodes(job))

    def forget_report(self, job: str) -> None:
        """Forget the reports of a job."""
        for reports in (self._unfit, self.refused, self.training_grants, self.move_s, self.costs, self.paces):
            reports.pop(job, None)

    def set_reserve(self, nodes: int) -> bool:
        """Set the number of reserved nodes; return whether it changed."""
        if nodes == self.reserve:
            return False
        self.reserve = nodes
        self._changed = True
        return True

    def record_repair(self, node: str) -> None:
        """Record how long a failed node was away, once it is back or dropped."""
        failed_at = self._failed_at.pop(node, None)
        if failed_at is not None:
            self.repairs = (*self.repairs, max(0.0, self.now - failed_at))[-KEPT_REPAIRS:]

    def update_failure_rate(self, failure_rate: float) -> None:
        """Keep a new failure rate of nodes and send it to the jobs, if it differs much from the one they know."""
        known = self.failure_rate
        if abs(failure_rate - known) > RATE_CHANGE * known:
            self.failure_rate = failure_rate
            for job in self.jobs:
                self.notify_job(job)

    def set_stranded(self, jobs: frozenset[str]) -> None:
        """Set the jobs for which too few nodes are usable, and notify the ones for which that has changed."""
        for job in jobs ^ self.stranded:
            self.notify_job(job)
        self.stranded = jobs

    # ---- grants ----

    def grant_node(self, node: str, job: str, *, standby: bool = False) -> None:
        """Grant a free node to a job, to train or as a standby: record it under a new number, notify node and job, and
        emit it.
        """
        assert node not in self.grants, f"node {node} has an owner: {self.grants[node]}"
        self._last_grant += 1
        session = self.nodes[node].session
        number, version = self._last_grant, self.version
        grant = Grant(number=number, node=node, session=session, job=job, version=version, standby=standby)
        self._put_grant(grant)
        self.emit(NodeGranted, node=node, job=job, grant=grant.number, standby=standby)

    def recall_node(self, node: str) -> None:
        """Ask a job to leave a node."""
        self._put_grant(replace(self.grants[node], recalled=True))

    def mark_replaced(self, node: str) -> None:
        """Ask a job to leave a node once its replacement trains."""
        self._put_grant(replace(self.grants[node], replaced=True))

    def unmark_replaced(self, node: str) -> None:
        """Cancel the replacement of a node: its job keeps it."""
        self._put_grant(replace(self.grants[node], replaced=False))

    def promote_standby(self, node: str) -> None:
        """Ask a standby to join its job.

        The job's earlier reports about the standby no longer count.
        """
        self._put_grant(replace(self.grants[node], standby=False, version=self.version))
        self._emit_role(node, by="pool")

    def set_standby(self, node: str, *, standby: bool) -> None:
        """Record the job's report whether a node of it is a standby; notify both and emit it if that has changed."""
        if self.grants[node].standby != standby:
            self._put_grant(replace(self.grants[node], standby=standby))
            self._emit_role(node, by="job")

    def _emit_role(self, node: str, by: str) -> None:
        """Emit the event of a changed role."""
        grant = self.grants[node]
        self.emit(RoleChanged, node=node, job=grant.job, grant=grant.number, standby=grant.standby, by=by)

    def _put_grant(self, grant: Grant) -> None:
        """Record a grant, and notify its node and job."""
        self.grants[grant.node] = grant
        self.of_job.setdefault(grant.job, {})[grant.node] = grant
        self._notify_both(grant)

    def release_grant(self, grant: Grant, by: str, *, failed: bool = False) -> None:
        """End a grant that the job's record or the node itself no longer has: notify both and emit it.

        A failure counts for the failure rate, and its time for repairs if the node is disconnected.

        Args:
            grant: the grant
            by: "job" or "node"
            failed: whether it ended without a recall
        """
        self.failures += failed
        if failed and grant.node not in self.connected:
            self._failed_at[grant.node] = self.away.get(grant.node, self.now)
        del self.grants[grant.node]
        del self.of_job[grant.job][grant.node]
        self._notify_both(grant)
        self.emit(NodeReleased, node=grant.node, job=grant.job, grant=grant.number, by=by)

    def _notify_both(self, grant: Grant) -> None:
        """Send the node and the job of a changed grant their state after this call."""
        self._changed = True
        self._nodes_to_notify[grant.node] = None
        self._jobs_to_notify[grant.job] = None

    def grants_of(self, job: str) -> Iterable[Grant]:
        """Return a job's grants, recalled ones included."""
        return tuple(self.of_job.get(job, {}).values())

    def own_nodes(self, job: str) -> list[str]:
        """Return the nodes that a job trains on and keeps: no standbys, drained or recalled nodes."""
        return [
            node
            for node, grant in self.of_job.get(job, {}).items()
            if not (grant.recalled or grant.replaced or grant.standby or self.nodes[node].drained)
        ]

    def own_count(self, job: str) -> int:
        """Return the number of `own_nodes`."""
        return len(self.own_nodes(job))

    def standbys(self, job: str) -> list[str]:
        """Return the standbys that a job keeps."""
        return [
            node
            for node, grant in self.of_job.get(job, {}).items()
            if grant.standby and not (grant.recalled or self.nodes[node].drained)
        ]

    def free_nodes(self) -> list[str]:
        """Return the connected nodes that can be granted."""
        return [name for name in self.connected if name not in self.grants and not self.nodes[name].drained]

    def usable_count(self, job: str) -> int:
        """Return how many nodes a job has not refused: granted, connected, expected, or recently disconnected ones.

        Nodes without a grant that were away for longer than the pool waits for them do not count.
        """
        before = self.now - self.config.back_s
        present = [name for name in self.nodes if name in self.grants or self.away.get(name, self.now) > before]
        refused = self.refused.get(job, frozenset())
        return sum(name not in refused for name in present) + max(0, self.config.expected - len(self.nodes))

    # ---- messages ----

    def notify_node(self, name: str) -> None:
        """Send a node its grant after this call."""
        self._nodes_to_notify[name] = None

    def notify_job(self, name: str) -> None:
        """Send a job its shares after this call."""
        self._jobs_to_notify[name] = None

    def send(self, connection: int, message: ToNode) -> None:
        """Send a message to an agent."""
        self._sends.append(SendToNode(connection, message))

    def close_connection(self, connection: int) -> None:
        """Close an agent's connection."""
        self._sends.append(DisconnectNode(connection))

    def start_coordinator(self, job: PooledJob) -> None:
        """Start a coordinator for a job."""
        self._first.append(StartCoordinator(job))

    def stop_coordinator(self, job: PooledJob) -> None:
        """Stop a job's coordinator; if the job starts again in the same call, it gets a new one."""
        self._first.append(StopCoordinator(job.name, job.submission))

    def request_next_plans(self, question: NextPlansQuestion) -> None:
        """Request plans for the possible next situations."""
        self._sends.append(SolveNextPlans(question))

    def flush(self, before: Sequence[PoolInstruction] = ()) -> list[PoolInstruction]:
        """Return all pending instructions, and clear them: first the record if it has changed, then events,
        coordinators, notifications and other messages.

        Args:
            before: instructions that come first
        """
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
        out += self._list_notifications()
        out += self._sends
        self._changed = False
        self._events, self._first, self._sends = [], [], []
        self._nodes_to_notify, self._jobs_to_notify = {}, {}
        return out

    def _list_notifications(self) -> list[PoolInstruction]:
        """Return the messages with the current grant to connected nodes, and with the current shares to jobs with a
        coordinator, that must be notified.
        """
        out: list[PoolInstruction] = []
        for name in self._nodes_to_notify:
            if name in self.connected:
                out.append(SendToNode(self.connected[name].connection, self._node_grant(name)))
        for name in self._jobs_to_notify:
            job = self.jobs.get(name)
            if job is not None and job.state in ("admitted", "suspending", "stopping"):
                out.append(SendToJob(name, self._job_shares(job)))
        return out

    def _node_grant(self, node: str) -> NodeGrant:
        """Return the message with the owner of a node: its job and grant, or no owner if the grant is of an earlier
        session of its agent.
        """
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

    def _job_shares(self, job: PooledJob) -> JobShares:
        """Return the message with the shares of a job."""
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
