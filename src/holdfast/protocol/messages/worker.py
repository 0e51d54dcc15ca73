"""What a worker says to the coordinator, through its agent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.batch_summary import BatchSummary
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.commit import Commit, Metrics
from holdfast.protocol.fingerprint import Fingerprint
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.names import Address, Count, KeyName, KeyValue, Name, Seconds, Struct, Text, WorkerId
from holdfast.protocol.plan import ExpertShape, Passed, PassedSteps, Phase
from holdfast.protocol.state import Holding, SnapshotPart
from holdfast.step_samples import MAX_MICRO_BATCHES

#: Loads of more experts (times layers) than this would not fit a message: such a model is placed as if all were equal.
MAX_LOADS = 1 << 17
#: of a checkpoint; and the files of one part
MAX_CHECKPOINT_PARTS = 1 << 12
MAX_PART_FILES = 8
#: what a worker calls it among its settings
CHECKPOINT_EVERY = "checkpoint_every"
#: of so many of the newest evaluations a worker tells
MAX_TOLD = 16


class Attach(Struct, frozen=True, kw_only=True, tag="Attach"):
    """A worker is up, knows what it trains, and waits for a generation. Its state is its fresh initial one."""

    worker: WorkerId
    pid: Count
    host: Address
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    #: software, model and settings, as people would say them: all workers of a job must have the same
    config: Annotated[dict[Text, Text], Meta(max_length=32)]
    global_batch: Count
    micro_batches: Annotated[int, Meta(ge=0, le=MAX_MICRO_BATCHES)]  # M, per global batch
    seed: Count = 0  # of the order of samples, modulo 2**64
    expert_shape: ExpertShape | None = None
    saves: bool = False  # checkpoints
    saves_in_time: bool = False  # whenever the coordinator says so
    #: how a replica lies over the workers of a node, and which of them this is follows from its index
    layout: Layout = WHOLE
    #: all that the script lists, where these are several: then its agent has said which one this is
    layouts: Layouts = ()
    #: of micro-batch 0 of step 1; all workers of a job must have the same data
    data: BatchSummary = ()


class Begun(Struct, frozen=True, kw_only=True, tag="Begun"):
    """This worker was told to begin `generation`: it is not fresh any more, whether it has come to reading that or not.

    Said by no worker: its agent keeps it, from when it passes the Begin on, for a coordinator that comes later.
    """

    worker: WorkerId
    generation: Count


class Warmed(Struct, frozen=True, kw_only=True, tag="Warmed"):
    """The answer to Warm: the shadow steps took so many `seconds`. `error`: why this worker is cold all the same.

    Where the script has raised, or ended, in one of them, its agent says it, and then that its process is gone.
    """

    worker: WorkerId
    seconds: Seconds
    error: Text = ""


class Entered(Struct, frozen=True, kw_only=True, tag="Entered"):
    """The group of `generation` stands here and the decision is carried out: `applied` is this worker's state."""

    worker: WorkerId
    generation: Count
    applied: Count
    received_bytes: Count = 0
    transfer_s: float = 0.0


class Prepared(Struct, frozen=True, kw_only=True, tag="Prepared"):
    """The group of the pending generation stands here."""

    worker: WorkerId
    generation: Count


class Disarmed(Struct, frozen=True, kw_only=True, tag="Disarmed"):
    """The swap flag for the pending generation is down here from the step in progress on, and no step has swapped.

    So none can: all flags would have to be up. `term`: of the coordinator that has asked for it.
    """

    worker: WorkerId
    term: Count
    generation: Count


class Applied(Struct, frozen=True, kw_only=True, tag="Applied"):
    """A step applied here. Its agent keeps it until the journal has it; a `witness`'s is passed on at once.

    `paused_s`: for so long the script has paused since the step before. `last_step`: where its loop ends, 0 if it has
    not said.
    """

    worker: WorkerId
    generation: Count
    step: Count
    commit: Commit
    world: Count
    state_hash: Text = ""  # test mode only
    witness: bool = False
    paused_s: Seconds = 0.0
    last_step: Count = 0


