"""What the pool keeps in the store, under `pool/record`: the only truth about who owns a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import Struct
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.sharing import JobPace

#: Raised with every change after which a pool would misread what one of before wrote, or the other way round.
POOL_SCHEMA = 2

#: what a pool knows of a job: in the queue; nodes are given to it; on its way out of its nodes; without any; over
PooledState = Literal["queued", "admitted", "suspending", "suspended", "stopping", "finished", "stopped", "failed"]
#: those of jobs that are over
OVER: frozenset[PooledState] = frozenset(("finished", "stopped", "failed"))


class Grant(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Grant"):
    """A job's numbered right to a node, for one session of the node's agent."""

    number: int
    node: str
    session: str
    job: str
    #: the version of the record in which the pool last decided `standby`: with the grant, or when it called the node
    version: int
    #: the job must leave the node, in good order
    recalled: bool = False
    #: the job must leave the node once its replacement trains
    replaced: bool = False
    #: the node waits as a standby: as decided in `version`, or as the job has said since it heard of that
    standby: bool = False


class PoolNode(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="PoolNode"):
    """A node of the pool, connected or not. `session`: of its agent's process that came last.

    `drained`: a person has it looked after: no job is given it. `passing`: its name is of its agent's process alone.
    """

    name: str
    session: str
    rack: str = ""
    zone: str = ""
    drained: bool = False
    passing: bool = False


class PooledJob(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="PooledJob"):
    """A job of the pool; times are unix seconds.

    `submission`: its number, which no other ever has. `admitted_at`: when it was begun last. `share`: how many nodes it
    was to have when that was decided last; `grew_at`: when that was raised last. `preempted`: it leaves its nodes, or
    has left them, for other jobs. `wished_at`: the version of the record in which what it is to do with its nodes
    changed last. `why`: it is in the queue, or over, for this reason. `unsaved`: it is to end at once, without being
    saved. `pace`: how fast it trains, all that was ever measured of it.
    """

    name: str
    submission: int
    spec: JobSpec
    state: PooledState = "queued"
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    share: int = 0
    grew_at: float = 0.0
    preempted: bool = False
    wished_at: int = 0
    why: str = ""
    pace: JobPace | None = None
    unsaved: bool = False

    @property
    def told_state(self) -> str:
        """Its state as users are told: one that others' weights have taken out of its nodes is waiting."""
        starved = self.state == "queued" and self.preempted and not self.spec.preemptible
        return "waiting" if starved else self.state


class PoolRecord(Struct, frozen=True, kw_only=True, tag="PoolRecord"):
    """The pool's durable state, replaced as a whole by compare-and-swap.

    `version` counts its changes: what jobs and nodes are told carries it. `last_grant`, `last_submission`: the highest
    numbers ever given. `grants`: those in force, by node: a node has one or none. `seq`: of the newest event;
    `outbox`: the events of the transition that wrote this record. `failures`: so often a job has lost a node since the
    pool was first begun, `began_at` (unix seconds). `reserve`: nodes kept back, where the pool decides how many;
    `repairs`: for how long nodes were away that had failed, seconds, the newest last.
    """

    schema: int
    pool: str
    term: int = 0
    version: int = 0
    last_grant: int = 0
    last_submission: int = 0
    nodes: Mapping[str, PoolNode] = msgspec.field(default_factory=dict[str, PoolNode])
    grants: Mapping[str, Grant] = msgspec.field(default_factory=dict[str, Grant])
    jobs: Mapping[str, PooledJob] = msgspec.field(default_factory=dict[str, PooledJob])
    seq: int = 0
    outbox: tuple[AnyPoolEvent, ...] = ()
    failures: int = 0
    began_at: float = 0.0
    reserve: int = 0
    repairs: tuple[float, ...] = ()
    #: Where the server of this term serves; "" if an earlier version wrote this.
    url: str = ""
    #: A random name that the pool keeps for life. Nodes report it, so that pools of the same name are told apart.
    identity: str = ""
