"""The events of a pool, one JSON object per line, in its own journal. The events of a job are in the job's journal.

Each event has `time` (unix seconds), `event`, `pool`, `term`, and `seq`, its number in the pool's journal.
"""

from __future__ import annotations

import msgspec

#: version of the event names and fields
POOL_FORMAT = 1


class PoolEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="PoolEvent"):
    """The fields of all events of a pool."""

    time: float
    pool: str
    term: int
    seq: int


class PoolStarted(PoolEvent, frozen=True, kw_only=True, tag="pool_started"):
    """The server of the pool runs, for the first time or again (`term` > 1)."""

    url: str
    pid: int
    policy: str
    reserve: int
    #: version of these events
    format: int = POOL_FORMAT


class NodeGranted(PoolEvent, frozen=True, kw_only=True, tag="node_granted"):
    """A job gets a node."""

    node: str
    job: str
    grant: int
    #: whether the node waits to replace another one
    standby: bool = False


class RoleChanged(PoolEvent, frozen=True, kw_only=True, tag="role_changed"):
    """A node has become a standby of its job, or is no longer one."""

    node: str
    job: str
    grant: int
    standby: bool
    #: job or pool
    by: str


class NodeReleased(PoolEvent, frozen=True, kw_only=True, tag="node_released"):
    """A grant has ended."""

    node: str
    job: str
    grant: int
    #: job (its record does without the node) or node (no process of the grant is left)
    by: str


class NodeAdded(PoolEvent, frozen=True, kw_only=True, tag="node_added"):
    """A node has joined the pool."""

    node: str
    rack: str
    zone: str


class NodeForgotten(PoolEvent, frozen=True, kw_only=True, tag="node_forgotten"):
    """A node no longer belongs to the pool."""

    node: str
    #: it left, or a user removed it
    why: str


class NodeDrained(PoolEvent, frozen=True, kw_only=True, tag="node_drained"):
    """A user drains a node: its job leaves it, and no job gets it."""

    node: str


class NodeUndrained(PoolEvent, frozen=True, kw_only=True, tag="node_undrained"):
    """A drained node may be given to jobs again."""

    node: str


class JobSubmitted(PoolEvent, frozen=True, kw_only=True, tag="job_submitted"):
    """A job is in the queue."""

    job: str
    #: its number; no other job ever has the same
    submission: int
    min_nodes: int
    max_nodes: int


class JobAdmitted(PoolEvent, frozen=True, kw_only=True, tag="job_admitted"):
    """A job leaves the queue. It gets this many nodes, as they become free."""

    job: str
    nodes: int
    #: seconds in the queue
    waited_s: float


class JobResized(PoolEvent, frozen=True, kw_only=True, tag="job_resized"):
    """A job gets another number of nodes, by planned moves."""

    job: str
    from_nodes: int
    to_nodes: int
    #: how many nodes it had lost before
    lost: int
    why: str


class JobSuspended(PoolEvent, frozen=True, kw_only=True, tag="job_suspended"):
    """A job is saved, and has no nodes."""

    job: str
    #: whether other jobs need its nodes, so that it is in the queue again; else a user asked for it
    preempted: bool


class JobResumed(PoolEvent, frozen=True, kw_only=True, tag="job_resumed"):
    """A user resumes a suspended job: it is in the queue again."""

    job: str


class JobEnded(PoolEvent, frozen=True, kw_only=True, tag="job_ended"):
    """A job has ended."""

    job: str
    #: finished, stopped or failed
    state: str
    why: str


class PlanDecided(PoolEvent, frozen=True, kw_only=True, tag="plan_decided"):
    """The number of nodes for each job has changed.

    `gain`, `cost`, `given_up` are in weighted FLOP until the next failure, for policies that use them.
    """

    #: nodes of the pool
    nodes: int
    #: nodes for each job
    shares: dict[str, int]
    #: waiting jobs, with the reason
    waiting: dict[str, str]
    #: the reason for the new plan
    trigger: str = ""
    #: nodes for each job before
    before: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    #: table (computed before) or solved (computed now)
    source: str = "solved"
    #: gained by the new shares
    gain: float | None = None
    #: lost to the changes
    cost: float | None = None
    #: the second best shares
    next_best: dict[str, int] | None = None
    #: how much less the second best is worth
    given_up: float | None = None
    #: jobs that would have no nodes without their `min_nodes`, with the reason
    starved: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    #: nodes kept for jobs that lose one
    reserve: int = 0
    #: the reason, if the pool chooses the reserve
    reserve_why: str = ""


class PoolStoreReturned(PoolEvent, frozen=True, kw_only=True, tag="store_returned"):
    """The store answers again. No node changed its job meanwhile."""

    #: seconds without the store
    away_s: float


class PoolJournalRepaired(PoolEvent, frozen=True, kw_only=True, tag="journal_repaired"):
    """The journal had lost its events `from_seq` to `to_seq`. This event, with number `to_seq`, replaces them."""

    from_seq: int
    to_seq: int


AnyPoolEvent = (
    PoolStarted
    | NodeGranted
    | RoleChanged
    | NodeReleased
    | NodeAdded
    | NodeForgotten
    | NodeDrained
    | NodeUndrained
    | JobSubmitted
    | JobAdmitted
    | JobResized
    | JobSuspended
    | JobResumed
    | JobEnded
    | PlanDecided
    | PoolStoreReturned
    | PoolJournalRepaired
)
