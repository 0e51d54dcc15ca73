"""The events of a job, one JSON object per line, for people and tools.

Each event has `time` (unix seconds), `event`, `job`, `term`, `generation`, and `seq`, its number in the job's journal.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from holdfast.protocol.event import Event
from holdfast.protocol.failures import SeenWorker, SharedStack
from holdfast.protocol.node_events import (
    JobAtRisk,
    LayoutChanged,
    LayoutKept,
    MemorySampled,
    NodeLeft,
    NodeMoved,
    NodeRefused,
    NodeRepaired,
    NodesJoined,
    NodeStayed,
    StandbyFailed,
    StandbyReady,
    StragglerFound,
    WorkersChanged,
)
from holdfast.protocol.plan import FaultThreshold

#: Version of the event names and fields. 2: the names of today. Files of version 1 cannot be read.
FORMAT = 2


class JobStarted(Event, frozen=True, kw_only=True, tag_field="event", tag="job_started"):
    """The job has started; always the first event."""

    url: str
    coordinator_pid: int
    #: version of these events
    format: int = FORMAT
    #: with an emulated accelerator, seconds of expert computation per token; else 0
    emulated_token_s: float = 0.0
    #: with an emulated accelerator, seconds of computation per micro-batch; else 0
    emulated_micro_batch_s: float = 0.0
    #: FLOP of training on a sample, or 0 if the user has not given it
    flop_per_sample: float = 0.0
    #: peak FLOP/s of one accelerator, or 0 if the user has not given it
    peak_flop_per_s: float = 0.0


class CoordinatorRestarted(Event, frozen=True, kw_only=True, tag_field="event", tag="coordinator_restarted"):
    """Another coordinator has taken over the job from the store.

    Training continued meanwhile. Fields as in `job_started`.
    """

    url: str
    coordinator_pid: int
    flop_per_sample: float = 0.0
    peak_flop_per_s: float = 0.0


class GenerationStarted(Event, frozen=True, kw_only=True, tag_field="event", tag="generation_started"):
    """A generation of the job begins."""

    #: names of the nodes
    members: tuple[str, ...]
    #: number of workers
    world_size: int
    #: start, failure, join, rebalance, drain, move, replace, rollback, or save (the last generation of a job that ends)
    reason: str
    #: decision about the interrupted step: start, redo, forward, rollback; "" if no step was interrupted
    decision: str = ""
    #: expert replicas that move
    expert_moves: int = 0
    #: wanted and actual number of distinct nodes per expert; None without experts
    fault_threshold: FaultThreshold | None = None
    #: The samples of a step follow from `seed`, `micro_batches` and `global_batch`. None in journals of earlier
    #: versions.
    seed: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None


class StepCommitted(Event, frozen=True, kw_only=True, tag_field="event", tag="step_committed"):
    """All members have applied the step. `time` is that of the last one."""

    step: int
    #: None if it is NaN or infinite, or if no remaining worker knows it
    loss: float | None
    samples: int
    world_size: int
    #: seconds since the step before
    step_s: float
    #: whether some gradient was not finite, or the script skipped all micro-batches, so that no optimizer changed
    #: anything
    skipped: bool = False
    #: sum of the hashes of the step's micro-batches, or None if no remaining worker knows it
    sample_hashes: int | None = None
    #: longest time of `step_s` that a script was in `job.pause()`, as reported by witnesses
    paused_s: float = 0.0
    #: logged values by name; None for NaN and infinity; empty if no remaining worker knows them
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict[str, float | None])
    #: norm of the gradient of the global batch before clipping; None if it is not finite, or unknown
    grad_norm: float | None = None
    #: the loss scale was too large for the step, and was lowered
    overflow: bool = False
    #: how many of `samples` the script has skipped (`step.skip`)
    skipped_samples: int = 0
    #: last step of the script's loop, or 0 if unknown
    last_step: int = 0


class StepSkipped(Event, frozen=True, kw_only=True, tag_field="event", tag="step_skipped"):
    """A committed step changed no parameter, and no loss scale explains that."""

    step: int
    why: str
    #: number of such steps without a good step between them; see `--max-skipped-steps`
    in_a_row: int


class MicroBatchSkipped(Event, frozen=True, kw_only=True, tag_field="event", tag="micro_batch_skipped"):
    """The script has skipped a micro-batch of a committed step (`step.skip`)."""

    step: int
    micro_batch: int
    #: the script's reason
    reason: str


class LossNotFinite(Event, frozen=True, kw_only=True, tag_field="event", tag="loss_not_finite"):
    """The loss of a committed step is NaN or infinite, but its gradients are finite and were applied.

    The event is not repeated until a step with a finite loss was committed.
    """

    step: int
    #: inf, -inf or nan
    loss: str


class FlopCounted(Event, frozen=True, kw_only=True, tag_field="event", tag="flop_counted"):
    """FLOP of training on a sample, counted in a round of `step`, because the user had not given it."""

    step: int
    flop_per_sample: float


class Evaluated(Event, frozen=True, kw_only=True, tag_field="event", tag="evaluated"):
    """The state of `step` was evaluated on `samples` samples. Once for each step and `name`, except after a roll-back.

    The event may come before `step_committed` of its step.
    """

    name: str
    step: int
    samples: int
    #: means by name; None for NaN and infinity
    metrics: dict[str, float | None]


class FailureDetected(Event, frozen=True, kw_only=True, tag_field="event", tag="failure_detected"):
    """A failure of a node or a worker."""

    node: str
    #: connection_lost, lease_expired, process_exit, exception or hang
    kind: str
    #: node_health, process, exception, statistics (of durations), or timeout (of a collective or a report)
    detector: str
    #: 1: the node is removed; 2: a process restarts; 3: the same members try again
    severity: int
    #: seconds since the last sign of life
    after_s: float
    #: failure class (docs/failures.md); unknown if no rule matches, None if it was not classified
    category: str | None = None
    #: step of the failed worker, or None if unknown
    step: int | None = None
    #: its phase
    phase: str | None = None
    #: its micro-batch
    micro_batch: int | None = None
    detail: str = ""
    #: number of failures of this severity on this node within five minutes
    tries: int = 1


class StacksTaken(Event, frozen=True, kw_only=True, tag_field="event", tag="stacks_taken"):
    """Training hung: activities and stacks of all workers."""

    #: the generation that hung
    of_generation: int
    #: workers and nodes that held it up
    suspects: tuple[str, ...]
    workers: tuple[SeenWorker, ...]
    stacks: tuple[SharedStack, ...]
    #: workers that are left out, because they have not answered, or there were too many
    missing: int = 0


class LimitRaised(Event, frozen=True, kw_only=True, tag_field="event", tag="limit_raised"):
    """Two nodes were late at the same place of a step: the work is slow, and no node is removed."""

    node: str
    step: int
    phase: str
    #: the new limit in seconds
    limit_s: float
    #: the two nodes
    why: str
    micro_batch: int | None = None


class Recovered(Event, frozen=True, kw_only=True, tag_field="event", tag="recovered"):
    """The first step after a failure or a join is committed.

    `down_s` runs from the failure (or the last sign of life; for a join, the commit before it) to the first step
    committed after it. For a restart it runs to the first step that was not committed before it. The phases detect,
    decide, regroup and redo follow each other; transfer, of the slowest member, overlaps them.
    """

    #: retry, shrink, grow, rollback, restart_all or layout
    action: str
    #: live, snapshot, checkpoint or none
    state_source: str
    moved_bytes: int
    detect_s: float
    decide_s: float
    regroup_s: float
    transfer_s: float
    redo_s: float
    down_s: float
    experts_moved: int = 0
    #: micro-batches of the interrupted step with gradients that survivors kept; None without an interrupted step, or if
    #: unknown
    micro_batches_kept: int | None = None
    #: micro-batches that were computed twice; None as above
    micro_batches_redone: int | None = None
    #: why this action was chosen, if it was a choice
    why: str = ""


class JobWaiting(Event, frozen=True, kw_only=True, tag_field="event", tag="job_waiting"):
    """Training waits for at least `nodes` more nodes."""

    nodes: int
    #: expert slots that they need in each MoE layer; 0: any number
    expert_slots: int
    why: str


class RebalanceDecided(Event, frozen=True, kw_only=True, tag_field="event", tag="rebalance_decided"):
    """A new placement of the experts was computed for the loads after `step`."""

    step: int
    #: whether it is used
    adopted: bool
    #: predicted gain until the next placement
    gain_s: float
    #: predicted cost of the migration
    cost_s: float
    #: replicas that move
    moves: int
    #: the reason with its numbers
    why: str


class Rebalanced(Event, frozen=True, kw_only=True, tag_field="event", tag="rebalanced"):
    """The step during which experts moved to a new placement is committed. They are used from the next step on."""

    step: int
    moved_bytes: int
    experts_moved: int
    #: seconds of the slowest member
    transfer_s: float
    #: seconds from the commit before this step to its own commit
    down_s: float


class RolledBack(Event, frozen=True, kw_only=True, tag_field="event", tag="rolled_back"):
    """Some state had no live copy: the job resumes after `to_step`."""

    to_step: int
    why: str


class CorruptionFound(Event, frozen=True, kw_only=True, tag_field="event", tag="corruption_found"):
    """Wrong data was found, and refused before it counted."""

    step: int
    #: samples (an attempt at `step` did not have each micro-batch once, and is repeated without kept gradients),
    #: settings (options of the optimizer differ between workers), or state (a slice of it differs)
    what: str
    detail: str
    #: script, or transfer (a differing worker has received its state since all were equal), or "" if unknown
    likely_cause: str = ""

    @property
    def summary(self) -> str:
        """The finding in one sentence, with the step: wrong samples, or workers that differ in settings or state."""
        if self.what == "samples":
            return f"the samples of step {self.step} were not what they must be: {self.detail}"
        return f"workers differed before step {self.step}: {self.detail}"


class CheckpointSaved(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_saved"):
    """A checkpoint counts."""

    step: int
    #: duration of the writes
    save_s: float
    saved_bytes: int
    #: seconds in which training stood still
    stall_s: float = 0.0
    #: seconds until the next one is due
    period_s: float | None = None
    #: number of due checkpoints that were left out while this one was being written
    left_out: int = 0


class CheckpointDelayed(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_delayed"):
    """Checkpoints that were due are left out, because parts of an earlier one are still being written."""

    #: the newest step without its checkpoint
    step: int
    #: nodes that are still writing, at most 16 of them
    nodes: tuple[str, ...]
    #: how many were left out, one after the other
    left_out: int
    #: seconds since the first of them was due
    waited_s: float


class CheckpointFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_failed"):
    """A checkpoint of `step` could not be written. Training continues."""

    node: str
    step: int
    why: str
    #: number of failures in a row
    tries: int


class OutputLost(Event, frozen=True, kw_only=True, tag_field="event", tag="output_lost"):
    """An output file cannot be written, for example on a full disk. Training continues. Reported once for each file.

    Events wait in memory, up to a bound. Lines of logs are lost.
    """

    file: str
    why: str
    #: the node of the file, or "" for the coordinator's
    node: str = ""


class CheckpointRejected(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_rejected"):
    """A checkpoint cannot be read; the one before it is used."""

    name: str
    why: str


class SnapshotSaved(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_saved"):
    """A snapshot of a committed step is complete in the memory of the members' nodes."""

    step: int
    #: its duration
    save_s: float
    #: bytes of all parts
    saved_bytes: int
    #: longest time in which a member did not train
    stall_s: float
    #: wanted and actual number of distinct nodes for each part
    fault_threshold: FaultThreshold


class SnapshotFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_failed"):
    """A node had no room for its part of the snapshot of `step`, or could not write it. The snapshot is never used.

    Repeated only if the reason changes, or after a snapshot in between.
    """

    node: str
    step: int
    why: str


class SnapshotRejected(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_rejected"):
    """A copy of a part of a snapshot cannot be used. The next source is used."""

    step: int
    #: the node with the copy, or "" if the whole snapshot cannot be used
    node: str
    why: str


class StoreReturned(Event, frozen=True, kw_only=True, tag_field="event", tag="store_returned"):
    """The store answers again. No decision was made meanwhile, and training continued."""

    #: seconds without the store
    away_s: float


class JournalRepaired(Event, frozen=True, kw_only=True, tag_field="event", tag="journal_repaired"):
    """The journal had lost its events `from_seq` to `to_seq`. This event, with number `to_seq`, replaces them.

    Its values are exact, from the coordinator's record. All other contents of the lost events are gone. `time` is that
    of the first event after them.
    """

    from_seq: int
    to_seq: int
    #: step after the events before the gap
    from_step: int
    #: step after the lost events
    to_step: int
    #: samples of all steps up to `to_step` that were not rolled back
    samples: int
    #: samples of each step
    step_samples: int
    #: loss of the last committed step
    loss: float | None
    #: time of the last committed step
    step_time: float
    skipped_in_a_row: int = 0


class ActionRequested(Event, frozen=True, kw_only=True, tag_field="event", tag="action_requested"):
    """A person should act."""

    #: operator (runs the job) or site (repairs machines)
    who: str
    #: a command that helps, or shows more
    command: str
    why: str
    #: event that led to this
    about: str
    #: its number
    about_seq: int


class JobFinished(Event, frozen=True, kw_only=True, tag_field="event", tag="job_finished"):
    """The job has ended without failing."""

    #: completed, stopped (by its script, a user or a signal) or time_limit
    reason: str
    steps: int
    #: samples of the steps after `samples_since`
    samples: int
    #: None if it is NaN or infinite, or if the journal has no step
    final_loss: float | None
    #: the reason in words, if one was given
    why: str = ""
    #: whether it was ended from outside; the same command then resumes it
    resumable: bool = False
    #: Above 0 if the journal lacks the steps before, because the job was resumed from a checkpoint of an earlier run.
    samples_since: int = 0

    @property
    def outcome(self) -> str:
        """Outcome of the job: finished, or stopped."""
        return "stopped" if self.resumable else "finished"


class JobFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="job_failed"):
    """The job cannot continue."""

    #: the loss or the cause
    why: str
    #: of the script's exception, if that is the cause
    traceback: str = ""


