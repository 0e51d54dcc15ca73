"""The record of a pool in the store, under `pool/record`. It alone decides which job has a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import Struct
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.sharing import JobPace

#: Raised whenever an older and a newer pool would misread each other's records.
POOL_SCHEMA = 2

#: State of a job: in the queue; with nodes; leaving its nodes; without nodes; leaving its nodes to end; the rest:
#: ended.
PooledState = Literal["queued", "admitted", "suspending", "suspended", "stopping", "finished", "stopped", "failed"]
#: states of ended jobs
OVER: frozenset[PooledState] = frozenset(("finished", "stopped", "failed"))


class Grant(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Grant"):
    """A job's numbered right to a node, for one session of the node's agent."""

    number: int
    node: str
    session: str
    job: str
    #: version of the record in which the pool last decided `standby`: with the grant, or when it called the node
    version: int
    #: the job must leave the node, in good order
    recalled: bool = False
    #: the job must leave the node once its replacement trains
    replaced: bool = False
    #: the node waits as a standby: as decided in `version`, or as the job has said since it heard of that
    standby: bool = False


class PoolNode(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="PoolNode"):
    """A node of the pool, connected or not."""

    name: str
    #: session of its newest agent
    session: str
    rack: str = ""
    zone: str = ""
    #: whether a user drains it, so that no job gets it
    drained: bool = False
    #: whether its name belongs to its agent's process alone
    passing: bool = False


class PooledJob(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="PooledJob"):
    """A job of the pool. Times are unix seconds."""

    name: str
    #: its number; no other job ever has the same
    submission: int
    spec: JobSpec
    state: PooledState = "queued"
    submitted_at: float = 0.0
    #: when it last got nodes
    admitted_at: float = 0.0
    #: nodes that it should have by the last plan
    share: int = 0
    #: when its share last grew
    grew_at: float = 0.0
    #: whether other jobs took its nodes
    preempted: bool = False
    #: version of the record in which its wish last changed
    wished_at: int = 0
    #: why it is in the queue, or has ended
    why: str = ""
    #: all measurements of its step times
    pace: JobPace | None = None
    #: whether it ends at once, without being saved
    unsaved: bool = False

    @property
    def user_state(self) -> str:
        """The state for users: "waiting" for a queued job that lost its nodes to other jobs' weights, else `state`.

        If the job is preemptible, it stays "queued".
        """
        starved = self.state == "queued" and self.preempted and not self.spec.preemptible
        return "waiting" if starved else self.state


class PoolRecord(Struct, frozen=True, kw_only=True, tag="PoolRecord"):
    """The durable state of the pool, replaced as a whole by compare-and-swap."""

    schema: int
    pool: str
    term: int = 0
    #: Number of changes. Messages to jobs and nodes carry it.
    version: int = 0
    #: highest number of a grant so far
    last_grant: int = 0
    #: highest number of a job so far
    last_submission: int = 0
    nodes: Mapping[str, PoolNode] = msgspec.field(default_factory=dict[str, PoolNode])
    #: grants in force, by node; a node has at most one
    grants: Mapping[str, Grant] = msgspec.field(default_factory=dict[str, Grant])
    jobs: Mapping[str, PooledJob] = msgspec.field(default_factory=dict[str, PooledJob])
    #: number of the newest event
    seq: int = 0
    #: events of the transition that wrote this record
    outbox: tuple[AnyPoolEvent, ...] = ()
    #: nodes that jobs have lost since `began_at`
    failures: int = 0
    #: when the pool first began, unix seconds
    began_at: float = 0.0
    #: nodes that are kept back, if the pool chooses the number
    reserve: int = 0
    #: seconds for which failed nodes were away, the newest last
    repairs: tuple[float, ...] = ()
    #: URL of the server of this term; "" if an earlier version wrote this
    url: str = ""
    #: A random name that the pool keeps forever. Nodes report it, so that pools with the same name are distinguished.
    identity: str = ""