class Report(Struct, frozen=True, kw_only=True, tag="Report"):
    """The answer to Stop, and a promise not to advance until the next Begin.

    `generation` echoes Stop's. `applied` is None where this worker holds no state of the job (fresh, or void).
    `summed`: micro-batches of `step` whose gradients this worker has or is about to have; where it is a place of a
    unit, also the one that it has proposed to that: it is computed if all places name it, and never if one does not.
    `fresh`: the state is this worker's own initial one, whole: only that can become everybody's at a START.
    `state`: which parts of the state of `applied` are here. `result`: the same of `step` = applied + 1, once FORWARD
    was carried out; None where not all of its reductions are here. `reduced`: v of that step then, but for its flags.
    `refused`: the generation of the attempt at `step` whose v was refused here, 0 where none was.
    `ending`: the script has ended here, by an exception or by itself; what became of it is still to be told.
    """

    worker: WorkerId
    term: Count
    generation: Count
    applied: Count | None
    step: Count
    phase: Phase
    fresh: bool = False
    passed: Passed | None = None
    summed: tuple[int, ...] = ()
    state: Holding = Holding()
    result: Holding | None = None
    reduced: Commit | None = None
    refused: Count = 0
    ending: bool = False
    #: what this worker compared, or was about to compare, at the attempt at `step`; None if it had not come that far
    compared: Fingerprint | None = None

    def holding_of(self, step: int) -> Holding | None:
        """Return which parts of a step's state are here, or can be made here by its v; None: not any."""
        if self.applied == step:
            return self.state
        return self.result if self.applied == step - 1 else None


class Complaint(Struct, frozen=True, kw_only=True, tag="Complaint"):
    """A collective of `generation` failed here: a peer is gone, or the network is.

    `timed_out`: it was waited for until its time was up. `unreachable`: members that no connection can be made to.
    `transfer_peers`: the members at the other end of state transfers that failed.
    """

    worker: WorkerId
    generation: Count
    detail: Text
    timed_out: bool = False
    unreachable: tuple[WorkerId, ...] = ()
    transfer_peers: tuple[WorkerId, ...] = ()


class VoteRefused(Struct, frozen=True, kw_only=True, tag="VoteRefused"):
    """v of an attempt is refused here, as by all who have it: nobody votes.

    `why`: what is wrong with its samples, or that workers differ.
    """

    worker: WorkerId
    generation: Count
    step: Count
    why: Text


class KnownSteps(Struct, frozen=True, kw_only=True, tag="KnownSteps"):
    """The newest steps up to the state that this worker was sent. Its agent keeps them, as if applied here."""

    worker: WorkerId
    passed: PassedSteps


class Finished(Struct, frozen=True, kw_only=True, tag="Finished"):
    """The training loop asks for no further step, in this generation.

    `stopped`: because a script has asked for that; `why`: in its words, where it was this one.
    """

    worker: WorkerId
    generation: Count
    step: Count
    stopped: bool = False
    why: Text = ""


class ScriptFailed(Struct, frozen=True, kw_only=True, tag="ScriptFailed"):
    """The script's `after_apply` raised, as it would anywhere: the step is applied, all save it, and the job ends."""

    worker: WorkerId
    generation: Count
    step: Count
    why: Text


class ScriptError(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ScriptError"):
    """What a script raised, and where.

    `step`, `micro_batch`, `phase`: at which; None: at none. `place`: the exception's type with file and line, the same
    wherever that happens. `traceback`: its last lines.
    """

    place: Text
    step: Count | None = None
    micro_batch: Count | None = None
    phase: Phase | None = None
    traceback: Text = ""


class Raised(Struct, frozen=True, kw_only=True, tag="Raised"):
    """The script has ended with an exception. The state that is here is whole, and kept until the process is replaced.

    No step goes on here. `final`: the script itself wants no more, another process would do the same.
    """

    worker: WorkerId
    generation: Count
    detail: Text
    error: ScriptError
    exit_code: int
    final: bool = False


class CheckpointWritten(Struct, frozen=True, kw_only=True, tag="CheckpointWritten"):
    """A part of a checkpoint lies complete in its folder, `name`; it counts only once the coordinator accepts it.

    `term` and `generation` are those of the plan under which the step was applied. `part`: which of `parts`, 0-based.
    `seconds` is what writing it took, `stall_s` how long its worker did not train meanwhile. The answer is
    AcceptCheckpoint or PruneCheckpoints.
    """

    worker: WorkerId
    term: Count
    generation: Count
    step: Count
    name: Text
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=MAX_CHECKPOINT_PARTS)] = 1
    files: Annotated[tuple[StoredFile, ...], Meta(max_length=MAX_PART_FILES)] = ()
    seconds: Seconds
    stall_s: Seconds = 0.0


