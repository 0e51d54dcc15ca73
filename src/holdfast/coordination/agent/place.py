"""One worker's place on a node: who fills it, and what is kept of that worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.worker import (
    Applied,
    Attach,
    Begun,
    CheckpointKept,
    CheckpointWritten,
    Complaint,
    Entered,
    EvaluationDone,
    Finished,
    Loads,
    Prepared,
    Raised,
    Report,
    ScriptFailed,
    VoteRefused,
    WorkerMessage,
)

#: Of these kinds only the latest is kept. The replay of a node: what its workers are, what they applied, where they
#: stand. So a report comes after the steps that it speaks of: nobody takes a step for lost that is on its way.
LIFE = (Attach, Begun, Entered)
STAND = (
    Prepared,
    Report,
    Complaint,
    VoteRefused,
    Finished,
    CheckpointWritten,
    CheckpointKept,
    Loads,
    EvaluationDone,
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
    #: how the worker before this one ended, until this one attaches; or how this one did, that left its loop
    down: WorkerDown | None = None
    #: the worker was told that the job is done
    done: bool = False
    #: its process has ended, and no other follows
    ended: bool = False
    stopped_since: float | None = None

    def refill(self, worker: str) -> None:
        """Make the place for another worker."""
        self.worker = worker
        self.latest.clear()
        self.top = self.top_generation = self.told = 0
        self.done = self.ended = False
        self.stopped_since = None

    def keep(self, message: WorkerMessage) -> None:
        """Remember what its worker says."""
        if isinstance(message, Applied):
            self.top, self.top_generation = max(self.top, message.step), message.generation
        elif isinstance(message, LIFE + STAND):
            self.latest[type(message)] = message
        if isinstance(message, Attach):
            self.down = None
        if isinstance(message, Entered | Report | Finished):
            self.told = self.applied  # (they say it, too)
        if isinstance(message, Entered):
            for kind in _GENERATION_BOUND:
                kept = self.latest.get(kind)
                if isinstance(kept, _GENERATION_BOUND) and kept.generation < message.generation:
                    del self.latest[kind]

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

    def kept(self, kinds: tuple[type, ...]) -> list[WorkerMessage]:
        """Return what is kept of some kinds, in their order."""
        return [self.latest[kind] for kind in kinds if kind in self.latest]
