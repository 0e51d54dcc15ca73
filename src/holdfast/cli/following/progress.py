"""One line of text for each event, for people who watch a job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from holdfast.cli.output import on_one_line, seconds_in_words
from holdfast.protocol import events as ev
from holdfast.protocol.events import JobFailed, OtherEvent, ReadEvent, StepCommitted
from holdfast.protocol.plan import JoinedNode

E = TypeVar("E", bound=ev.Event)


def loss_text(loss: float | None) -> str:
    """Return a loss in at most 10 characters; "-" for None, which is NaN in JSON, or a loss that no worker knows."""
    if loss is None:
        return "-"
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.3e}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 worker" or "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_workers(number: int) -> str:
    """Return the number of workers, such as "1 worker"."""
    return count(number, "worker")


#: Of more nodes than this, only the number is printed.
_NAMED_AT_MOST = 8


def _name_nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED_AT_MOST else f"{len(names)} nodes"


def _describe_emulation(event: ev.JobStarted) -> str:
    """Return that accelerator or experts are emulated, and with which time, or "" if not."""
    if seconds := event.emulated_micro_batch_s:
        return f"; the accelerator is EMULATED: {seconds:g} s per micro-batch"
    seconds = event.emulated_token_s
    return f"; expert computation is EMULATED: {seconds:g} s per token" if seconds else ""


#: A smaller difference between two clocks is not reported.
_CLOCK_OFF_S = 1.0


def _describe_joined(joined: JoinedNode) -> str:
    """Return a joined node with its workers' pids, and how far its clock is off if that matters."""
    off = joined.clock_off_s
    clock = f", its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}" if abs(off) >= _CLOCK_OFF_S else ""
    return f"{joined.node} joined, workers {', '.join(map(str, joined.worker_pids))}{clock}"


def _describe_failure(event: ev.FailureDetected) -> str:
    detail = f" ({event.detail})" if event.detail else ""
    return f"{event.node} failed: {event.kind}{detail}, seen after {event.after_s:.3f} s"


def _describe_step(event: StepCommitted) -> str:
    rate = f"{event.samples / event.step_s:.1f}" if event.step_s > 0 else "-"
    return f"step {event.step}: loss {loss_text(event.loss)}, {rate} samples/s, {count_workers(event.world_size)}"


def _describe_recovery(event: ev.Recovered) -> str:
    """Return how a job recovered, how long it was down and its phases, and the bytes that moved."""
    parts = {
        "detect": event.detect_s,
        "decide": event.decide_s,
        "regroup": event.regroup_s,
        "transfer": event.transfer_s,
        "redo": event.redo_s,
    }
    taken = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items() if seconds)
    moved = f", {event.moved_bytes / 1e6:.1f} MB moved" if event.moved_bytes else ""
    return f"recovered by {event.action}, down {event.down_s:.3f} s{f' ({taken})' if taken else ''}{moved}"


def _describe_checkpoint(event: ev.CheckpointSaved) -> str:
    return f"checkpoint of step {event.step}: {event.saved_bytes / 1e6:.1f} MB in {event.save_s:.2f} s"


def _describe_snapshot(event: ev.SnapshotSaved) -> str:
    """Return the step, size and time of a snapshot, and that it has fewer copies than asked for, if so."""
    asked, given = event.fault_threshold.asked, event.fault_threshold.given
    few = f", each part on {given} nodes instead of {asked}" if given < asked else ""
    return f"snapshot of step {event.step}: {event.saved_bytes / 1e6:.1f} MB in {event.save_s:.2f} s{few}"


def _describe_evaluation(event: ev.Evaluated) -> str:
    values = ", ".join(f"{name} {'-' if value is None else f'{value:g}'}" for name, value in event.metrics.items())
    return f"{event.name} of step {event.step}: {values}"


def _describe_waiting(event: ev.JobWaiting) -> str:
    """Return how many nodes and expert slots the job waits for, and why."""
    nodes = f"{event.nodes} node{'s' if event.nodes > 1 else ''}"
    slots = f" with {event.expert_slots} more expert slots" if event.expert_slots else ""
    return f"waiting for {nodes}{slots}: {event.why}"


def _describe_all_joined(event: ev.NodesJoined) -> str:
    """Return the nodes that joined, each with its workers and clock; of many, only their number and the first names."""
    nodes = event.nodes
    if len(nodes) <= _NAMED_AT_MOST:
        return "; ".join(map(_describe_joined, nodes))
    return (
        f"{len(nodes)} nodes joined: {', '.join(event.names[:_NAMED_AT_MOST])} and {len(nodes) - _NAMED_AT_MOST} more"
    )


