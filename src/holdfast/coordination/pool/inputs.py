"""The inputs of the pool's state machine; each comes with the time, as (input, now)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.inputs import StoreBack, Tick
from holdfast.coordination.pool.node_selection.compacting import Relocation
from holdfast.coordination.pool.share.interface import Division
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import FromNode
from holdfast.protocol.pool.sharing import JobState


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message on an agent's connection; the first must be PoolHello. The shell never reuses a connection number."""

    connection: int
    message: FromNode


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """An agent's connection ended, from either side."""

    connection: int


@dataclass(frozen=True, slots=True)
class JobConnected:
    """A job's coordinator has connected, perhaps again: it needs the current shares."""

    job: str


@dataclass(frozen=True, slots=True)
class JobMessage:
    """A job's coordinator reports its state."""

    job: str
    report: JobState


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """A user submits a job."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class StopPooled:
    """A user ends a job, queued or not."""

    job: str
    #: end at once, without saving
    now: bool = False
    #: the reason that the job's users see
    why: str = "a person has stopped it"


@dataclass(frozen=True, slots=True)
class SuspendJob:
    """A user has a job save its state and leave its nodes."""

    job: str
    #: suspend even a job that saves no state
    force: bool = False


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """A user resumes a suspended job."""

    job: str


@dataclass(frozen=True, slots=True)
class UpdateJob:
    """A user changes the demands of a job."""

    job: str
    #: new values by setting: `min_nodes`, `max_nodes`, `sizes`, `weight`, `priority`
    changes: Mapping[str, int | float | Sequence[int]]


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """A user reports that a node will not return."""

    node: str


@dataclass(frozen=True, slots=True)
class DrainNodes:
    """A user drains nodes: their jobs leave them in good order, and no job gets them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainNodes:
    """A user ends the drain of nodes, so that jobs can get them again."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveJobs:
    """A user moves jobs between nodes, one move at a time; this replaces earlier moves that have not started."""

    moves: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class NextPlansSolved:
    """The answer to `SolveNextPlans`: a division for each future of the question."""

    number: int
    divisions: Sequence[Division]


PoolRequest = (
    SubmitJob | StopPooled | SuspendJob | ResumeJob | UpdateJob | ForgetNode | DrainNodes | UndrainNodes | MoveJobs
)
PoolInput = (
    NodeMessage | NodeDisconnected | JobConnected | JobMessage | Tick | StoreBack | NextPlansSolved | PoolRequest
)
