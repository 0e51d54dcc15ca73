"""Messages from a worker to the coordinator, which its agent passes on."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.batch_summary import BatchSummary
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.commit import Commit, Metrics
from holdfast.protocol.fingerprint import Fingerprint
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.protocol.names import Address, Count, KeyName, KeyValue, Name, Seconds, Struct, Text, WorkerId
from holdfast.protocol.plan import ExpertShape, PassedStep, PassedSteps, Phase
from holdfast.protocol.state import Holding, SnapshotPart
from holdfast.step_samples import MAX_MICRO_BATCHES

#: Loads of more experts (times layers) do not fit into a message. Such a model is placed as if all were equal.
MAX_LOADS = 1 << 17
#: most parts of a checkpoint, and most files of a part
MAX_CHECKPOINT_PARTS = 1 << 12
MAX_PART_FILES = 8
#: key of this setting in `Attach.config`
CHECKPOINT_EVERY = "checkpoint_every"
#: most evaluation results in a message
MAX_TOLD = 16


class Attach(Struct, frozen=True, kw_only=True, tag="Attach"):
    """A worker has started, has called `protect`, and waits for a generation. It holds its own initial state."""

    worker: WorkerId
    pid: Count
    host: Address
    #: port at which other workers fetch the state
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    #: software, model and settings, readable for people; equal on all workers of a job
    config: Annotated[dict[Text, Text], Meta(max_length=32)]
    global_batch: Count
    #: M, the micro-batches of a global batch
    micro_batches: Annotated[int, Meta(ge=0, le=MAX_MICRO_BATCHES)]
    #: seed of the order of samples, modulo 2**64
    seed: Count = 0
    expert_shape: ExpertShape | None = None
    #: whether it writes checkpoints
    saves: bool = False
    #: whether it writes checkpoints when the coordinator asks
    saves_in_time: bool = False
    #: how the workers of a node share a replica; the local rank of this worker follows from its index
    layout: Layout = WHOLE
    #: all layouts that the script lists, if there are several; its agent has chosen `layout` among them
    layouts: Layouts = ()
    #: summary of micro-batch 0 of step 1; equal on all workers of a job
    data: BatchSummary = ()


class Begun(Struct, frozen=True, kw_only=True, tag="Begun"):
    """This worker was ordered to begin `generation`, so its initial state is no longer fresh.

    That is so even if the worker has not read the order. Workers do not send this message. Its agent keeps it for the
    next coordinator, from the moment it passes on `Begin`.
    """

    worker: WorkerId
    generation: Count


class Warmed(Struct, frozen=True, kw_only=True, tag="Warmed"):
    """The answer to `Warm`.

    If the script raises or ends in a shadow step, the agent sends this, and then that the process is gone.
    """

    worker: WorkerId
    #: duration of the shadow steps
    seconds: Seconds
    #: why the worker is not warm, or ""
    error: Text = ""


class Entered(Struct, frozen=True, kw_only=True, tag="Entered"):
    """The group of `generation` stands, and the decision is carried out: the worker holds the state of `applied`."""

    worker: WorkerId
    generation: Count
    applied: Count
    received_bytes: Count = 0
    transfer_s: float = 0.0


class Prepared(Struct, frozen=True, kw_only=True, tag="Prepared"):
    """The group of the pending generation stands."""

    worker: WorkerId
    generation: Count


class Disarmed(Struct, frozen=True, kw_only=True, tag="Disarmed"):
    """The swap flag of the pending generation is down from the step in progress on, and no step has swapped.

    No later step can swap, because that needs the flags of all members.
    """

    worker: WorkerId
    #: term of the coordinator that ordered it
    term: Count
    generation: Count


class Applied(Struct, frozen=True, kw_only=True, tag="Applied"):
    """The worker has applied a step. Its agent keeps this until the journal has the step."""

    worker: WorkerId
    generation: Count
    step: Count
    commit: Commit
    world: Count
    #: only if the job verifies its state
    state_hash: Text = ""
    #: whether the agent also sends this at once
    witness: bool = False
    #: seconds that the script has paused since the step before
    paused_s: Seconds = 0.0
    #: last step of the script's loop, or 0 if unknown
    last_step: Count = 0


class Report(Struct, frozen=True, kw_only=True, tag="Report"):
    """The answer to `Stop`, and a promise not to advance until the next `Begin`."""

    worker: WorkerId
    term: Count
    #: the generation of `Stop`
    generation: Count
    #: the step of the state that is held, or None without a usable state
    applied: Count | None
    #: the step in progress
    step: Count
    phase: Phase
    #: whether the state is the worker's own initial state, unchanged; only such a state can be used for START
    fresh: bool = False
    #: the newest step that passed its vote
    passed: PassedStep | None = None
    #: Micro-batches of `step` with gradients that the worker has, or will have soon. In a replica group of several
    #: workers this includes the one proposed last: it is computed if all workers of the group name it, and not
    #: otherwise.
    summed: tuple[int, ...] = ()
    #: the parts of the state of step `applied` that are here
    state: Holding = Holding()
    #: the parts of the state of step `applied` + 1 that will be here after FORWARD, or None if a reduction is missing
    result: Holding | None = None
    #: the result of `step` without its flags, if all its reductions are here
    reduced: Commit | None = None
    #: generation of the attempt at `step` with a result that this worker refused, or 0
    refused: Count = 0
    #: whether the script has ended; a message about how follows
    ending: bool = False
    #: the fingerprint of the attempt at `step`, or None if the worker had not reached the comparison
    compared: Fingerprint | None = None

    def holding_of(self, step: int) -> Holding | None:
        """Return which parts of the state of `step` this worker has.

        If it has applied the step, these are the parts of its state; if it has applied the previous one, those that its
        retained result gives. None otherwise, or if it retains no result.
        """
        if self.applied == step:
            return self.state
        return self.result if self.applied == step - 1 else None


class Complaint(Struct, frozen=True, kw_only=True, tag="Complaint"):
    """A collective of `generation` failed: a peer or the network is gone."""

    worker: WorkerId
    generation: Count
    detail: Text
    #: whether it failed because its time was up
    timed_out: bool = False
    #: members to which no connection could be made
    unreachable: tuple[WorkerId, ...] = ()
    #: members at the other end of failed state transfers
    transfer_peers: tuple[WorkerId, ...] = ()


class VoteRefused(Struct, frozen=True, kw_only=True, tag="VoteRefused"):
    """The result of an attempt is refused. All members that have it refuse it, so no member votes."""

    worker: WorkerId
    generation: Count
    step: Count
    #: which samples are wrong, or that the workers differ
    why: Text


class ReceivedSteps(Struct, frozen=True, kw_only=True, tag="KnownSteps"):
    """The newest steps up to the state that this worker received. Its agent keeps them like steps applied here."""

    worker: WorkerId
    passed: PassedSteps


class Finished(Struct, frozen=True, kw_only=True, tag="Finished"):
    """The training loop asks for no further step in this generation."""

    worker: WorkerId
    generation: Count
    step: Count
    #: whether a script has asked to stop
    stopped: bool = False
    #: the reason, if this worker's script asked
    why: Text = ""


class ScriptFailed(Struct, frozen=True, kw_only=True, tag="ScriptFailed"):
    """The script's `after_apply` raised an exception, which would happen on any worker.

    The step is applied. All workers save it, and the job ends.
    """

    worker: WorkerId
    generation: Count
    step: Count
    why: Text


class ScriptError(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ScriptError"):
    """An exception of a script."""

    #: type of the exception, with file and line; equal for the same fault on all workers
    place: Text
    #: step at which it was raised, or None
    step: Count | None = None
    micro_batch: Count | None = None
    phase: Phase | None = None
    #: last lines of the traceback
    traceback: Text = ""


class Raised(Struct, frozen=True, kw_only=True, tag="Raised"):
    """The script has ended with an exception. The state is complete, and is kept until the process is replaced.

    No step continues in this process.
    """

    worker: WorkerId
    generation: Count
    detail: Text
    error: ScriptError
    exit_code: int
    #: whether another process would fail the same way
    final: bool = False


class CheckpointWritten(Struct, frozen=True, kw_only=True, tag="CheckpointWritten"):
    """A part of a checkpoint is complete in the folder `name`. It counts only after the coordinator accepts it.

    The answer is `AcceptCheckpoint` or `PruneCheckpoints`.
    """

    worker: WorkerId
    #: term of the plan under which the step was applied
    term: Count
    #: generation of that plan
    generation: Count
    step: Count
    name: Text
    #: index of the part
    part: Count = 0
    #: number of parts
    parts: Annotated[int, Meta(ge=1, le=MAX_CHECKPOINT_PARTS)] = 1
    files: Annotated[tuple[StoredFile, ...], Meta(max_length=MAX_PART_FILES)] = ()
    #: duration of the write
    seconds: Seconds
    #: seconds in which the worker did not train because of it
    stall_s: Seconds = 0.0


class CheckpointKept(Struct, frozen=True, kw_only=True, tag="CheckpointKept"):
    """The accepted checkpoint has its manifest. It was read again, and is complete."""

    worker: WorkerId
    term: Count
    generation: Count
    step: Count
    name: Text
    bytes: Count
    seconds: Seconds
    stall_s: Seconds = 0.0


class CheckpointUnwritten(Struct, frozen=True, kw_only=True, tag="CheckpointUnwritten"):
    """A part of a checkpoint could not be written, or the checkpoint could not be completed. None of it counts."""

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
    """This worker's part of a snapshot is complete in a file in its agent's folder."""

    worker: WorkerId
    snapshot: SnapshotPart
    bytes: Count
    #: duration
    seconds: Seconds
    #: seconds of it in which the worker did not train
    stall_s: Seconds = 0.0


class SnapshotLeftOut(Struct, frozen=True, kw_only=True, tag="SnapshotLeftOut"):
    """This worker's part of the snapshot of `step` did not fit, or could not be written."""

    worker: WorkerId
    generation: Count
    step: Count
    why: Text
    #: whether later snapshots will fail as well, because of the contents of the script's state
    lasting: bool = False


