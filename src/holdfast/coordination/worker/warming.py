"""What a worker without a rank does about the order to warm up: shadow steps, for which it gives its own state up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.coordination.worker.tasks import Tell, WorkerInstruction
from holdfast.protocol.messages.orders import Warm
from holdfast.protocol.messages.worker import Warmed

if TYPE_CHECKING:
    from holdfast.coordination.experts.holding import HeldExperts

_ERROR_CHARACTERS = 1024


class Warming:
    """One worker's; whatever concerns it as a member comes first, and cuts it short."""

    def __init__(
        self, worker: str, generations: KnownGenerations, copy: StateCopy, holding: HeldExperts | None
    ) -> None:
        """Be cold, and not asked to warm up. `worker`: whose it is, by its id."""
        #: the training thread is in shadow steps: nobody else may write to what they change
        self.under_way = False
        self._worker = worker
        self._generations = generations
        self._copy = copy
        self._holding = holding
        self._wanted = False

    @property
    def due(self) -> bool:
        """True while shadow steps are to begin, or to go on."""
        known = self._generations
        return self._wanted and not known.frozen and known.plan is None and known.pending is None

    def order(self, order: Warm) -> list[WorkerInstruction]:
        """Take the order; of no use to a worker that is in a generation."""
        if order.term >= self._generations.term and self._generations.plan is None:
            self._generations.term, self._wanted = order.term, True
        return []

    def begin(self) -> bool:
        """The first shadow step is about to begin. False: not any more.

        From here on this worker's state is nobody's: no job starts from it, and no member's report counts it.
        """
        if not self.due:
            return False
        self._copy.spoil()
        if self._holding is not None:
            self._holding.overwrite()
        self.under_way = True
        return True

    def leave(self) -> None:
        """The shadow steps are cut short; where nothing comes of what did that, they begin anew."""
        self.under_way = False

    def end(self, seconds: float, error: str = "") -> list[WorkerInstruction]:
        """All of them are gone through, in so many seconds, or one has failed."""
        self.under_way = self._wanted = False
        return [Tell(Warmed(worker=self._worker, seconds=seconds, error=error[:_ERROR_CHARACTERS]))]
