"""What agent and coordinator say to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.errors import EXIT_DONE
from holdfast.protocol.commit import Commit
from holdfast.protocol.failures import MAX_RULES, Detector, FailureKind, FailureRule
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.messages.gpus import MAX_GPUS, GpuFacts
from holdfast.protocol.messages.orders import (
    Arm,
    CheckpointOrder,
    Disarm,
    JobDone,
    LookAround,
    Posted,
    Stop,
    Void,
    WorkerOrder,
)
from holdfast.protocol.messages.plans import AskPlan, BeginNode, PrepareNode
from holdfast.protocol.messages.progress import (
    CountHang,
    EndHung,
    Late,
    MemoryTaken,
    OwnTimes,
    Probe,
    Stacks,
    TakeMemory,
    TakeStacks,
    WatchWork,
    Whereabouts,
)
from holdfast.protocol.messages.worker import Post, ScriptError, WorkerMessage
from holdfast.protocol.names import Address, Count, FailureRate, Name, Rack, Seconds, Struct, Text, WorkerId
from holdfast.protocol.state import Keeper, Port, SnapshotPart

#: What the coordinator takes in at a time: a page of so many steps is handled in some ten milliseconds. Steps that log
#: much count as several.
PAGE_STEPS = 512

# ---- agent -> coordinator ----


class Lanes(Commit, frozen=True, kw_only=True, array_like=True, tag=False):
    """v without the names of its fields."""

    @property
    def v(self) -> Commit:
        """v as everybody else writes it."""
        return Commit(**msgspec.structs.asdict(self))


class KeptStep(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A step that workers of one node have applied; `time`: when the last one told, on the clock of Hello.

    One that came with a state was applied elsewhere: `world` and `time` are 0, not known.
    """

    step: Count
    generation: Count
    world: Count
    time: float
    commit: Lanes
    state_hash: Text = ""  # test mode only


class AppliedSteps(Struct, frozen=True, kw_only=True, tag="AppliedSteps"):
    """What a node's workers applied and the coordinator was not told, oldest first: one page of it.

    `workers`: the newest step that each has applied. `given_up`: up to this step v is not known here any more.
    """

    workers: Annotated[dict[WorkerId, Count], Meta(max_length=1024)]
    steps: Annotated[tuple[KeptStep, ...], Meta(max_length=PAGE_STEPS)] = ()
    given_up: Count = 0


class WorkerDown(Struct, frozen=True, kw_only=True, tag="WorkerDown"):
    """A worker process ended without having finished.

    `final`: the script itself wants no more, another process would do the same. With exit code 0 it has left its loop
    (`break`) after step `applied`: the job is done once all have; else the job ends with this cause.
    `error`: what the script raised, where that is how it ended.
    """

    worker: WorkerId
    kind: FailureKind
    detail: Text
    exit_code: int
    final: bool = False
    applied: Count = 0
    error: ScriptError | None = None

    @property
    def left(self) -> bool:
        """True where the script has left its loop."""
        return self.final and self.exit_code == EXIT_DONE

    @property
    def detector(self) -> Detector:
        """Who saw it."""
        return Detector.EXCEPTION if self.kind is FailureKind.EXCEPTION else Detector.PROCESS


#: what an agent keeps of its workers for a coordinator that does not know it
Kept = WorkerMessage | AppliedSteps | WorkerDown


#: of snapshots that one node holds
MAX_HELD_PARTS = 1 << 14


class NodeSnapshots(Struct, frozen=True, kw_only=True, tag="NodeSnapshots"):
    """All parts of snapshots that a node's agent holds, whole; it gives them out at `host` and `port`."""

    host: Address
    port: Port
    parts: Annotated[tuple[SnapshotPart, ...], Meta(max_length=MAX_HELD_PARTS)] = ()


class HeardGeneration(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="HeardGeneration"):
    """The newest generation that a coordinator has announced to a node's workers; 0 if none was."""

    #: of the job, as Welcome named it; "" before the first Welcome
    identity: Annotated[str, Meta(max_length=64)] = ""
    #: of the coordinator that announced the generation
    term: Count = 0
    generation: Count = 0


