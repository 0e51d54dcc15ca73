"""What happens in a pool, one JSON object a line, in its own journal: a job's own events are in the job's.

Every event has `time` (unix seconds), `event`, `pool`, `term` and `seq`, its place in the pool's journal.
"""

from __future__ import annotations

import msgspec

#: of what events are called and carry
POOL_FORMAT = 1


class PoolEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="PoolEvent"):
    """What all events of a pool carry."""

    time: float
    pool: str
    term: int
    seq: int


class PoolStarted(PoolEvent, frozen=True, kw_only=True, tag="pool_started"):
    """The pool's server runs, for the first time or (`term` > 1) again. `format`: of these events."""

    url: str
    pid: int
    policy: str
    reserve: int
    format: int = POOL_FORMAT


class NodeGranted(PoolEvent, frozen=True, kw_only=True, tag="node_granted"):
    """A node is a job's from here on, by this grant; `standby`: it waits there to take the place of another."""

    node: str
    job: str
    grant: int
    standby: bool = False


class RoleChanged(PoolEvent, frozen=True, kw_only=True, tag="role_changed"):
    """A node is a standby of its job from here on, or is none any more. `by`: whose doing, job or pool."""

    node: str
    job: str
    grant: int
    standby: bool
    by: str


class NodeReleased(PoolEvent, frozen=True, kw_only=True, tag="node_released"):
    """A grant is over. `by`: who said so, job (its record does without the node) or node (nothing of it runs there)."""

    node: str
    job: str
    grant: int
    by: str


class NodeAdded(PoolEvent, frozen=True, kw_only=True, tag="node_added"):
    """A node is of the pool."""

    node: str
    rack: str
    zone: str


class NodeForgotten(PoolEvent, frozen=True, kw_only=True, tag="node_forgotten"):
    """A node is of the pool no more. `why`: it left, or a person said that it does not come back."""

    node: str
    why: str


class NodeDrained(PoolEvent, frozen=True, kw_only=True, tag="node_drained"):
    """A person has a node looked after: its job leaves it in good order, and nobody is given it."""

    node: str


class NodeUndrained(PoolEvent, frozen=True, kw_only=True, tag="node_undrained"):
    """A node that was drained may be given to jobs again."""

    node: str


class JobSubmitted(PoolEvent, frozen=True, kw_only=True, tag="job_submitted"):
    """A job is in the queue; `submission`: its number, which no other ever has."""

    job: str
    submission: int
    min_nodes: int
    max_nodes: int


class JobAdmitted(PoolEvent, frozen=True, kw_only=True, tag="job_admitted"):
    """A job leaves the queue: so many nodes are given to it, as they become free. `waited_s`: in the queue."""

    job: str
    nodes: int
    waited_s: float


class JobResized(PoolEvent, frozen=True, kw_only=True, tag="job_resized"):
    """A job is to have another number of nodes, by planned moves. `lost`: it had lost some of them by itself."""

    job: str
    from_nodes: int
    to_nodes: int
    lost: int
    why: str


class JobSuspended(PoolEvent, frozen=True, kw_only=True, tag="job_suspended"):
    """A job is saved and has no node. `preempted`: others need them, it is in the queue again; else a person asked."""

    job: str
    preempted: bool


class JobResumed(PoolEvent, frozen=True, kw_only=True, tag="job_resumed"):
    """A person lets a suspended job go on: it is in the queue again."""

    job: str


class JobEnded(PoolEvent, frozen=True, kw_only=True, tag="job_ended"):
    """A job is over. `state`: finished, stopped, failed; `why` in words."""

    job: str
    state: str
    why: str


class PlanDecided(PoolEvent, frozen=True, kw_only=True, tag="plan_decided"):
    """How many nodes each job is to have. `nodes`: that there are; `waiting`: who waits, and why.

    `trigger`: what has led to it; `before`: how many each had to have. `source`: whether it was looked up (table) or
    found only now (solved). `starved`: whom the plan would leave with no node if nobody had a least to keep, and why.
    `reserve`: nodes kept back for jobs that lose one; `reserve_why`: where the pool decides how many, why.
    Of a policy that reckons with it, in weighted FLOP until the next failure: `gain`, what is
    done with these shares, `cost`, what the changes keep from being done, `next_best`, the best other division, and
    `given_up`, how much less that is worth.
    """

    nodes: int
    shares: dict[str, int]
    waiting: dict[str, str]
    trigger: str = ""
    before: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    source: str = "solved"
    gain: float | None = None
    cost: float | None = None
    next_best: dict[str, int] | None = None
    given_up: float | None = None
    starved: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    reserve: int = 0
    reserve_why: str = ""


class PoolStoreReturned(PoolEvent, frozen=True, kw_only=True, tag="store_returned"):
    """The store answers again, which had been away for `away_s`: no node changed its owner meanwhile."""

    away_s: float


class PoolJournalRepaired(PoolEvent, frozen=True, kw_only=True, tag="journal_repaired"):
    """The journal had lost its events `from_seq` to `to_seq`; this one, with the number `to_seq`, stands for them."""

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
