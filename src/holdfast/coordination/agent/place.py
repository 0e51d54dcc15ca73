"""A local rank of a node: the worker that fills it, and the last messages of that worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import EXIT_FAILED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.agent import Kept, WorkerDown
from holdfast.protocol.messages.orders import BecomeStandby, Begin, JobDone, Order, Warm
from holdfast.protocol.messages.worker import (
    Applied,
    Attach,
    Begun,
    CheckpointKept,
    CheckpointUnwritten,
    CheckpointWritten,
    Complaint,
    Entered,
    EvaluationDone,
    Finished,
    FlopTally,
    Loads,
    Prepared,
    Raised,
    Report,
    ScriptFailed,
    VoteRefused,
    Warmed,
    WorkerMessage,
)
from holdfast.protocol.names import node_and_index_of

#: Only the latest message of each of these kinds is kept. A node replays FIRST_REPLAYED, then applied steps, then
#: LAST_REPLAYED. So a report arrives after the steps that it mentions, and no such step is taken for lost.
FIRST_REPLAYED = (Attach, Warmed, Begun, Entered)
LAST_REPLAYED = (
    Prepared,
    Report,
    Complaint,
    VoteRefused,
    Finished,
    Loads,
    EvaluationDone,
    FlopTally,
    ScriptFailed,
    Raised,
)
#: the kinds that a newer generation makes useless
_GENERATION_BOUND = (Prepared, Report, Complaint, VoteRefused, Finished)


@dataclass(slots=True)
class LocalRank:
    """One local rank of the node, with the messages that are kept of its present worker."""

    worker: str = ""
    latest: dict[type, WorkerMessage] = field(default_factory=dict[type, WorkerMessage])
    #: the newest step that the worker has applied, and its generation
    top: int = 0
    top_generation: int = 0
    #: the worker's step as the connected coordinator knows it
    reported_step: int = 0
    #: How the previous worker ended, until the present one attaches and a coordinator was told of it. Or how the
    #: present worker ended, if it left its loop.
    down: WorkerDown | None = None
    down_reported: bool = False
    #: whether the worker was told that the job is done
    done: bool = False
    #: whether its process has ended and is not replaced
    ended: bool = False
    stopped_since: float | None = None
    #: whether the worker warms up and has not reported the result, and is in no generation
    warming: bool = False

    def refill(self, worker: str) -> None:
        """Assign the local rank to another worker ("" for none), and reset everything except how the previous one
        ended.
        """
        self.worker = worker
        self._clear()
        self.done = self.ended = False
        self.stopped_since = None

    def forget(self) -> None:
        """Drop all kept messages of the worker, and how the previous one ended."""
        self._clear()
        self.down = None

    def _clear(self) -> None:
        """Forget the kept messages, the step and the warm-up of the worker."""
        self.latest.clear()
        self.top = self.top_generation = self.reported_step = 0
        self.warming = False

    def keep(self, message: WorkerMessage) -> None:
        """Keep a message of the worker for the replay: the latest of each replayed kind, and of applied steps only the
        newest position.

        Also end the warm-up or the record of the previous worker's end, and drop messages of older generations, if the
        message shows it.
        """
        if isinstance(message, Applied):
            self.top, self.top_generation = max(self.top, message.step), message.generation
        elif isinstance(message, FIRST_REPLAYED + LAST_REPLAYED) and not self._is_complaint_of_pending(message):
            self.latest[type(message)] = message
        if isinstance(message, Begun | Entered | Warmed):
            self.warming = False
        if isinstance(message, Attach) and self.down_reported:
            self.down = None
        if isinstance(message, Entered | Report | Finished):
            # These messages contain the worker's step, too.
            self.reported_step = self.applied
        if isinstance(message, Entered):
            for kind in _GENERATION_BOUND:
                self._forget_before(message.generation, kind)

    def _is_complaint_of_pending(self, message: WorkerMessage) -> bool:
        """Return whether this complains about a pending generation while a complaint about the current one is kept.

        A coordinator that takes over must receive the latter: it stops the current generation, and with it the pending
        one.
        """
        kept = self.latest.get(Complaint)
        if not (isinstance(message, Complaint) and isinstance(kept, Complaint)):
            return False
        begun = [self.latest.get(Begun), self.latest.get(Entered)]
        in_force = max((one.generation for one in begun if isinstance(one, Begun | Entered)), default=0)
        return kept.generation < message.generation and kept.generation <= in_force

    def _forget_before(self, generation: int, kind: type) -> None:
        """Drop the kept message of a kind if it is of a generation before this one."""
        kept = self.latest.get(kind)
        if isinstance(kept, _GENERATION_BOUND) and kept.generation < generation:
            del self.latest[kind]

    def pop_previous_down(self) -> WorkerDown | None:
        """Return how the previous worker ended, and mark it as reported; forget it if the present worker has attached.

        None if there is nothing to report, or if the present worker itself left its loop: it stays a member.
        """
        down = self.down
        if down is None or down.has_left_loop:
            return None
        self.down_reported = True
        if Attach in self.latest:
            self.down = None
        return down

    def on_order_sent(self, order: Order | UnitAnswer) -> None:
        """Update the record when an order is sent to the worker: done, warming up, reset to a standby, or begun with a
        generation.

        Other orders change nothing.
        """
        if isinstance(order, JobDone):
            self.done = True
        elif isinstance(order, Warm):
            self.warming = Begun not in self.latest and Entered not in self.latest
        elif isinstance(order, BecomeStandby):
            # Its promises no longer matter, and the warm-up before its first step was long ago.
            self.latest = {kind: kept for kind, kept in self.latest.items() if kind is Attach}
            self.top = self.top_generation = self.reported_step = 0
            self.keep(Warmed(worker=self.worker, seconds=0.0))
        elif isinstance(order, Begin):
            # After a Begin, the worker is no longer fresh, whether it has already read the order or not.
            self.keep(Begun(worker=self.worker, generation=order.plan.generation))
            self._forget_before(order.plan.generation, Complaint)

    def warm_up_failure(self, down: WorkerDown) -> tuple[Warmed, WorkerDown]:
        """Return the two messages that report a worker's end in a shadow step: the failed warm-up, and the end without
        the script's error, so that it does not end the job.
        """
        why = "the script has left its loop in a shadow step" if down.has_left_loop else down.detail
        reported = msgspec.structs.replace(down, detail=why, exit_code=EXIT_FAILED, final=False, error=None)
        return Warmed(worker=self.worker, seconds=0.0, error=why[:1024]), reported

    @property
    def applied(self) -> int:
        """The newest step of which the worker has the state."""
        entered = self.latest.get(Entered)
        return max(self.top, entered.applied if isinstance(entered, Entered) else 0)

    @property
    def generation(self) -> int:
        """The generation in which the worker reached that step."""
        entered = self.latest.get(Entered)
        return max(self.top_generation, entered.generation if isinstance(entered, Entered) else 0)

    def undo_after(self, step: int, generation: int) -> None:
        """Lower the worker's newest step to `step` if it was applied in a generation before this one, and in any case
        the reported step.
        """
        if self.top_generation < generation:
            self.top = min(self.top, step)
        self.reported_step = min(self.reported_step, step)

    def update_stopped_time(self, now: float, *, stopped: bool) -> float:
        """Record whether the process is stopped now (SIGSTOP); return for how many seconds it has been so without a
        break, 0 if it is not.
        """
        if self.ended or not stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since if self.stopped_since is not None else 0.0

    @property
    def script_error(self) -> WorkerDown | None:
        """The end of the worker if its script raised and its process was kept, or None."""
        raised = self.latest.get(Raised)
        if not isinstance(raised, Raised):
            return None
        kind = FailureKind.EXCEPTION
        return WorkerDown(worker=self.worker, kind=kind, detail=raised.detail, exit_code=raised.exit_code)

    def down_with_group(self, cause: str) -> WorkerDown:
        """Return the end of the worker, caused by the end of `cause`, another worker of its replica group."""
        detail = f"it ended because {cause} of its replica group ended"
        return WorkerDown(worker=self.worker, kind=FailureKind.PROCESS_EXIT, detail=detail, exit_code=EXIT_FAILED)

    def kept_messages(self, kinds: tuple[type, ...]) -> list[WorkerMessage]:
        """Return the kept messages of some kinds, in the order of the kinds."""
        return [self.latest[kind] for kind in kinds if kind in self.latest]


def first_replayed(places: Sequence[LocalRank]) -> list[Kept]:
    """Return the messages to replay first: the ends of workers, and the states of the present ones."""
    ends = [down for place in places if (down := place.pop_previous_down()) is not None]
    return [*ends, *(message for place in places for message in place.kept_messages(FIRST_REPLAYED))]


def last_replayed(places: Sequence[LocalRank]) -> list[Kept]:
    """Return the messages to replay last: the positions of the workers, and which of them have left their loops."""
    left = [place.down for place in places if place.down is not None and place.down.has_left_loop]
    return [*(message for place in places for message in place.kept_messages(LAST_REPLAYED)), *left]


class WrittenParts:
    """The last message about a written checkpoint part of each local rank, and about a sealed checkpoint."""

    def __init__(self) -> None:
        self._latest: dict[str, CheckpointWritten | CheckpointUnwritten | CheckpointKept] = {}

    def keep(self, message: CheckpointWritten | CheckpointUnwritten | CheckpointKept) -> None:
        """Keep a message if none of a newer term, generation or step is kept for the same local rank.

        Sealed checkpoints have one entry together.
        """
        place = "kept" if isinstance(message, CheckpointKept) else node_and_index_of(message.worker)
        before = self._latest.get(place)
        # Messages may arrive out of order, because disks differ in speed.
        if before is None or _origin(before) <= _origin(message):
            self._latest[place] = message

    @property
    def kept(self) -> tuple[WorkerMessage, ...]:
        """The messages to replay."""
        return tuple(self._latest.values())


def _origin(message: CheckpointWritten | CheckpointUnwritten | CheckpointKept) -> tuple[int, int, int]:
    return message.term, message.generation, message.step