class Hello(Struct, frozen=True, kw_only=True, tag="Hello"):
    """First message of a connection. `kept` replays what the coordinator must know of the node's workers.

    What does not fit follows, before anything else. `clock`: what the node's own clock shows (monotonic seconds).
    `standby`: the node was started to wait, warm, until one of the others is lost or moved.
    """

    protocol: int
    job: Name
    node: Name
    session: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
    term: Count  # the highest seen
    agent_pid: Count
    workers: Annotated[int, Meta(ge=1, le=1024)]  # workers per node
    digest: Text  # of script and arguments
    clock: float = 0.0
    host: Annotated[str, Meta(max_length=256)] = ""  # the machine's name
    address: Address = ""  # at which the other nodes reach this one; "": not known
    beside_coordinator: bool = True  # its connection to the coordinator does not leave the host
    probe_port: Port = 0  # of `address`: takes connections and closes them; 0: none
    unfit: Text = ""  # why this node should not train, as it finds itself
    rack: Rack = ""  # nodes of one rack may fail together; "": a rack of its own
    zone: Rack = ""  # nodes of one zone are near each other; "": in none
    failure_rate: FailureRate = 1.0  # how often the node fails, the usual one being 1
    snapshots: NodeSnapshots | None = None  # None: it keeps none
    standby: bool = False
    grant: Count = 0  # of its job's pool, by which the node is the job's; 0: the job runs in none
    heard: HeardGeneration = HeardGeneration()  # shows a coordinator that its store is older than the job
    kept: tuple[Kept, ...] = ()


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Heartbeat"):
    """The node lives; any other message says so as well.

    `applied`: where its workers stand, if that was not told yet: the newest steps whose state they hold, by their index
    on the node (0: none), or one number for all of them. `generation`: the oldest in which one of them came to it.
    """

    generation: Count = 0
    applied: Annotated[tuple[Count, ...], Meta(max_length=1024)] = ()


class FromWorker(Struct, frozen=True, kw_only=True, tag="FromWorker"):
    """A worker's message, passed on."""

    message: WorkerMessage


class Posts(Struct, frozen=True, kw_only=True, tag="Posts"):
    """Rendezvous: what the members on this node have posted, or the part of it that fits into a message."""

    posts: Annotated[tuple[Post, ...], Meta(min_length=1, max_length=1 << 14)]


class EndNotice(Struct, frozen=True, kw_only=True, tag="EndNotice"):
    """The agent was told to end by whoever runs its machine: it will, `grace_s` from now, whatever the others do."""

    grace_s: Seconds


class Leave(Struct, frozen=True, kw_only=True, tag="Leave"):
    """The agent ends: `finished`, `drained`, `quarantined` (its machine is broken), `exhausted` or `told`.

    The last one: its workers have failed as often as they may. Whose fault that is others know. A node that is
    quarantined or exhausted says so until EndNode answers it. One that was `told` to end has stayed as long as it may.
    """

    reason: Text
    detail: Text = ""

    @property
    def waits(self) -> bool:
        """True where the agent waits for EndNode."""
        return self.reason in ("quarantined", "exhausted")


class ClockOffset(Struct, frozen=True, kw_only=True, tag="ClockOffset"):
    """How far this node's wall clock is ahead of the coordinator's, by one round trip (Hello, Welcome).

    The truth is within `uncertainty_s` of it, half of the round trip, however long messages waited on a loaded machine.
    """

    ahead_s: float
    uncertainty_s: Seconds


class OutputFailed(Struct, frozen=True, kw_only=True, tag="OutputFailed"):
    """A log of this node's workers cannot be written: lines are lost. Said once for each file."""

    file: Text
    why: Text


class GpusRead(Struct, frozen=True, kw_only=True, tag="GpusRead"):
    """The state of the node's GPUs, sent every ten seconds and after each Xid error; not sent without GPUs."""

    gpus: Annotated[tuple[GpuFacts, ...], Meta(max_length=MAX_GPUS)]


class AddressProbed(Struct, frozen=True, kw_only=True, tag="AddressProbed"):
    """The answer to ProbeAddress. `error`: why no connection could be made, "" if one was."""

    number: Count
    error: Text = ""


Farewell = EndNotice | Leave
Seen = Late | Whereabouts | Stacks | OwnTimes | MemoryTaken
AgentMessage = (
    Hello
    | Heartbeat
    | FromWorker
    | AppliedSteps
    | WorkerDown
    | AskPlan
    | Posts
    | Seen
    | NodeSnapshots
    | ClockOffset
    | OutputFailed
    | GpusRead
    | AddressProbed
    | Farewell
)