def _describe_lost_output(event: ev.OutputLost) -> str:
    of = f" of {event.node}" if event.node else ""
    return f"the file {event.file}{of} cannot be written: {event.why}; training goes on"


def _describe_limit(event: ev.LimitRaised) -> str:
    place = "" if event.micro_batch is None else f", micro-batch {event.micro_batch}"
    return f"{event.phase} of step {event.step}{place} may take up to {event.limit_s:.1f} s: {event.why}"


#: what to do about an event, by its name in JSON; the command that the request names follows
_REMEDIES = {
    "job_waiting": "start the missing nodes",
    "node_left": "repair that machine, and then let its node come back",
    "node_stayed": "start a standby that can take its place",
    "rolled_back": "save more often (--checkpoint-every, --snapshot-every) to lose fewer steps the next time",
    "checkpoint_failed": "check that the checkpoint directory can be written and has space; the node's output",
    "checkpoint_delayed": "use faster storage, or save less often (--checkpoint-every); the node's output",
    "checkpoint_rejected": "check the storage of the checkpoints, and restore the damaged files from a copy; details",
    "snapshot_failed": "free memory on that node, or give it a --snapshot-dir with more space; details",
    "corruption_found": (
        "check whether the script changes its state or samples on one worker alone; if not, test the memory and the "
        "accelerators of the nodes that are named; details"
    ),
    "step_skipped": "check the data, the learning rate and the loss: gradients of this step are not usable; details",
    "job_failed": "remove the cause, and start the job again with the same command; details",
}


def describe_request(who: str, about: str, command: str) -> str:
    """Return the request for an action in words.

    Args:
        who: "operator" or "site".
        about: JSON name of the event that led to the request.
        command: a command that helps.
    """
    remedy = _REMEDIES.get(about, "look into it")
    return f"the {'site staff' if who == 'site' else who} should {remedy}: {command}"


def _line(kind: type[E], words: Callable[[E], str]) -> tuple[type[ev.Event], Callable[[Any], str]]:
    return kind, words


def _describe_memory(event: ev.MemorySampled) -> str:
    peaks = ", ".join(f"{one.role} {one.node} {one.peak / 1e6:.0f} MB" for one in event.nodes)
    return f"peak memory around generation {event.generation}: {peaks}"


def _describe_stacks(event: ev.StacksTaken) -> str:
    """Return which workers are suspected of a hang, how many waited, and where to read more."""
    waiting = sum(worker.waits for worker in event.workers)
    suspects = ", ".join(event.suspects) or "no worker in particular"
    return f"training stopped; suspected: {suspects}; {count_workers(waiting)} waited (holdfast explain {event.seq})"


def _describe_end(event: ev.JobFinished) -> str:
    """Return how a job ended: stopped or done, and why, with steps, samples and loss; or that it was done before."""
    since = event.samples_since
    if 0 < since == event.steps and not event.resumable:
        return _describe_finished_before(event.steps)
    end = f"stopped ({event.why})" if event.resumable else f"done ({event.why})" if event.why else "done"
    samples = f"{count(event.samples, 'sample')}{f' since the resume at step {since}' if since else ''}"
    loss = f", loss {loss_text(event.final_loss)}" if event.samples else ""
    return f"{end}: {count(event.steps, 'step')}, {samples}{loss}"


def _describe_finished_before(step: int) -> str:
    return f"the job was already finished at step {step}"