AnyEvent = (
    JobStarted
    | CoordinatorRestarted
    | NodesJoined
    | WorkersChanged
    | NodeLeft
    | NodeRepaired
    | StandbyReady
    | StandbyFailed
    | NodeMoved
    | NodeStayed
    | NodeRefused
    | MemorySampled
    | StragglerFound
    | GenerationStarted
    | StepCommitted
    | StepSkipped
    | MicroBatchSkipped
    | LossNotFinite
    | FlopCounted
    | Evaluated
    | FailureDetected
    | LimitRaised
    | StacksTaken
    | Recovered
    | JobWaiting
    | RebalanceDecided
    | Rebalanced
    | RolledBack
    | CorruptionFound
    | CheckpointSaved
    | CheckpointDelayed
    | CheckpointFailed
    | OutputLost
    | CheckpointRejected
    | SnapshotSaved
    | SnapshotFailed
    | SnapshotRejected
    | JobAtRisk
    | LayoutChanged
    | LayoutKept
    | StoreReturned
    | JournalRepaired
    | ActionRequested
    | JobFinished
    | JobFailed
)

#: Events that come only with a change of the record, which is written before them. If the journal has one that the
#: record does not know, the record is older than the job. Other events, such as committed steps, may be in the journal
#: alone.
RECORDED = (
    JobStarted,
    CoordinatorRestarted,
    GenerationStarted,
    RolledBack,
    CheckpointSaved,
    CheckpointRejected,
    LayoutChanged,
    JobFailed,
)

#: All events by their names in JSON.
EVENTS: dict[str, type[AnyEvent]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}


class OtherEvent(Event, frozen=True, kw_only=True):
    """An event of a newer version."""

    event: str
    #: all its fields, as they are in the file
    fields: dict[str, Any]


#: any event in a file
ReadEvent = AnyEvent | OtherEvent


def name_of(event: ReadEvent) -> str:
    """Return the name of an event in JSON."""
    return event.event if isinstance(event, OtherEvent) else str(event.__struct_config__.tag)
