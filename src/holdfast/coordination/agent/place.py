"""One worker's place on a node: who fills it, and what is kept of that worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import EXIT_FAILED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.agent import Kept, WorkerDown
from holdfast.protocol.messages.orders import Begin, JobDone, Order, StandBy, Warm
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

#: Of these kinds only the latest is kept. The replay of a node: what its workers are, what they applied, where they
#: stand. So a report comes after the steps that it speaks of: nobody takes a step for lost that is on its way.
LIFE = (Attach, Warmed, Begun, Entered)
STAND = (
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
#: what a newer generation makes worthless
_GENERATION_BOUND = (Prepared, Report, Complaint, VoteRefused, Finished)


@dataclass(slots=True)
class WorkerPlace:
    """One worker's place on the node; what is kept of the worker that fills it now."""

    worker: str = ""
    latest: dict[type, WorkerMessage] = field(default_factory=dict[type, WorkerMessage])
    #: the newest step that it has applied, and in which generation
    top: int = 0
    top_generation: int = 0
    #: where the coordinator of the connection knows it to stand
    told: int = 0
    #: how the worker before this one ended, until this one attaches and a coordinator was told; or how this one did,
    #: that left its loop
    down: WorkerDown | None = None
    down_told: bool = False
    #: the worker was told that the job is done
    done: bool = False
    #: its process has ended, and no other follows
    ended: bool = False
    stopped_since: float | None = None
    #: the worker was told to warm up, has not said how that went, and is in no generation
    warming: bool = False

    def refill(self, worker: str) -> None:
        """Make the place for another worker."""
        self.worker = worker
        self._clear()
        self.done = self.ended = False
        self.stopped_since = None

    def forget(self) -> None:
        """Nothing that its worker has said counts any more, nor how the one before it ended."""
        self._clear()
        self.down = None

    def _clear(self) -> None:
        self.latest.clear()
        self.top = self.top_generation = self.told = 0
        self.warming = False

    def keep(self, message: WorkerMessage) -> None:
        """Remember what its worker says."""
        if isinstance(message, Applied):
            self.top, self.top_generation = max(self.top, message.step), message.generation
        elif isinstance(message, LIFE + STAND) and not self._is_complaint_of_pending(message):
            self.latest[type(message)] = message
        if isinstance(message, Begun | Entered | Warmed):
            self.warming = False
        if isinstance(message, Attach) and self.down_told:
            self.down = None
        if isinstance(message, Entered | Report | Finished):
            self.told = self.applied  # (they say it, too)
        if isinstance(message, Entered):
            for kind in _GENERATION_BOUND:
                self._forget_before(message.generation, kind)

    def _is_complaint_of_pending(self, message: WorkerMessage) -> bool:
        """Whether this is about a pending generation, and one about the generation in force is kept already.

        A coordinator that takes over must hear of the latter: it stops that generation, and the pending one with it.
        """
        kept = self.latest.get(Complaint)
        if not (isinstance(message, Complaint) and isinstance(kept, Complaint)):
            return False
        begun = [self.latest.get(Begun), self.latest.get(Entered)]
        in_force = max((one.generation for one in begun if isinstance(one, Begun | Entered)), default=0)
        return kept.generation < message.generation and kept.generation <= in_force

    def _forget_before(self, generation: int, kind: type) -> None:
        kept = self.latest.get(kind)
        if isinstance(kept, _GENERATION_BOUND) and kept.generation < generation:
            del self.latest[kind]

    def tell_who_is_gone(self) -> WorkerDown | None:
        """Return how the worker before this one ended, while that is to be told; one that left its loop is not gone."""
        gone = self.down
        if gone is None or gone.has_left_loop:
            return None
        self.down_told = True
        if Attach in self.latest:
            self.down = None
        return gone

    def passed(self, order: Order | UnitAnswer) -> None:
        """An order is passed on to its worker."""
        if isinstance(order, JobDone):
            self.done = True
        elif isinstance(order, Warm):
            self.warming = Begun not in self.latest and Entered not in self.latest
        elif isinstance(order, StandBy):
            # What it has promised is of no use, and what comes first in a step it has gone through long ago.
            self.latest = {kind: kept for kind, kept in self.latest.items() if kind is Attach}
            self.top = self.top_generation = self.told = 0
            self.keep(Warmed(worker=self.worker, seconds=0.0))
        elif isinstance(order, Begin):
            # From here on it is not fresh any more, whether it has come to reading this or not.
            self.keep(Begun(worker=self.worker, generation=order.plan.generation))
            self._forget_before(order.plan.generation, Complaint)

    def failed_warm_up(self, down: WorkerDown) -> tuple[Warmed, WorkerDown]:
        """Its worker has ended in a shadow step: return how that is told.

        What a script does in a step that nobody counts is no word of it about the job, which does not end by that.
        """
        why = "the script has left its loop in a shadow step" if down.has_left_loop else down.detail
        gone = msgspec.structs.replace(down, detail=why, exit_code=EXIT_FAILED, final=False, error=None)
        return Warmed(worker=self.worker, seconds=0.0, error=why[:1024]), gone

    @property
    def applied(self) -> int:
        """The newest step whose state its worker has."""
        entered = self.latest.get(Entered)
        return max(self.top, entered.applied if isinstance(entered, Entered) else 0)

    @property
    def generation(self) -> int:
        """The generation in which its worker came to that step."""
        entered = self.latest.get(Entered)
        return max(self.top_generation, entered.generation if isinstance(entered, Entered) else 0)

    def undo_after(self, step: int, generation: int) -> None:
        """What was applied after `step` in a generation older than this one does not count."""
        if self.top_generation < generation:
            self.top = min(self.top, step)
        self.told = min(self.told, step)

    def looked_at(self, now: float, *, stopped: bool) -> float:
        """Return for how long its worker's process has been stopped by now, as far as anybody has seen."""
        if self.ended or not stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since if self.stopped_since is not None else 0.0

    @property
    def raised_so(self) -> WorkerDown | None:
        """How its worker has ended, whose script has raised and whose process is kept; None for another one."""
        raised = self.latest.get(Raised)
        if not isinstance(raised, Raised):
            return None
        kind, code = FailureKind.EXCEPTION, raised.exit_code
        return WorkerDown(worker=self.worker, kind=kind, detail=raised.detail, exit_code=code)

    def gone_along(self, cause: str) -> WorkerDown:
        """Return how its worker ends that goes because another one of its unit does."""
        detail = f"it went with {cause}, another place of its unit"
        return WorkerDown(worker=self.worker, kind=FailureKind.PROCESS_EXIT, detail=detail, exit_code=EXIT_FAILED)

    def kept(self, kinds: tuple[type, ...]) -> list[WorkerMessage]:
        """Return what is kept of some kinds, in their order."""
        return [self.latest[kind] for kind in kinds if kind in self.latest]


