"""What the pool's machine is fed: each as (input, now)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.inputs import StoreBack, Tick
from holdfast.coordination.pool.places.compacting import Relocation
from holdfast.coordination.pool.share.interface import Division
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import FromNode
from holdfast.protocol.pool.sharing import JobState


@dataclass(frozen=True, slots=True)
class NodeSaid:
    """An agent's message on a connection; the first must be PoolHello. The shell never reuses a number."""

    connection: int
    message: FromNode


@dataclass(frozen=True, slots=True)
class NodeGone:
    """An agent's connection ended, from either side."""

    connection: int


@dataclass(frozen=True, slots=True)
class JobLinked:
    """A job's coordinator can be told something, anew: it is to hear how things stand."""

    job: str


@dataclass(frozen=True, slots=True)
class JobSaid:
    """A job's coordinator says how it stands."""

    job: str
    report: JobState


@dataclass(frozen=True, slots=True)
class Submit:
    """A user hands in a job."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class StopPooled:
    """A user ends a job, queued or not; `now`: at once, without its being saved. `why`: as its users are told."""

    job: str
    now: bool = False
    why: str = "a person has stopped it"


@dataclass(frozen=True, slots=True)
class SuspendJob:
    """A user has a job saved and leave its nodes; `force`: even where it saves nothing."""

    job: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """A user lets a suspended job go on."""

    job: str


@dataclass(frozen=True, slots=True)
class UpdateJob:
    """A user changes what a job asks for: `min_nodes`, `max_nodes`, `weight`, `priority`, by these names."""

    job: str
    changes: Mapping[str, int | float | Sequence[int]]


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """A user says that a node does not come back."""

    node: str


@dataclass(frozen=True, slots=True)
class DrainNodes:
    """A user has nodes looked after: their jobs leave them in good order, and no job is given them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainNodes:
    """A user lets nodes that were drained be given to jobs again."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveJobs:
    """A user has jobs give nodes up for others, one after another; what was asked for before is given up."""

    moves: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a `Foresee` has asked for is solved: a division for each of its futures."""

    number: int
    divisions: Sequence[Division]


PoolRequest = (
    Submit | StopPooled | SuspendJob | ResumeJob | UpdateJob | ForgetNode | DrainNodes | UndrainNodes | MoveJobs
)
PoolInput = NodeSaid | NodeGone | JobLinked | JobSaid | Tick | StoreBack | Foreseen | PoolRequest
