"""The words that worker, agent and coordinator say to each other, and their limits.

Everything that crosses a socket is one of these structs, encoded with MessagePack. Each carries or travels inside
(job, term, epoch): what is stale is refused by the machines, what is malformed never gets past the decoder.
Steps count from 1; `applied == 0` is the initial state. Times are unix seconds, sizes bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
RACK_PATTERN = r"^[A-Za-z0-9._-]{0,64}$"
WorkerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[0-9]{1,4}/[0-9a-f]{1,32}$")]
Text = Annotated[str, Meta(max_length=8192)]
Rack = Annotated[str, Meta(pattern=RACK_PATTERN)]
Count = Annotated[int, Meta(ge=0)]
Blob = Annotated[bytes, Meta(max_length=65536)]
#: Steps over which loads are taken where nobody ever looks at the placement again (Lazarus, 6.1: looks every 200).
LOADS_WINDOW = 200
#: Loads of more experts (times layers) than this would not fit a message: such a model is placed as if all were equal.
MAX_LOADS = 1 << 17


def worker_id(node: str, index: int, nonce: str) -> str:
    """Return the id of one worker process: node, index on the node, and a nonce that no other process ever has."""
    return f"{node}/{index}/{nonce}"


def node_of(worker: str) -> str:
    """Return the node that a worker id names."""
    return worker.split("/", 1)[0]


def index_of(worker: str) -> int:
    """Return the index on its node that a worker id names."""
    return int(worker.split("/")[1])


class Struct(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: immutable, tagged by class name."""


class Phase(StrEnum):
    """Where a worker stands inside a step (DESIGN.md 3.1)."""

    IDLE = "idle"  # in no epoch yet
    ENTERING = "entering"  # building the group, settling the decision, moving state
    COMPUTE = "compute"
    REDUCING = "reducing"
    READY = "ready"  # every local reduction has returned
    VOTED = "voted"  # the commit operation is issued
    PASSED = "passed"  # the commit operation returned v
    FINISHED = "finished"  # no step left to do


class Commit(Struct, frozen=True, kw_only=True):
    """v: what the commit operation returns, the same on every rank in every bit."""

    grad_square: float
    loss_sum: float
    samples: int
    nonfinite: int
    swap: int


class Passed(Struct, frozen=True, kw_only=True):
    """The newest step that is known to have passed, with its v."""

    step: Count
    commit: Commit


class DecisionKind(StrEnum):
    START = "start"  # the initial state of one worker becomes everybody's
    REDO = "redo"
    FORWARD = "forward"
    ROLLBACK = "rollback"


class Decision(Struct, frozen=True, kw_only=True):
    """What becomes of the step that an epoch's end interrupted.

    `applied` is the step whose state every member holds once the decision is carried out; the next step is one more.
    FORWARD carries v; ROLLBACK names the checkpoint.
    """

    kind: DecisionKind
    applied: Count
    commit: Commit | None = None
    checkpoint: Text = ""


class Member(Struct, frozen=True, kw_only=True):
    """One worker of an epoch; its rank is its place in the plan."""

    worker: WorkerId
    host: Text
    state_port: Annotated[int, Meta(ge=0, le=65535)]

    @property
    def node(self) -> str:
        """The member's node."""
        return node_of(self.worker)


class ExpertShape(Struct, frozen=True, kw_only=True):
    """The experts of a model, and this node's room for them in each layer."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    experts: Annotated[int, Meta(ge=1, le=65534)]  # per layer
    slots: Annotated[int, Meta(ge=1, le=65535)]  # of the node, per layer


class ExpertPlan(Struct, frozen=True, kw_only=True):
    """Where every expert replica lives, one blob per rank (see coordination.experts).

    `held`: what each rank holds on entering, `placement`: what it is to hold. `asked` and `given`: on how many distinct
    nodes each expert should live, and does. `moves`: experts that travel between workers. `window`: over about so many
    steps the loads of the next placement are to be taken.
    """

    layers: int
    experts: int
    placement: tuple[Blob, ...]
    held: tuple[Blob, ...]
    moves: int
    asked: int
    given: int
    window: Annotated[int, Meta(ge=1)] = LOADS_WINDOW


class EpochPlan(Struct, frozen=True, kw_only=True):
    """A numbered configuration. `sources` gives each member without state the members that send it theirs."""

    term: Count
    epoch: Count
    members: tuple[Member, ...]
    sources: dict[str, tuple[str, ...]] = {}
    experts: ExpertPlan | None = None
    secret: Annotated[bytes, Meta(max_length=64)] = b""

    def rank(self, worker: str) -> int | None:
        """Return the rank of a worker, None where it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.worker == worker), None)

    @property
    def workers(self) -> tuple[str, ...]:
        """The members' worker ids by rank."""
        return tuple(member.worker for member in self.members)