# ---- coordinator -> agent ----


class Welcome(Struct, frozen=True, kw_only=True, tag="Welcome"):
    """The connection stands. `committed`: steps up to here are in the journal and need not be kept.

    `members`: the node's workers that the generation in force or the pending one names. `rules`: the site's own classes
    of failures: agents and the coordinator class alike. `max_restarts`: of the node's processes, within a window.
    `layout`: the one in force, None as long as nobody has said which the job has: it begins with that for `nodes`.
    `time`: the coordinator's clock when it handled Hello, unix seconds; 0: not told.
    """

    term: Count
    lease_s: float
    heartbeat_s: float
    committed: Count
    members: Annotated[tuple[WorkerId, ...], Meta(max_length=2048)] = ()
    rules: Annotated[tuple[FailureRule, ...], Meta(max_length=MAX_RULES)] = ()
    max_restarts: Count = MAX_RESTARTS
    snapshot_key: Annotated[bytes, Meta(max_length=64)] = b""
    layout: Layout | None = None
    nodes: Count = 0
    time: float = 0.0
    identity: Annotated[str, Meta(max_length=64)] = ""  # as in the job's record


class Refused(Struct, frozen=True, kw_only=True, tag="Refused"):
    """The connection is refused: for good, or (`retry`) until the agent comes back with a new session."""

    why: Text
    exit_code: int
    retry: bool = False


class Committed(Struct, frozen=True, kw_only=True, tag="Committed"):
    """Steps up to this one are in the journal."""

    term: Count
    step: Count


class ToWorker(Struct, frozen=True, kw_only=True, tag="ToWorker"):
    """An order for one worker of the node."""

    worker: WorkerId
    order: WorkerOrder


class Replace(Struct, frozen=True, kw_only=True, tag="Replace"):
    """Put another process in the place of this worker: its script has raised, and its state is not needed any more."""

    worker: WorkerId


class NodeFault(Struct, frozen=True, kw_only=True, tag="NodeFault"):
    """Fault injection: the whole node dies (`kill`, `freeze`, `exit`), or goes on with something wrong.

    `link-down`: nothing gets in or out any more, and nobody is told; `clock-jump`: its wall clock shows `by_s` more.
    """

    fault: Text
    by_s: float = 0.0


class ProbeAddress(Struct, frozen=True, kw_only=True, tag="ProbeAddress"):
    """Connect to an address and close the connection; the answer is AddressProbed.

    A newcomer gets this before its Welcome: it must reach a member, and a member must reach it.
    """

    number: Count
    host: Address
    port: Port


class WantedPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A part of a snapshot, and who has it."""

    snapshot: SnapshotPart
    keeper: Keeper


class KeepSnapshots(Struct, frozen=True, kw_only=True, tag="KeepSnapshots"):
    """Keep these parts of other nodes' snapshots as well: all that this node is to have by now."""

    term: Count
    wanted: Annotated[tuple[WantedPart, ...], Meta(max_length=MAX_HELD_PARTS)]


class DropSnapshots(Struct, frozen=True, kw_only=True, tag="DropSnapshots"):
    """These parts are of no use: of another run or lineage, or damaged. `why`: in words."""

    term: Count
    parts: Annotated[tuple[SnapshotPart, ...], Meta(max_length=MAX_HELD_PARTS)]
    why: Text = ""


class EndNode(Struct, frozen=True, kw_only=True, tag="EndNode"):
    """End the workers and the agent. `alone`: the job goes on without this node, so nobody else says why it ended."""

    exit_code: int
    why: Text
    alone: bool = False


class Part(Struct, frozen=True, kw_only=True, tag="Part"):
    """A part of a large message; `left` more follow, and nothing in between."""

    data: bytes
    left: Count


#: What concerns a generation is said once to each node, the same to all; the agent knows for whom it is.
NodeOrder = BeginNode | PrepareNode | Posted | Stop | LookAround | Arm | Disarm | Void | JobDone
Ask = Probe | TakeStacks | TakeMemory | EndHung | CountHang | WatchWork | ProbeAddress
SnapshotOrder = KeepSnapshots | DropSnapshots
CoordinatorMessage = (
    Welcome
    | Refused
    | Committed
    | NodeOrder
    | ToWorker
    | Replace
    | Ask
    | SnapshotOrder
    | CheckpointOrder
    | NodeFault
    | EndNode
    | Part
)