_WORDS = dict(
    (
        _line(ev.JobStarted, lambda e: f"job {e.job} at {e.url}{_describe_emulation(e)}"),
        _line(ev.CoordinatorRestarted, lambda e: f"coordinator restarted at {e.url}, term {e.term}"),
        _line(ev.NodesJoined, _describe_all_joined),
        _line(ev.WorkersChanged, lambda e: f"{e.node} has new workers {', '.join(map(str, e.worker_pids))}"),
        _line(ev.NodeLeft, lambda e: f"{e.node} left: {e.reason}{f', {e.detail}' if e.detail else ''}"),
        _line(ev.NodeRepaired, lambda e: f"{e.node} trains again after {e.repair_s:.1f} s ({e.repair} repair)"),
        _line(ev.StandbyReady, lambda e: f"standby {e.node} is warm, after {e.warm_s:.1f} s"),
        _line(ev.StragglerFound, lambda e: f"{e.node} is slow: {e.why}"),
        _line(ev.StandbyFailed, lambda e: f"standby {e.node} is not warm: {e.why}"),
        _line(ev.NodeRefused, lambda e: f"{e.node} is refused: {e.why}"),
        _line(ev.NodeStayed, lambda e: f"{e.node} keeps its place: {e.detail}"),
        _line(ev.NodeMoved, lambda e: f"{e.to_node} has taken the place of {e.from_node} in {e.down_s:.2f} s"),
        _line(ev.MemorySampled, _describe_memory),
        _line(ev.StoreReturned, lambda e: f"the store answers again; for {e.away_s:.1f} s no decision was possible"),
        _line(
            ev.GenerationStarted,
            lambda e: (
                f"generation {e.generation}: {count_workers(e.world_size)} on {_name_nodes(e.members)} ({e.reason})"
            ),
        ),
        _line(StepCommitted, _describe_step),
        _line(ev.StepSkipped, lambda e: f"step {e.step} was skipped ({e.in_a_row} in a row): {e.why}"),
        _line(ev.MicroBatchSkipped, lambda e: f"micro-batch {e.micro_batch} of step {e.step} was skipped: {e.reason}"),
        _line(ev.LossNotFinite, lambda e: f"the loss of step {e.step} is {e.loss}; its finite gradients were applied"),
        _line(ev.FlopCounted, lambda e: f"training on a sample takes {e.flop_per_sample:.4g} FLOP, as counted"),
        _line(ev.Evaluated, _describe_evaluation),
        _line(ev.FailureDetected, _describe_failure),
        _line(ev.StacksTaken, _describe_stacks),
        _line(ev.Recovered, _describe_recovery),
        _line(ev.JobWaiting, _describe_waiting),
        _line(ev.RebalanceDecided, lambda e: f"experts {'move' if e.adopted else 'stay'}: {e.why}"),
        _line(ev.Rebalanced, lambda e: f"{e.experts_moved} experts moved, {e.down_s:.3f} s from step to step"),
        _line(ev.RolledBack, lambda e: f"rolled back to step {e.to_step}: {e.why}"),
        _line(ev.CheckpointSaved, _describe_checkpoint),
        _line(
            ev.CheckpointDelayed,
            lambda e: (
                f"checkpoints are less frequent: {e.left_out} were left out, because an earlier one is still being "
                f"written on {', '.join(e.nodes)}"
            ),
        ),
        _line(ev.CheckpointFailed, lambda e: f"the checkpoint of step {e.step} failed on {e.node}: {e.why}"),
        _line(ev.OutputLost, _describe_lost_output),
        _line(ev.SnapshotSaved, _describe_snapshot),
        _line(ev.SnapshotFailed, lambda e: f"no snapshot of step {e.step}: {e.node}: {e.why}"),
        _line(ev.SnapshotRejected, lambda e: f"snapshot of step {e.step}{f' on {e.node}' * bool(e.node)}: {e.why}"),
        _line(ev.CheckpointRejected, lambda e: f"checkpoint {e.name} cannot be used: {e.why}"),
        _line(
            ev.JournalRepaired,
            lambda e: f"the journal had lost lines {e.from_seq} to {e.to_seq}; repaired at step {e.to_step}",
        ),
        _line(ev.LimitRaised, _describe_limit),
        _line(ev.JobAtRisk, lambda e: f"at risk: {e.why}"),
        _line(
            ev.LayoutChanged,
            lambda e: (
                f"layout: {e.to_layout} with {e.nodes} nodes, not {e.from_layout}, down {e.down_s:.3f} s: {e.why}"
            ),
        ),
        _line(ev.LayoutKept, lambda e: f"layout: {e.layout} stays with {e.nodes} nodes: {e.why}"),
        _line(ev.CorruptionFound, lambda e: f"{e.summary}; no worker has applied it"),
        _line(ev.ActionRequested, lambda e: describe_request(e.who, e.about, e.command)),
        _line(ev.JobFinished, _describe_end),
        _line(JobFailed, lambda e: f"failed: {e.why}"),
    )
)


def describe(event: ReadEvent) -> str:
    """Return an event's line, without its time. For an event of an unknown kind, this is the text of its fields."""
    if isinstance(event, OtherEvent):
        return str(event.fields)
    return _WORDS[type(event)](event)


def describe_with_time(event: ReadEvent) -> str:
    """Return an event's line, with the time of day before it. Any text or time in a file is accepted."""
    return f"{time_of_day(event.time)} {on_one_line(describe(event))}"


def time_of_day(seconds: float) -> str:
    """Return the time of day of unix seconds. A number that is not a time is returned as it is, in text."""
    try:
        return f"{datetime.fromtimestamp(seconds):%H:%M:%S.%f}"[:-3]
    except (ValueError, OverflowError, OSError):  # no clock has ever shown it
        return f"{seconds:g}"


#: details of how holdfast works, which are printed only with --verbose
DETAILS = (
    ev.FlopCounted,
    ev.LayoutKept,
    ev.LimitRaised,
    ev.MemorySampled,
    ev.RebalanceDecided,
    ev.Rebalanced,
    ev.SnapshotSaved,
)