def kept_of_life(places: Sequence[WorkerPlace]) -> list[Kept]:
    """Return what a node says first again: who is gone, and what its workers are."""
    gone = [gone for place in places if (gone := place.tell_who_is_gone()) is not None]
    return [*gone, *(message for place in places for message in place.kept(LIFE))]


def kept_of_stand(places: Sequence[WorkerPlace]) -> list[Kept]:
    """Return what it says last again: where its workers stand, and who has left."""
    left = [place.down for place in places if place.down is not None and place.down.has_left_loop]
    return [*(message for place in places for message in place.kept(STAND)), *left]


class WrittenParts:
    """The newest part of a checkpoint that was written for each place of a node, and the newest that was kept."""

    def __init__(self) -> None:
        self._latest: dict[str, CheckpointWritten | CheckpointUnwritten | CheckpointKept] = {}

    def keep(self, message: CheckpointWritten | CheckpointUnwritten | CheckpointKept) -> None:
        """Remember what was told of one."""
        place = "kept" if isinstance(message, CheckpointKept) else node_and_index_of(message.worker)
        before = self._latest.get(place)
        if before is None or _origin(before) <= _origin(message):  # (one disk may be slower than another)
            self._latest[place] = message

    @property
    def kept(self) -> tuple[WorkerMessage, ...]:
        """What is to be told again."""
        return tuple(self._latest.values())


def _origin(message: CheckpointWritten | CheckpointUnwritten | CheckpointKept) -> tuple[int, int, int]:
    return message.term, message.generation, message.step
