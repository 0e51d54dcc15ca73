"""What the coordinator's machine is fed, and what it asks its shell to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.protocol.events import AnyEvent
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage
from holdfast.protocol.plan import ExpertPlan
from holdfast.protocol.record import Record

if TYPE_CHECKING:
    from holdfast.planning import Shortage  # its imports take half a second that no command needs

# ---- inputs; every one is handled as (input, now) ----


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
class Failure:
    """What failed, whoever saw it: a node, or (`worker` given) one process of it, which has ended.

    `since`: the last sign of life, unix seconds.
    """

    kind: FailureKind
    node: str
    since: float
    worker: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FailNode:
    """A user injects a fault. `worker` None: the whole node; `step` None: now."""

    node: str
    how: str
    worker: int | None = None
    step: int | None = None
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The user ends the job (Ctrl-C); `save`: with a checkpoint of what it has led to, where it keeps any."""

    exit_code: int
    why: str
    save: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """What PlanExperts asked for is computed; None where that failed."""

    generation: int
    experts: ExpertPlan | Shortage | None


Input = Received | Disconnected | Tick | Failure | FailNode | Shutdown | Planned


# ---- instructions, to be carried out in order ----


@dataclass(frozen=True, slots=True)
class Persist:
    """Compare-and-swap the record; if another coordinator was there first, stop at once: nothing after this counts."""

    record: Record


@dataclass(frozen=True, slots=True)
class Emit:
    """Append to the journal."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send to an agent; a connection that is gone is no error (Disconnected follows)."""

    connection: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after what was sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over; the coordinator ends once the agents are gone, a few seconds later at most."""

    exit_code: int
    why: str


@dataclass(frozen=True, slots=True)
class PlanExperts:
    """Call `solve` beside everything else (it may take seconds) and feed what it returns as Planned, once."""

    generation: int
    solve: Callable[[], ExpertPlan | Shortage]


Instruction = Persist | Emit | Send | Close | EndJob | PlanExperts


# ---- configuration ----

#: What becomes of the others when a node fails.
RECONFIGURE, RESTART = "reconfigure", "restart"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of a job's coordination; times in seconds.

    start_nodes: how many nodes must have come before the first generation; later any number will do.
    join_window_s: nobody is taken in before this long after the last arrival; join_retry_s: after a failed attempt.
    fault_threshold: on how many distinct nodes each expert should live. strategy: of expert placement.
    static_experts, ep_size: classic expert parallelism instead of elastic experts, over so many ranks (0: the least
    that fits). on_failure: `reconfigure` the job, or `restart` all workers from the newest checkpoint, at joins too.
    emulate_compute: seconds per token that expert computation is made to take, 0 for none; for the record.
    rebalance_every: steps from one look at the experts' placement to the next, 0 for none; loads bring the first one.
    save_timeout_s: how long a job that is to end may take to save what it has led to.
    secret: what the keys of state transfers are derived from. takeover: another coordinator of the same run died
    before; an outcome that it wrote stands. Without it a store with an outcome is the begin of another run.
    """

    job: str
    start_nodes: int = 1
    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    tick_s: float = 0.1
    report_timeout_s: float = 5.0
    prepare_timeout_s: float = 30.0
    join_window_s: float = 0.0
    join_retry_s: float = 1.0
    save_timeout_s: float = 30.0
    fault_threshold: int = 2
    strategy: str = "best"
    static_experts: bool = False
    ep_size: int = 0
    on_failure: str = RECONFIGURE
    emulate_compute: float = 0.0
    rebalance_every: int = 200
    allow_faults: bool = False
    secret: bytes = b""
    takeover: bool = False