class SnapshotDamaged(Struct, frozen=True, kw_only=True, tag="SnapshotDamaged"):
    """A part of a snapshot that the coordinator named cannot be used."""

    worker: WorkerId
    generation: Count
    snapshot: SnapshotPart
    #: the node with the unusable part, or "" if the whole snapshot is unusable
    node: Annotated[str, Meta(max_length=64)]
    why: Text


class Loads(Struct, frozen=True, kw_only=True, tag="Loads"):
    """The loads of the experts after `step`, from rank 0. The agent keeps the newest."""

    worker: WorkerId
    generation: Count
    step: Count
    #: encoded as in coordination.loads
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_LOADS)]
    #: parameters and optimizer state of the largest expert
    expert_bytes: Count
    #: seconds of one expert's work for one token, forward and backward
    token_s: Annotated[float, Meta(ge=0.0)]


class FlopTally(Struct, frozen=True, kw_only=True, tag="FlopTally"):
    """The FLOP of the first round of `step`, forward and backward.

    With experts, a round is computed by all ranks together: each rank computes tokens of all ranks.
    """

    worker: WorkerId
    generation: Count
    step: Count
    #: FLOP of this worker
    flop: Annotated[float, Meta(ge=0.0, le=1e30)]
    #: samples of this worker in the round
    samples: Count


class EvaluationResult(Struct, frozen=True, kw_only=True, tag="EvaluationResult"):
    """The result of an evaluation of the state of `step`."""

    name: Name
    step: Count
    samples: Count
    metrics: Metrics


class EvaluationDone(Struct, frozen=True, kw_only=True, tag="EvaluationDone"):
    """The results of the newest evaluations, oldest first. Each witness sends all of them after each evaluation."""

    worker: WorkerId
    generation: Count
    results: Annotated[tuple[EvaluationResult, ...], Meta(max_length=MAX_TOLD)]


class Post(Struct, frozen=True, kw_only=True, tag="Post"):
    """Rendezvous: all keys that this worker posts for the members of the group of `generation`, or {} if it posts none.

    Each key begins with the worker's rank (`key_of`). Later keys follow in another message. Its agent sends the posts
    of all its workers in one bundle.
    """

    worker: WorkerId
    generation: Count
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=1024)]


#: News of a part of a checkpoint. The agent sends them, for the worker may be gone.
CheckpointNews = CheckpointWritten | CheckpointUnwritten | CheckpointKept
WorkerMessage = (
    Attach
    | Begun
    | Warmed
    | Entered
    | Prepared
    | Disarmed
    | Applied
    | ReceivedSteps
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
