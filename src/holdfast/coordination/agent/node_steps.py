"""The steps that a node's workers have applied, and which of them were reported to the coordinator.

Witnesses report a step at once. The steps of other workers are reported when a failure occurs, before the workers'
reports. Their positions are sent with the next heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from holdfast.coordination.agent.kept_steps import KeptSteps
from holdfast.coordination.agent.place import LocalRank
from holdfast.protocol.messages.agent import AppliedSteps, Heartbeat
from holdfast.protocol.messages.worker import Applied, ReceivedSteps


class NodeSteps:
    """The steps of one session of a node. A new session starts with new workers that have applied nothing."""

    def __init__(self, places: Sequence[LocalRank], committed: int = 0) -> None:
        """Start without steps; the steps up to `committed` are in the journal."""
        self.committed = committed
        self._places = places
        self._kept = KeptSteps()
        #: the connected coordinator knows the results of the kept steps up to this one
        self._reported = 0
        #: the newest generation that this node's workers have entered
        self._generation = 0

    # ---- events of the workers ----

    def on_applied(self, place: LocalRank, message: Applied, now: float) -> Applied | None:
        """Keep a step; return the message to send at once, or None.

        It is sent at once for a witness, or for a state hash that was not sent yet. A node sends one hash per step, and
        another one only if its own workers differ.
        """
        known = self._kept.hash_of(message.step)
        if message.step > self.committed:
            self._kept.add(message, now)
        if message.state_hash and message.state_hash == known:
            message = msgspec.structs.replace(message, state_hash="")
        if not (message.witness or message.state_hash):
            return None
        place.reported_step = max(place.reported_step, message.step)
        if message.step <= max(self._reported, self.committed) + 1:
            self._reported = max(self._reported, message.step)
        return message

    def on_known_steps(self, message: ReceivedSteps) -> None:
        """Keep the steps that came with a state that a worker has received.

        A step of a generation that this node has missed was undone and repeated: it and later ones no longer count as
        committed or reported.
        """
        again = [passed.step for passed in message.passed if passed.generation > self._generation]
        self.committed = min([self.committed, *(step - 1 for step in again)])
        self._reported = min(self._reported, self.committed) if again else self._reported
        for passed in message.passed:
            if passed.step > self.committed:
                self._kept.add_received(passed)

    def enter_generation(self, step: int, generation: int) -> None:
        """Record that `generation` starts from the state of `step`.

        Drop later steps of older generations, of the node and of each local rank; they no longer count as committed.
        """
        self._generation = max(self._generation, generation)
        self.undo_after(step, generation)
        for place in self._places:
            place.undo_after(step, generation)
        # After a rollback, steps are committed a second time. Until then no step after `step` is in the journal.
        self.committed = min(self.committed, step)

    def undo_after(self, step: int, generation: float = math.inf) -> None:
        """Drop the steps after `step` that were applied in a generation before this one."""
        self._kept.undo_after(step, generation)
        self._reported = min(self._reported, step)

    # ---- knowledge of the coordinator ----

    def forget_up_to(self, step: int) -> None:
        """Drop the steps up to this one: they are in the journal."""
        self.committed = step
        self._kept.forget_up_to(step)

    def replay(self) -> Iterator[AppliedSteps | Applied]:
        """Return everything that a coordinator without any knowledge needs: pages of steps, then contradictory reports.

        Mark it and the workers' positions as sent. No pages if no worker is ahead of the journal.
        """
        self._reported = self._kept.last
        for place in self._places:
            place.reported_step = place.applied
        pages = self._kept.pages(self._tops, self.committed) if self._tops else ()
        return chain(pages, self._kept.contradictions)

    def pop_unsent(self) -> list[AppliedSteps]:
        """Return the kept steps that were not sent yet, and mark them as sent."""
        pages = self._kept.pages_after(max(self._reported, self.committed), self._tops)
        self._reported = max(self._reported, self._kept.last)
        return pages

    def make_heartbeat(self) -> Heartbeat | None:
        """Return a heartbeat with the newest step of each worker (only one if all are equal) and the oldest of their
        generations, and mark them as sent.

        None if all were sent already.
        """
        places = self._places
        if not any(place.applied > place.reported_step for place in places):
            return None
        for place in places:
            place.reported_step = place.applied
        applied = tuple(place.applied for place in places)
        generation = min(place.generation for place in places if place.applied)
        return Heartbeat(generation=generation, applied=applied[:1] if len(set(applied)) == 1 else applied)

    @property
    def _tops(self) -> dict[str, int]:
        """The newest step of each worker that may be ahead of the journal."""
        return {place.worker: place.applied for place in self._places if place.applied > self.committed}