# ---- worker -> coordinator (through its agent) ----


class Attach(Struct, frozen=True, kw_only=True):
    """A worker is up, knows what it trains, and waits for an epoch. Its state is its fresh initial one."""

    worker: WorkerId
    pid: Count
    host: Text
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    digest: Text  # of code and configuration: all workers of a job must have the same
    global_batch: Count
    micro_batches: Count  # M, per global batch
    experts: ExpertShape | None = None


class Begun(Struct, frozen=True, kw_only=True):
    """This worker obeys the Begin of `epoch`. Kept by the agent: from now on it is not fresh any more."""

    worker: WorkerId
    epoch: Count


class Entered(Struct, frozen=True, kw_only=True):
    """The group of `epoch` stands here and the decision is carried out: `applied` is this worker's state."""

    worker: WorkerId
    epoch: Count
    applied: Count
    received_bytes: Count = 0
    transfer_s: float = 0.0


class Prepared(Struct, frozen=True, kw_only=True):
    """The group of the pending epoch stands here."""

    worker: WorkerId
    epoch: Count


class Applied(Struct, frozen=True, kw_only=True):
    """One step applied here. Kept by the agent until the coordinator has it in its journal."""

    worker: WorkerId
    epoch: Count
    step: Count
    commit: Commit
    world: Count
    time: float
    state_hash: Text = ""  # test mode only


class Report(Struct, frozen=True, kw_only=True):
    """The answer to Stop, and a promise not to advance until the next Begin.

    `epoch` echoes Stop's. `applied` is None where this worker holds no state of the job (fresh, or void).
    `held`: micro-batches of `step` whose gradients this worker has or is about to have.
    `fresh`: the state is this worker's own initial one, whole: only that can become everybody's at a START.
    `ready`: the reductions of `step` = applied + 1 are here, so that FORWARD(step, v) can be carried out.
    `experts`: those held here, with the state of `applied`; `experts_next`: those that FORWARD leads to.
    """

    worker: WorkerId
    term: Count
    epoch: Count
    applied: Count | None
    step: Count
    phase: Phase
    fresh: bool = False
    ready: bool = False
    passed: Passed | None = None
    held: tuple[int, ...] = ()
    experts: Blob = b""
    experts_next: Blob = b""


class Fault(Struct, frozen=True, kw_only=True):
    """A collective of `epoch` failed here: a peer is gone, or the network is."""

    worker: WorkerId
    epoch: Count
    detail: Text


class Finished(Struct, frozen=True, kw_only=True):
    """The training loop asks for no further step."""

    worker: WorkerId
    step: Count


class CheckpointWritten(Struct, frozen=True, kw_only=True):
    """A checkpoint lies complete under a temporary name; it counts only once the coordinator accepts it."""

    worker: WorkerId
    epoch: Count
    step: Count
    name: Text
    bytes: Count
    seconds: float


class CheckpointKept(Struct, frozen=True, kw_only=True):
    """The accepted checkpoint has its final name."""

    worker: WorkerId
    step: Count
    name: Text
    bytes: Count
    seconds: float


class CheckpointDamaged(Struct, frozen=True, kw_only=True):
    """A checkpoint that the coordinator named cannot be read."""

    worker: WorkerId
    epoch: Count
    name: Text
    why: Text


class Loads(Struct, frozen=True, kw_only=True):
    """The experts' loads after `step`, as rank 0 knows them (see coordination.loads). The agent keeps the newest.

    `expert_bytes`: parameters and optimizer state of the largest expert. `token_s`: seconds that one expert's work for
    one token took there, forward and backward.
    """

    worker: WorkerId
    epoch: Count
    step: Count
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_LOADS)]
    expert_bytes: Count
    token_s: Annotated[float, Meta(ge=0.0)]


class Post(Struct, frozen=True, kw_only=True):
    """Rendezvous: one key of the group of `epoch`, for all its members."""

    worker: WorkerId
    epoch: Count
    key: Text
    value: Blob


#: what is of interest only from a member of the epoch
MemberMessage = Prepared | Finished | Loads | CheckpointWritten | CheckpointKept | CheckpointDamaged
WorkerMessage = (
    Attach
    | Begun
    | Entered
    | Prepared
    | Applied
    | Report
    | Fault
    | Finished
    | CheckpointWritten
    | CheckpointKept
    | CheckpointDamaged
    | Loads
    | Post
)


# ---- coordinator -> worker ----


