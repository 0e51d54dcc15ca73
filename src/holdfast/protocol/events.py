"""The event contract: what happened, one JSON object a line, for people and other tools.

Every event has `time` (unix seconds), `event`, `job`, `term`, `generation`, and `seq`, its place in the job's journal.
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

#: Of what events are called and carry. 2: the names of today; files of 1 cannot be read.
FORMAT = 2


class JobStarted(Event, frozen=True, kw_only=True, tag_field="event", tag="job_started"):
    """The job exists; always the first event. `format`: of these events.

    An emulated accelerator: `emulated_token_s`: seconds per token that expert computation is made to take, 0 for none;
    `emulated_micro_batch_s`: likewise of a whole micro-batch.
    `flop_per_sample`: that training on one takes; `peak_flop_per_s`: of one accelerator; 0: the user has not said.
    """

    url: str
    coordinator_pid: int
    format: int = FORMAT
    emulated_token_s: float = 0.0
    emulated_micro_batch_s: float = 0.0
    flop_per_sample: float = 0.0
    peak_flop_per_s: float = 0.0


class CoordinatorRestarted(Event, frozen=True, kw_only=True, tag_field="event", tag="coordinator_restarted"):
    """A coordinator took over the job from the store; training went on meanwhile. The rest as of `job_started`."""

    url: str
    coordinator_pid: int
    flop_per_sample: float = 0.0
    peak_flop_per_s: float = 0.0


class GenerationStarted(Event, frozen=True, kw_only=True, tag_field="event", tag="generation_started"):
    """`members` are node names, `world_size` counts workers.

    `reason`: start, failure, join, rebalance, drain, move, replace, rollback, save (the last of a job that is to end).

    `expert_moves`: expert replicas that travel; `fault_threshold`: on how many distinct nodes each expert should live
    (`asked`) and does (`given`); None for a model without experts.

    `decision`: what becomes of the step that was under way: start, redo, forward, rollback; "" at a step's boundary.
    `seed`, `micro_batches`, `global_batch`: what the samples of its steps follow from, and how many each step has;
    None: a journal of before it was said.
    """

    members: tuple[str, ...]
    world_size: int
    reason: str
    decision: str = ""
    expert_moves: int = 0
    fault_threshold: FaultThreshold | None = None
    seed: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None


class StepCommitted(Event, frozen=True, kw_only=True, tag_field="event", tag="step_committed"):
    """Every member applied the step; `time` is the last one's, `step_s` since the step before.

    `skipped`: some gradient was not finite, so that the optimizer was left alone on every replica.
    `loss`: None for one that is not a number, or that nobody who is left knows.
    `sample_hashes`: the sum of its micro-batches' hashes, as v had it; None where nobody who is left knows v.
    `paused_s`: of `step_s`, for how long a script was in `job.pause()`, as far as witnesses tell.
    `metrics`: what the script has logged of the step, by name; None for what is infinite or no number. Empty as well
    where nobody who is left knows v.
    `grad_norm`: of the global batch's gradient, before clipping; None where it is not finite, or not known.
    `overflow`: the step was skipped because the loss scale was too large for it; the scale was lowered.
    `skipped_samples`: of `samples`, how many the script has left out of the step (`step.skip`).
    `last_step`: the step with which the script's loop ends; 0 if it is not known.
    """

    step: int
    loss: float | None
    samples: int
    world_size: int
    step_s: float
    skipped: bool = False
    sample_hashes: int | None = None
    paused_s: float = 0.0
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict[str, float | None])
    grad_norm: float | None = None
    overflow: bool = False
    skipped_samples: int = 0
    last_step: int = 0


class StepSkipped(Event, frozen=True, kw_only=True, tag_field="event", tag="step_skipped"):
    """A committed step changed no parameter, and no loss scale explains it. `why`: the reason in words.

    `in_a_row`: how many such steps there are now without a good one between them; see `--max-skipped-steps`.
    """

    step: int
    why: str
    in_a_row: int


class MicroBatchSkipped(Event, frozen=True, kw_only=True, tag_field="event", tag="micro_batch_skipped"):
    """The script has left a micro-batch out of a committed step (`step.skip`); `reason`: in its words."""

    step: int
    micro_batch: int
    reason: str


class LossNotFinite(Event, frozen=True, kw_only=True, tag_field="event", tag="loss_not_finite"):
    """The loss of a committed step is infinite or not a number, but its gradients are finite and were applied.

    `loss`: inf, -inf or nan. The event is not repeated until a step with a finite loss was committed.
    """

    step: int
    loss: str


class FlopCounted(Event, frozen=True, kw_only=True, tag_field="event", tag="flop_counted"):
    """Training on a sample takes `flop_per_sample`, as a round of `step` was counted; nobody had declared it."""

    step: int
    flop_per_sample: float


class Evaluated(Event, frozen=True, kw_only=True, tag_field="event", tag="evaluated"):
    """The state of `step` was evaluated on `samples` samples; once for each step and `name`, unless a roll-back came.

    `metrics`: means over them, by name; None for what is infinite or no number. It may come before `step_committed` of
    its step.
    """

    name: str
    step: int
    samples: int
    metrics: dict[str, float | None]


class FailureDetected(Event, frozen=True, kw_only=True, tag_field="event", tag="failure_detected"):
    """`kind`: connection_lost, lease_expired, process_exit, exception, hang; `after_s` since the last sign of life.

    `detector`: who saw it: node_health, process, exception, statistics (of what things take), timeout (of a collective,
    or of a report).
    `severity`: 1, the node is out; 2, a process starts again; 3, the same members try again.
    `category`: its class (docs/failures.md), `unknown` where no rule fits; None: not classified.
    `step`, `phase`, `micro_batch`: where the one that failed stood; None: not known.
    `tries`: how often that makes on this node, of this severity, within five minutes.
    """

    node: str
    kind: str
    detector: str
    severity: int
    after_s: float
    category: str | None = None
    step: int | None = None
    phase: str | None = None
    micro_batch: int | None = None
    detail: str = ""
    tries: int = 1


class StacksTaken(Event, frozen=True, kw_only=True, tag_field="event", tag="stacks_taken"):
    """Something hung: where every worker stood, who waited for whom, and at which line of its program each was.

    `of_generation`: the generation that stood still. `suspects`: workers and nodes that held it up. `missing`: workers
    that are left out, because they have not answered or there were too many.
    """

    of_generation: int
    suspects: tuple[str, ...]
    workers: tuple[SeenWorker, ...]
    stacks: tuple[SharedStack, ...]
    missing: int = 0


class LimitRaised(Event, frozen=True, kw_only=True, tag_field="event", tag="limit_raised"):
    """Two nodes were late at the same place of a step: its work takes its time, and nobody is taken out for it.

    `limit_s`: from when on it would count as late elsewhere. `why`: which nodes.
    """

    node: str
    step: int
    phase: str
    limit_s: float
    why: str
    micro_batch: int | None = None


class Recovered(Event, frozen=True, kw_only=True, tag_field="event", tag="recovered"):
    """The first step after a failure or a join is committed.

    `action`: retry, shrink, grow, rollback, restart_all, layout; `state_source`: live, snapshot, checkpoint, none.
    Phases: detect, decide, regroup, redo, one after the other; transfer, of the member that took longest, beside them.
    `micro_batches_kept`: gradients of the interrupted step that survivors kept; `micro_batches_redone`: those
    that were computed, and are once more. None: no step was interrupted, or not known.
    `down_s` runs from the failure (else the last sign of life; for a join, the commit before it) to the first step
    committed after it; for a restart, to the first step that was not committed before it.
    `why`: where it was chosen, why this and not another.
    """

    action: str
    state_source: str
    moved_bytes: int
    detect_s: float
    decide_s: float
    regroup_s: float
    transfer_s: float
    redo_s: float
    down_s: float
    experts_moved: int = 0
    micro_batches_kept: int | None = None
    micro_batches_redone: int | None = None
    why: str = ""


class JobWaiting(Event, frozen=True, kw_only=True, tag_field="event", tag="job_waiting"):
    """Training stands still until at least `nodes` more come, with `expert_slots` (0: any) in each MoE layer."""

    nodes: int
    expert_slots: int
    why: str


class RebalanceDecided(Event, frozen=True, kw_only=True, tag_field="event", tag="rebalance_decided"):
    """A new placement of the experts was computed for the loads after `step`, and `adopted` or not.

    `gain_s`: predicted for the steps until the next one; `cost_s`: of the migration; `moves`: replicas that travel.
    `why`: the reason, with its numbers.
    """

    step: int
    adopted: bool
    gain_s: float
    cost_s: float
    moves: int
    why: str


class Rebalanced(Event, frozen=True, kw_only=True, tag_field="event", tag="rebalanced"):
    """The step beside which experts moved to a new placement is committed, and they serve there from the next one on.

    `down_s` runs from the commit before it, that step included.
    `transfer_s`: of the member whose experts took longest to come.
    """

    step: int
    moved_bytes: int
    experts_moved: int
    transfer_s: float
    down_s: float


class RolledBack(Event, frozen=True, kw_only=True, tag_field="event", tag="rolled_back"):
    """Some state had no live copy: the job resumes after `to_step`."""

    to_step: int
    why: str


class CorruptionFound(Event, frozen=True, kw_only=True, tag_field="event", tag="corruption_found"):
    """Something was not what it must be, and was refused before it counted.

    `what`: samples (an attempt at `step` did not have each micro-batch once: it is done again with nothing kept);
    settings, state (workers differ before `step`: which options of the optimizer, or a slice of the state).
    `likely_cause`: script, or transfer (a worker that differs has received its state since all were equal); "" if
    nothing is known.
    """

    step: int
    what: str
    detail: str
    likely_cause: str = ""

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        if self.what == "samples":
            return f"the samples of step {self.step} were not what they must be: {self.detail}"
        return f"workers differed before step {self.step}: {self.detail}"


class CheckpointSaved(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_saved"):
    """A checkpoint counts; writing it took `save_s`, training stood for `stall_s`, the next is due in `period_s`."""

    step: int
    save_s: float
    saved_bytes: int
    stall_s: float = 0.0
    period_s: float | None = None
    #: how many checkpoints that were due were left out while this one was being written
    left_out: int = 0


class CheckpointDelayed(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_delayed"):
    """Checkpoints that were due are left out, because parts of an earlier one are still being written."""

    #: the newest step whose checkpoint was left out
    step: int
    #: nodes that are still writing, at most 16 of them
    nodes: tuple[str, ...]
    #: how many were left out, one after the other
    left_out: int
    #: seconds since the first of them was due
    waited_s: float


class CheckpointFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_failed"):
    """No checkpoint of `step` could be written; training goes on. `tries`: that makes so many, one after the other."""

    node: str
    step: int
    why: str
    tries: int


class OutputLost(Event, frozen=True, kw_only=True, tag_field="event", tag="output_lost"):
    """An output file cannot be written, as on a full disk; training goes on. Reported once for each file.

    `node`: whose file it is, "" for the coordinator's. Events wait in memory, up to a bound; lines of logs are lost.
    """

    file: str
    why: str
    node: str = ""


class CheckpointRejected(Event, frozen=True, kw_only=True, tag_field="event", tag="checkpoint_rejected"):
    """A checkpoint cannot be read; the one before it is used."""

    name: str
    why: str


class SnapshotSaved(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_saved"):
    """A snapshot of a committed step is whole in the memory of the members' nodes; `save_s`: what that took.

    `stall_s`: of that, how long the member that waited longest did not train. `saved_bytes`: of all parts together.
    `fault_threshold`: on how many distinct nodes each part should lie (`asked`), and is about to (`given`).
    """

    step: int
    save_s: float
    saved_bytes: int
    stall_s: float
    fault_threshold: FaultThreshold


class SnapshotFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_failed"):
    """A node had no room for its part of the snapshot of `step`, or could not write it: that one never serves.

    Told again only once the reason is another, or one has been written in between.
    """

    node: str
    step: int
    why: str


class SnapshotRejected(Event, frozen=True, kw_only=True, tag_field="event", tag="snapshot_rejected"):
    """A copy of a part of a snapshot is of no use, or (`node` is "") the whole snapshot; the next source is used."""

    step: int
    node: str
    why: str


class StoreReturned(Event, frozen=True, kw_only=True, tag_field="event", tag="store_returned"):
    """The store answers again, which was away for `away_s`: nothing was decided meanwhile, and training went on."""

    away_s: float


class JournalRepaired(Event, frozen=True, kw_only=True, tag_field="event", tag="journal_repaired"):
    """The journal had lost its events `from_seq` to `to_seq`; this one, with number `to_seq`, stands for all of them.

    `from_step` is where the events before them end, `to_step` where these did: exact, from the coordinator's record,
    like `samples` (of all steps up to `to_step` that no roll-back undid), `step_samples` (of each step), `loss` and
    `step_time` of the step that was committed last, and `skipped_in_a_row`. What the lost events said beyond that is
    gone. `time` is that of the first event after them.
    """

    from_seq: int
    to_seq: int
    from_step: int
    to_step: int
    samples: int
    step_samples: int
    loss: float | None
    step_time: float
    skipped_in_a_row: int = 0


class ActionRequested(Event, frozen=True, kw_only=True, tag_field="event", tag="action_requested"):
    """Something needs a person. `who`: operator (who runs the job), site (who repairs machines).

    `command`: what may help, or says more. `about`, `about_seq`: the event that led to this; `why`, in words.
    """

    who: str
    command: str
    why: str
    about: str
    about_seq: int


class JobFinished(Event, frozen=True, kw_only=True, tag_field="event", tag="job_finished"):
    """The job has ended well. `reason`: completed, stopped (by its script, a person or a signal), time_limit.

    `why`: the reason in words, as far as somebody gave one. `resumable`: it was ended from outside, and the same
    command goes on from its newest checkpoint. `samples`: of the steps after `samples_since`; this is above 0 if the
    journal does not have the steps before, because the job was resumed from a checkpoint of an earlier run.
    `final_loss`: None if it is not a number, or if the journal has no step.
    """

    reason: str
    steps: int
    samples: int
    final_loss: float | None
    why: str = ""
    resumable: bool = False
    samples_since: int = 0

    @property
    def outcome(self) -> str:
        """What has become of the job: finished, or stopped."""
        return "stopped" if self.resumable else "finished"


class JobFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="job_failed"):
    """The job cannot go on; `why` says what was lost. `traceback`: of the script's exception, if that is the cause."""

    why: str
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

#: Events that come only with a change of the record, which is written before them: a record that does not know of one
#: in the journal is older than the job. Others, such as committed steps, may be in the journal alone.
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

#: all events by the name that they have in JSON
EVENTS: dict[str, type[AnyEvent]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}


class OtherEvent(Event, frozen=True, kw_only=True):
    """An event that this version does not know: a newer one wrote it. `fields`: all that it carries, as it stands."""

    event: str
    fields: dict[str, Any]


#: what a reader meets
ReadEvent = AnyEvent | OtherEvent


def name_of(event: ReadEvent) -> str:
    """Return the name that an event has in JSON."""
    return event.event if isinstance(event, OtherEvent) else str(event.__struct_config__.tag)