#: After such an event, the next step is the first of a run, or the first after a pause.
_PAUSES = (ev.JobStarted, ev.CoordinatorRestarted, ev.RolledBack, ev.JobWaiting)


class Rate:
    """How fast a job trains, by its last `most` steps. It begins again with each run and after each pause."""

    def __init__(self, most: int | None = None) -> None:
        self._steps: deque[StepCommitted] = deque(maxlen=most)
        self._paused = False

    def on_event(self, event: ReadEvent) -> None:
        """Add a step, or start again at a pause. The first step after a pause is left out: it contains the pause."""
        if isinstance(event, _PAUSES):
            self._steps.clear()
            self._paused = True
        elif isinstance(event, StepCommitted):
            if event.step_s > 0 and not self._paused:
                self._steps.append(event)
            self._paused = False

    def clear(self) -> None:
        """Count only steps from now on."""
        self._steps.clear()

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, or 0 before the first."""
        return sum(step.step_s for step in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second, or 0 before the first step."""
        seconds = sum(step.step_s for step in self._steps)
        return sum(step.samples for step in self._steps) / seconds if seconds > 0 else 0.0

    def time_left(self, step: int, last_step: int) -> str:
        """Return how long the steps up to the last one will take, in words; "" if that is not known."""
        left = seconds_in_words(self.step_s * (last_step - step)) if last_step > step and self.step_s > 0 else "-"
        return "" if left == "-" else f"{left} left"


class PlainProgress:
    """Prints events, and a line of progress at most once in `every_s` of the job's own time.

    Args:
        print_line: prints one line.
        every_s: None for no line of progress.
        verbose: print `DETAILS`, too.
    """

    def __init__(
        self, print_line: Callable[[str], None], *, every_s: float | None = 10.0, verbose: bool = False
    ) -> None:
        self.failure = ""
        self._print_line = print_line
        self._every_s = every_s
        self._verbose = verbose
        self._next_step_at = 0.0
        #: nodes of the generation in force
        self._nodes = 0
        #: of the steps since the last line of progress
        self._rate = Rate()
        #: the step at which the job was resumed, 0 if it was not or has trained since
        self._resumed_at = 0
        self._has_trained = False

    def __call__(self, event: ReadEvent) -> None:
        """Print an event, or count a step for the next line of progress.

        Details are only printed if `verbose`, and in a long row of skipped steps only the 1st, 2nd, 4th, 8th, ... Keep
        the reason if the job fails.
        """
        if self._every_s is not None:
            self._rate.on_event(event)
        if isinstance(event, StepCommitted):
            self._resumed_at, self._has_trained = 0, True
            if self._every_s is not None:
                self._print_progress(event, self._every_s)
            return
        if isinstance(event, DETAILS) and not self._verbose:
            return
        if isinstance(event, ev.StepSkipped) and event.in_a_row & (event.in_a_row - 1):
            return  # Of a long row the 1st, 2nd, 4th, 8th, ... are printed.
        if isinstance(event, ev.GenerationStarted):
            self._nodes = len(event.members)
        if isinstance(event, JobFailed):
            self.failure = event.why
        if isinstance(event, ev.RolledBack) and not self._has_trained:
            self._resumed_at = event.to_step
        if isinstance(event, ev.JobFinished) and not event.resumable and 0 < self._resumed_at == event.steps:
            self._print_line(f"{time_of_day(event.time)} {_describe_finished_before(event.steps)}")
            return
        self._print_line(describe_with_time(event))

    def _print_progress(self, event: StepCommitted, every_s: float) -> None:
        """Print a line of progress at this step, unless the last one was less than `every_s` before by the job's clock.

        It has the step, loss, nodes, time left, and the rate of the steps since the last line, to which the caller has
        added this one.
        """
        if self._next_step_at - every_s <= event.time < self._next_step_at:
            return  # An earlier time than that of the last line comes from a clock that was set back.
        self._next_step_at = event.time + every_s
        rate = f"{self._rate.samples_per_s:.1f}" if self._rate.samples_per_s else "-"
        nodes = count_workers(event.world_size)
        if self._nodes:
            nodes = f"{self._nodes} node{'s' if self._nodes > 1 else ''}"
        step = f"step {event.step} of {event.last_step}" if event.last_step else f"step {event.step}"
        facts = [f"{step}: loss {loss_text(event.loss)}", f"{rate} samples/s", nodes]
        if left := self._rate.time_left(event.step, event.last_step):
            facts.append(left)
        self._print_line(f"{time_of_day(event.time)} {', '.join(facts)}")
        self._rate.clear()
