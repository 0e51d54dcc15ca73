"""Messages between agent and coordinator."""

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
    ProbeAnswer,
    Stacks,
    TakeMemory,
    TakeStacks,
    WatchWork,
)
from holdfast.protocol.messages.worker import Post, ScriptError, WorkerMessage
from holdfast.protocol.names import Address, Count, FailureRate, Name, Rack, Seconds, Struct, Text, WorkerId
from holdfast.protocol.state import Keeper, Port, SnapshotPart

#: Most steps in a message: the coordinator handles as many in about ten milliseconds. Steps with many logged values
#: count as several.
PAGE_STEPS = 512

# ---- agent -> coordinator ----


class CompactCommit(Commit, frozen=True, kw_only=True, array_like=True, tag=False):
    """A step result (`Commit`) without the names of its fields."""

    @property
    def as_commit(self) -> Commit:
        """The step result with named fields."""
        return Commit(**msgspec.structs.asdict(self))


class KeptStep(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A step that workers of one node have applied."""

    step: Count
    generation: Count
    #: 0 if the step came with a received state
    world: Count
    #: time at which the last worker reported it, on the clock of `Hello`; 0 if the step came with a received state
    time: float
    commit: CompactCommit
    #: only if the job verifies its state
    state_hash: Text = ""


class AppliedSteps(Struct, frozen=True, kw_only=True, tag="AppliedSteps"):
    """Steps that a node's workers applied, and that the coordinator does not know yet, oldest first: one page."""

    #: the newest applied step of each worker
    workers: Annotated[dict[WorkerId, Count], Meta(max_length=1024)]
    steps: Annotated[tuple[KeptStep, ...], Meta(max_length=PAGE_STEPS)] = ()
    #: up to this step, the node no longer has the step results
    given_up: Count = 0


class WorkerDown(Struct, frozen=True, kw_only=True, tag="WorkerDown"):
    """A worker process has ended without finishing."""

    worker: WorkerId
    kind: FailureKind
    detail: Text
    exit_code: int
    #: Whether another process would end the same way. With exit code 0, the script has left its loop (`break`) after
    #: step `applied`, and the job is done once all workers have. With another code the job ends with this cause.
    final: bool = False
    applied: Count = 0
    #: the exception of the script, if that ended it
    error: ScriptError | None = None

    @property
    def has_left_loop(self) -> bool:
        """Whether the script has left its loop."""
        return self.final and self.exit_code == EXIT_DONE

    @property
    def detector(self) -> Detector:
        """The detector of the failure."""
        return Detector.EXCEPTION if self.kind is FailureKind.EXCEPTION else Detector.PROCESS


#: Facts about its workers that an agent keeps for the next coordinator.
Kept = WorkerMessage | AppliedSteps | WorkerDown


#: most parts of snapshots that one node holds
MAX_HELD_PARTS = 1 << 14


class NodeSnapshots(Struct, frozen=True, kw_only=True, tag="NodeSnapshots"):
    """All complete parts of snapshots that a node's agent holds. It serves them at `host` and `port`."""

    host: Address
    port: Port
    parts: Annotated[tuple[SnapshotPart, ...], Meta(max_length=MAX_HELD_PARTS)] = ()


class HeardGeneration(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="HeardGeneration"):
    """The newest generation that a coordinator has announced to a node's workers, or 0."""

    #: identity of the job in `Welcome`; "" before the first `Welcome`
    identity: Annotated[str, Meta(max_length=64)] = ""
    #: term of the coordinator that announced it
    term: Count = 0
    generation: Count = 0


class Hello(Struct, frozen=True, kw_only=True, tag="Hello"):
    """The first message of a connection."""

    protocol: int
    job: Name
    node: Name
    session: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
    #: highest term seen
    term: Count
    agent_pid: Count
    #: workers per node
    workers: Annotated[int, Meta(ge=1, le=1024)]
    #: digest of the script and its arguments
    digest: Text
    #: the node's own clock, in monotonic seconds
    clock: float = 0.0
    #: host name of the machine
    host: Annotated[str, Meta(max_length=256)] = ""
    #: address at which other nodes reach this one, or "" if unknown
    address: Address = ""  # at which the other nodes reach this one; "": not known
    #: whether the connection to the coordinator stays on the host
    beside_coordinator: bool = True
    #: port of `address` that accepts and closes connections, or 0
    probe_port: Port = 0
    #: why this node should not train, by its own checks
    unfit: Text = ""
    #: Nodes of a rack may fail together. "": a rack of its own.
    rack: Rack = ""  # nodes of one rack may fail together; "": a rack of its own
    #: Nodes of a zone are near each other. "": no zone.
    zone: Rack = ""  # nodes of one zone are near each other; "": in none
    #: failures relative to a usual node
    failure_rate: FailureRate = 1.0
    #: None if it keeps no snapshots
    snapshots: NodeSnapshots | None = None
    #: whether the node was started as a warm standby
    standby: bool = False
    #: grant of the pool by which the node belongs to the job, or 0 without a pool
    grant: Count = 0
    #: lets a coordinator notice that its store is older than the job
    heard: HeardGeneration = HeardGeneration()
    #: Facts about the node's workers that the coordinator must know. The rest follows before any other message.
    kept: tuple[Kept, ...] = ()


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Heartbeat"):
    """The node lives. Every other message says so, too."""

    #: the oldest generation in which one of these steps was applied
    generation: Count = 0
    #: the newest steps that its workers hold, by their index on the node, or one number for all; () if they were
    #: already sent
    applied: Annotated[tuple[Count, ...], Meta(max_length=1024)] = ()


class FromWorker(Struct, frozen=True, kw_only=True, tag="FromWorker"):
    """A message of a worker."""

    message: WorkerMessage


class Posts(Struct, frozen=True, kw_only=True, tag="Posts"):
    """Rendezvous: the posts of the members on this node, or as many as fit into a message."""

    posts: Annotated[tuple[Post, ...], Meta(min_length=1, max_length=1 << 14)]


class EndNotice(Struct, frozen=True, kw_only=True, tag="EndNotice"):
    """The operator of the machine has ordered the agent to end. It ends after `grace_s` seconds in any case."""

    grace_s: Seconds


class Leave(Struct, frozen=True, kw_only=True, tag="Leave"):
    """The agent ends."""

    #: `finished`, `drained`, `quarantined` (its machine is broken), `exhausted` (its workers have failed as often as
    #: they may), or `told` (it was ordered to end, and its grace is over). A quarantined or exhausted node repeats this
    #: until `EndNode` answers it.
    reason: Text
    detail: Text = ""

    @property
    def awaits_answer(self) -> bool:
        """Whether the agent waits for `EndNode`."""
        return self.reason in ("quarantined", "exhausted")


class ClockOffset(Struct, frozen=True, kw_only=True, tag="ClockOffset"):
    """The wall clock of this node minus the coordinator's, measured by one round trip (Hello, Welcome)."""

    ahead_s: float
    #: half of the round trip; the true offset is within this of `ahead_s`
    uncertainty_s: Seconds


class OutputFailed(Struct, frozen=True, kw_only=True, tag="OutputFailed"):
    """A log of this node's workers cannot be written, and lines are lost. Sent once for each file."""

    file: Text
    why: Text


class GpusRead(Struct, frozen=True, kw_only=True, tag="GpusRead"):
    """The state of the node's GPUs, sent every ten seconds and after each Xid error; not sent without GPUs."""

    gpus: Annotated[tuple[GpuFacts, ...], Meta(max_length=MAX_GPUS)]


class AddressProbed(Struct, frozen=True, kw_only=True, tag="AddressProbed"):
    """The answer to ProbeAddress."""

    number: Count
    #: why no connection could be made, or ""
    error: Text = ""


Farewell = EndNotice | Leave
Seen = Late | ProbeAnswer | Stacks | OwnTimes | MemoryTaken
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
    """The coordinator accepts the connection."""

    term: Count
    lease_s: float
    heartbeat_s: float
    #: the journal has all steps up to this one
    committed: Count
    #: workers of the node in the plan in force, or in the pending one
    members: Annotated[tuple[WorkerId, ...], Meta(max_length=2048)] = ()
    #: the site's own failure classes, which agents use as the coordinator does
    rules: Annotated[tuple[FailureRule, ...], Meta(max_length=MAX_RULES)] = ()
    #: most restarts of the node's processes within a window
    max_restarts: Count = MAX_RESTARTS
    snapshot_key: Annotated[bytes, Meta(max_length=64)] = b""
    #: the layout in force, or None before the first generation
    layout: Layout | None = None
    #: number of nodes with which the job begins
    nodes: Count = 0
    #: the coordinator's clock when it handled Hello, in unix seconds, or 0
    time: float = 0.0
    #: identity of the job, as in its record
    identity: Annotated[str, Meta(max_length=64)] = ""


class Refused(Struct, frozen=True, kw_only=True, tag="Refused"):
    """The coordinator refuses the connection."""

    why: Text
    exit_code: int
    #: whether the agent may connect again with a new session
    retry: bool = False


class Committed(Struct, frozen=True, kw_only=True, tag="Committed"):
    """The journal has all steps up to this one."""

    term: Count
    step: Count


class ToWorker(Struct, frozen=True, kw_only=True, tag="ToWorker"):
    """An order for one worker of the node."""

    worker: WorkerId
    order: WorkerOrder


class Replace(Struct, frozen=True, kw_only=True, tag="Replace"):
    """Replace this worker's process. Its script has raised an exception, and its state is no longer needed."""

    worker: WorkerId


class NodeFault(Struct, frozen=True, kw_only=True, tag="NodeFault"):
    """Fault injection in a whole node.

    `kill`, `freeze`, `exit`: it dies. `link-down`: no data gets in or out, and its connections stay open. `clock-jump`:
    its wall clock shows `by_s` seconds more.
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
    """A part of a snapshot, and the node that has it."""

    snapshot: SnapshotPart
    keeper: Keeper


class KeepSnapshots(Struct, frozen=True, kw_only=True, tag="KeepSnapshots"):
    """The complete list of parts of other nodes' snapshots that this node keeps."""

    term: Count
    wanted: Annotated[tuple[WantedPart, ...], Meta(max_length=MAX_HELD_PARTS)]


class DropSnapshots(Struct, frozen=True, kw_only=True, tag="DropSnapshots"):
    """These parts cannot be used: they are from another run or lineage, or damaged."""

    term: Count
    parts: Annotated[tuple[SnapshotPart, ...], Meta(max_length=MAX_HELD_PARTS)]
    why: Text = ""


class EndNode(Struct, frozen=True, kw_only=True, tag="EndNode"):
    """End the workers and the agent."""

    exit_code: int
    why: Text
    #: whether the job continues without this node; then no other process reports the reason
    alone: bool = False


class Part(Struct, frozen=True, kw_only=True, tag="Part"):
    """A part of a large message. `left` more parts follow, without other messages between them."""

    data: bytes
    left: Count


#: Orders about a generation are sent once to each node, and are equal for all. The agent knows which workers they
#: concern.
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