class CheckpointKept(Struct, frozen=True, kw_only=True, tag="CheckpointKept"):
    """The accepted checkpoint has its manifest, after which it was looked at again and found whole."""

    worker: WorkerId
    term: Count
    generation: Count
    step: Count
    name: Text
    bytes: Count
    seconds: Seconds
    stall_s: Seconds = 0.0


class CheckpointUnwritten(Struct, frozen=True, kw_only=True, tag="CheckpointUnwritten"):
    """A part of a checkpoint could not be written, or all of it not be made to count: nothing of it does."""

    worker: WorkerId
    term: Count
    generation: Count
    step: Count
    name: Text
    why: Text


class CheckpointDamaged(Struct, frozen=True, kw_only=True, tag="CheckpointDamaged"):
    """A checkpoint that the coordinator named cannot be read."""

    worker: WorkerId
    generation: Count
    name: Text
    why: Text


class SnapshotTaken(Struct, frozen=True, kw_only=True, tag="SnapshotTaken"):
    """This worker's part of a snapshot lies whole in a file of its agent's folder.

    `seconds` is what that took, `stall_s` of it how long the worker did not train.
    """

    worker: WorkerId
    snapshot: SnapshotPart
    bytes: Count
    seconds: Seconds
    stall_s: Seconds = 0.0


class SnapshotLeftOut(Struct, frozen=True, kw_only=True, tag="SnapshotLeftOut"):
    """There was no room for this worker's part of the snapshot of `step`, or it could not be written.

    `lasting`: nor could it be later, as it is what the script has in its state.
    """

    worker: WorkerId
    generation: Count
    step: Count
    why: Text
    lasting: bool = False


class SnapshotDamaged(Struct, frozen=True, kw_only=True, tag="SnapshotDamaged"):
    """A part of a snapshot that the coordinator named is of no use where it lies, on `node`; "": none of it is."""

    worker: WorkerId
    generation: Count
    snapshot: SnapshotPart
    node: Annotated[str, Meta(max_length=64)]
    why: Text


class Loads(Struct, frozen=True, kw_only=True, tag="Loads"):
    """The experts' loads after `step`, as rank 0 knows them (see coordination.loads). The agent keeps the newest.

    `expert_bytes`: parameters and optimizer state of the largest expert. `token_s`: seconds that one expert's work for
    one token took there, forward and backward.
    """

    worker: WorkerId
    generation: Count
    step: Count
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_LOADS)]
    expert_bytes: Count
    token_s: Annotated[float, Meta(ge=0.0)]


class FlopTally(Struct, frozen=True, kw_only=True, tag="FlopTally"):
    """What the first round of `step` took here, forward and backward: `flop`, for `samples` of this worker's own.

    With experts a round is all ranks' together: what each computes is of all ranks' tokens.
    """

    worker: WorkerId
    generation: Count
    step: Count
    flop: Annotated[float, Meta(ge=0.0, le=1e30)]
    samples: Count


class EvaluationResult(Struct, frozen=True, kw_only=True, tag="EvaluationResult"):
    """What an evaluation of the state of `step` came to."""

    name: Name
    step: Count
    samples: Count
    metrics: Metrics


class EvaluationDone(Struct, frozen=True, kw_only=True, tag="EvaluationDone"):
    """What the newest evaluations came to, oldest first: told by each witness, again with each; its agent keeps it."""

    worker: WorkerId
    generation: Count
    results: Annotated[tuple[EvaluationResult, ...], Meta(max_length=MAX_TOLD)]


class Post(Struct, frozen=True, kw_only=True, tag="Post"):
    """Rendezvous: all keys that this worker posts for the group of `generation`, for all its members; {} for none.

    Each begins with the worker's rank (`key_of`). What it posts nevertheless goes in another one. Its
    agent sends it on in one bundle with those of its other workers.
    """

    worker: WorkerId
    generation: Count
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=1024)]


#: of a part of a checkpoint, told by the agent of its worker, which may be gone
CheckpointNews = CheckpointWritten | CheckpointUnwritten | CheckpointKept
WorkerMessage = (
    Attach
    | Begun
    | Warmed
    | Entered
    | Prepared
    | Disarmed
    | Applied
    | KnownSteps
    | Report
    | Complaint
    | VoteRefused
    | Finished
    | CheckpointWritten
    | CheckpointKept
    | CheckpointUnwritten
    | CheckpointDamaged
    | SnapshotTaken
    | SnapshotLeftOut
    | SnapshotDamaged
    | Loads
    | EvaluationDone
    | FlopTally
    | ScriptFailed
    | Raised
    | Post
)