class Begin(Struct, frozen=True, kw_only=True):
    """Leave whatever you are in and enter this epoch; `assignment[rank]` are the micro-batches of its first step."""

    plan: EpochPlan
    decision: Decision
    assignment: tuple[tuple[int, ...], ...] = ()


class Stop(Struct, frozen=True, kw_only=True):
    """Freeze in every epoch up to this one, and report."""

    term: Count
    epoch: Count


class Prepare(Struct, frozen=True, kw_only=True):
    """Build this group beside the one in use; go on training meanwhile."""

    plan: EpochPlan


class Arm(Struct, frozen=True, kw_only=True):
    """All have built the pending group: raise the swap flag in the next commit operation."""

    term: Count
    epoch: Count


class Void(Struct, frozen=True, kw_only=True):
    """Forget the pending group. Never said once Arm was."""

    term: Count
    epoch: Count


class Posted(Struct, frozen=True, kw_only=True):
    """Rendezvous: a peer's key."""

    epoch: Count
    key: Text
    value: Blob


class AcceptCheckpoint(Struct, frozen=True, kw_only=True):
    """This checkpoint is on the decided lineage: give it its final name."""

    step: Count
    name: Text


#: Where in a step an injected fault may strike. `reducing` is after the first all-to-all was issued, `voted` after the
#: commit operation was, `applying` after the optimizer's step and before it is marked, `transfer` and `receiving` in
#: the middle of a state transfer, at the sender and at the receiver, `moving` while experts move.
FAULT_PHASES = (
    "compute",
    "reducing",
    "ready",
    "voted",
    "passed",
    "applying",
    "forward",
    "transfer",
    "receiving",
    "moving",
)


class Inject(Struct, frozen=True, kw_only=True):
    """Fault injection: die in the given way, now or where the step reaches the phase.

    `hold` is no death: the training thread waits at the phase until the epoch is over, whoever ends it.
    """

    how: Text  # kill | exit | raise | stop | hold
    whole_node: bool = True
    step: Count | None = None
    phase: Text = ""


class JobDone(Struct, frozen=True, kw_only=True):
    """Every member has finished: the script may end."""


Order = Begin | Stop | Prepare | Arm | Void | Posted | AcceptCheckpoint | Inject | JobDone


# ---- agent -> coordinator ----


class Hello(Struct, frozen=True, kw_only=True):
    """First message of a connection. `kept` replays what the coordinator must know of the node's workers."""

    protocol: int
    job: Name
    node: Name
    session: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
    term: Count  # the highest seen
    agent_pid: Count
    workers: Annotated[int, Meta(ge=1, le=1024)]  # workers per node
    digest: Text  # of script and arguments
    rack: Rack = ""  # nodes of one rack may fail together; "": a rack of its own
    kept: tuple[WorkerMessage, ...] = ()


class Heartbeat(Struct, frozen=True, kw_only=True):
    """The node lives; any other message says so as well."""


class FromWorker(Struct, frozen=True, kw_only=True):
    """A worker's message, passed on."""

    message: WorkerMessage


class WorkerDown(Struct, frozen=True, kw_only=True):
    """A worker process ended without having finished."""

    worker: WorkerId
    kind: Text  # process_exit | exception | hang
    detail: Text
    exit_code: int


class Leave(Struct, frozen=True, kw_only=True):
    """The agent ends: `finished`, `drained`, or `quarantined` (its workers fail again and again)."""

    reason: Text
    detail: Text = ""


AgentMessage = Hello | Heartbeat | FromWorker | WorkerDown | Leave


# ---- coordinator -> agent ----


class Welcome(Struct, frozen=True, kw_only=True):
    """The connection stands. `committed`: steps up to here are in the journal and need not be kept."""

    term: Count
    lease_s: float
    heartbeat_s: float
    committed: Count


class Refused(Struct, frozen=True, kw_only=True):
    """The connection is refused: for good, or (`retry`) until the agent comes back with a new session."""

    why: Text
    exit_code: int
    retry: bool = False


class Committed(Struct, frozen=True, kw_only=True):
    """Steps up to this one are in the journal."""

    term: Count
    step: Count


class ToWorker(Struct, frozen=True, kw_only=True):
    """An order for one worker of the node."""

    worker: WorkerId
    order: Order


class NodeFault(Struct, frozen=True, kw_only=True):
    """Fault injection: the whole node dies (`kill`, `stop`, `exit`)."""

    how: Text


class EndNode(Struct, frozen=True, kw_only=True):
    """End the workers and the agent. `alone`: the job goes on without this node, so nobody else says why it ended."""

    exit_code: int
    why: Text
    alone: bool = False


CoordinatorMessage = Welcome | Refused | Committed | ToWorker | NodeFault | EndNode
