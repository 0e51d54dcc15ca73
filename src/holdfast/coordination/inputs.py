"""The inputs of the coordinator's state machine: each is passed as (input, now)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import AgentMessage
from holdfast.protocol.pool.sharing import JobShares

if TYPE_CHECKING:
    from holdfast.coordination.experts.searching import (
        PlacementAnswer,  # its imports take half a second that no command needs
    )


@dataclass(frozen=True, slots=True)
class Received:
    """A message on an agent's connection; the first one must be Hello. Connection numbers are never reused."""

    connection: int
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended, from either side."""

    connection: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The shell ticks at least every `tick_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """How a failure was detected, and its known details, as part of an input to the coordinator's state machine."""

    detector: Detector
    #: The failure class, or None if it is not classified.
    category: str | None = None
    detail: str = ""
    #: The step, phase and micro-batch at the failure; None if unknown.
    step: int | None = None
    phase: str | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failure of a node, or of one process on it."""

    kind: FailureKind
    node: str
    #: The process that failed and has ended; "" for the whole node.
    worker: str = ""
    #: What the job loses by the failure.
    severity: Severity
    #: The last sign of life, in Unix seconds.
    since: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class InjectFault:
    """A user injects a fault."""

    fault: str
    node: str
    #: The worker's index on its node, or None for the whole node.
    worker: int | None = None
    #: The step of the fault, or None for now.
    step: int | None = None
    phase: str = ""
    times: float = 3.0
    by_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Undrain:
    """A user readmits a node that is quarantined or was drained."""

    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """A user drains nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveNodes:
    """A user moves nodes: standbys take over their ranks, and the nodes become standbys."""

    nodes: tuple[str, ...]
    #: The standbys, in the order of `nodes`. For the remaining nodes any standby is used.
    to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveState:
    """A user requests a checkpoint now."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """A user ends the job (Ctrl-C)."""

    exit_code: int
    why: str
    #: Whether a checkpoint is saved first, if the job saves any.
    save: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A search that PlanExperts requested has ended."""

    generation: int
    #: The result, or None if nothing better was found.
    found: PlacementAnswer | None


@dataclass(frozen=True, slots=True)
class StoreBack:
    """The store answers again."""

    #: For this many seconds nothing could be decided.
    away_s: float


@dataclass(frozen=True, slots=True)
class FileFailed:
    """An output file of the coordinator cannot be written."""

    file: str
    why: str


@dataclass(frozen=True, slots=True)
class PoolSaid:
    """The pool sends the job's current share of nodes and the wanted standing."""

    shares: JobShares


#: Requests of users, of the shell and of the pool.
Request = InjectFault | Drain | MoveNodes | Undrain | SaveState | Shutdown | Planned | StoreBack | PoolSaid
REQUESTS = (InjectFault, Drain, MoveNodes, Undrain, SaveState, Shutdown, Planned, StoreBack, PoolSaid)
Input = Received | Disconnected | Tick | Failure | FileFailed | Request
