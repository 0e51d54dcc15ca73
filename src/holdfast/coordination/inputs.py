"""What the coordinator's machine is fed: each as (input, now)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import AgentMessage
from holdfast.protocol.pool.sharing import JobShares

if TYPE_CHECKING:
    from holdfast.coordination.experts.searching import Found  # its imports take half a second that no command needs


@dataclass(frozen=True, slots=True)
class Received:
    """An agent's message on a connection; the first must be Hello. The shell never reuses a number."""

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
    """Who saw a failure, and what is known of it.

    `category`: its class; None: not classified. `step`, `phase`, `micro_batch`: where it stood; None: not known.
    """

    detector: Detector
    category: str | None = None
    detail: str = ""
    step: int | None = None
    phase: str | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What failed, whoever saw it. Its scope: a node, or (`worker` given) one process of it, which has ended.

    `since`: the last sign of life, unix seconds. `severity`: what it takes out of the job.
    """

    kind: FailureKind
    node: str
    worker: str = ""
    severity: Severity
    since: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class InjectFault:
    """A user injects a fault. `worker` None: the whole node; `step` None: now."""

    fault: str
    node: str
    worker: int | None = None
    step: int | None = None
    phase: str = ""
    times: float = 3.0
    by_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Undrain:
    """A user lets a node come back that is quarantined, or was drained."""

    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """A user wants nodes to leave, in good order."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveNodes:
    """A user wants nodes to give their places to standbys, these in order or any, and to be standbys themselves."""

    nodes: tuple[str, ...]
    to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveState:
    """A user asks for a checkpoint, now."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The user ends the job (Ctrl-C); `save`: with a checkpoint of what it has led to, where it keeps any."""

    exit_code: int
    why: str
    save: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A search that PlanExperts asked for is over, after whatever time; None where it found nothing."""

    generation: int
    found: Found | None


@dataclass(frozen=True, slots=True)
class StoreBack:
    """The store answers again: for so long nothing could be decided."""

    away_s: float


@dataclass(frozen=True, slots=True)
class FileFailed:
    """An output file of the coordinator cannot be written."""

    file: str
    why: str


@dataclass(frozen=True, slots=True)
class PoolSaid:
    """The pool in which the job runs says which nodes are its own, and what it is to do with them."""

    shares: JobShares


#: what users, the shell and the pool ask for
Request = InjectFault | Drain | MoveNodes | Undrain | SaveState | Shutdown | Planned | StoreBack | PoolSaid
REQUESTS = (InjectFault, Drain, MoveNodes, Undrain, SaveState, Shutdown, Planned, StoreBack, PoolSaid)
Input = Received | Disconnected | Tick | Failure | FileFailed | Request
