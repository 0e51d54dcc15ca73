"""The steps that a node's workers have applied: what is kept of them, and what a coordinator was told of them.

Witnesses tell of a step at once. All others' steps are told where something breaks, before the reports; where they
stand, with the next heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from holdfast.coordination.agent.kept_steps import KeptSteps
from holdfast.coordination.agent.place import WorkerPlace
from holdfast.protocol.messages.agent import AppliedSteps, Heartbeat
from holdfast.protocol.messages.worker import Applied, KnownSteps


class NodeSteps:
    """Of one session of a node: fresh workers have applied nothing."""

    def __init__(self, places: Sequence[WorkerPlace], committed: int = 0) -> None:
        """Keep nothing yet; steps up to `committed` are known to be in the journal."""
        self.committed = committed
        self._places = places
        self._kept = KeptSteps()
        #: the coordinator of the connection knows v of those that are kept up to this one
        self._told = 0
        #: the newest generation that its workers have entered
        self._generation = 0

    # ---- what the workers do ----

    def applied(self, place: WorkerPlace, message: Applied, now: float) -> Applied | None:
        """Keep a step; return what the coordinator is to hear of it at once: a witness's word, or a hash that is news.

        A node tells one hash of a step, and another only where its own workers differ.
        """
        known = self._kept.hash_of(message.step)
        if message.step > self.committed:
            self._kept.note(message, now)
        if message.state_hash and message.state_hash == known:
            message = msgspec.structs.replace(message, state_hash="")
        if not (message.witness or message.state_hash):
            return None
        place.told = max(place.told, message.step)
        if message.step <= max(self._told, self.committed) + 1:
            self._told = max(self._told, message.step)
        return message

    def sent(self, message: KnownSteps) -> None:
        """Keep the steps that have led to a state which was sent to a worker.

        A step that is in the journal may have been undone and done again, in a generation without this node.
        """
        again = [passed.step for passed in message.passed if passed.generation > self._generation]
        self.committed = min([self.committed, *(step - 1 for step in again)])
        self._told = min(self._told, self.committed) if again else self._told
        for passed in message.passed:
            if passed.step > self.committed:
                self._kept.note_elsewhere(passed)

    def begin_with(self, step: int, generation: int) -> None:
        """`generation` begins with the state of `step`: what was done after it in older ones never counted."""
        self._generation = max(self._generation, generation)
        self.undo_after(step, generation)
        for place in self._places:
            place.undo_after(step, generation)
        # After a roll-back steps are committed once more; until then nothing after it is in the journal.
        self.committed = min(self.committed, step)

    def undo_after(self, step: int, generation: float = math.inf) -> None:
        """What was done after `step` in a generation older than this one does not count."""
        self._kept.undo_after(step, generation)
        self._told = min(self._told, step)

    # ---- what a coordinator knows ----

    def forget_up_to(self, step: int) -> None:
        """Steps up to this one are in the journal."""
        self.committed = step
        self._kept.forget_up_to(step)

    def replay(self) -> Iterator[AppliedSteps | Applied]:
        """Return all that a coordinator must know which knows nothing, as it stands now; it counts as told."""
        self._told = self._kept.last
        for place in self._places:
            place.told = place.applied
        pages = self._kept.pages(self._tops, self.committed) if self._tops else ()
        return chain(pages, self._kept.odd)

    def untold(self) -> list[AppliedSteps]:
        """Return what is kept and was not told; it counts as told."""
        pages = self._kept.after(max(self._told, self.committed), self._tops)
        self._told = max(self._told, self._kept.last)
        return pages

    def standing(self) -> Heartbeat | None:
        """Return where the workers stand, None where that was told; it counts as told."""
        places = self._places
        if not any(place.applied > place.told for place in places):
            return None
        for place in places:
            place.told = place.applied
        applied = tuple(place.applied for place in places)
        generation = min(place.generation for place in places if place.applied)
        return Heartbeat(generation=generation, applied=applied[:1] if len(set(applied)) == 1 else applied)

    @property
    def _tops(self) -> dict[str, int]:
        """The newest step of which each worker holds the state, where that may not be in the journal."""
        return {place.worker: place.applied for place in self._places if place.applied > self.committed}
