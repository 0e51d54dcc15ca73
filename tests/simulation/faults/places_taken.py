"""What must hold of standbys, as the journal tells it: who waits is in no world, who takes a place changes no other.

And of a job that waits where a node is lost: it goes on with as many as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.protocol.events import (
    AnyEvent,
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    NodesJoined,
)
from holdfast.protocol.failures import Severity
from holdfast.protocol.record import Record
from tests.simulation.invariants import InvariantError


class PlacesTaken:
    """Follows one job's events; one that is told again after a crash changes nothing."""

    def __init__(self, *, waits: bool = False) -> None:
        """Start empty. `waits`: the job waits for lost nodes."""
        self.waits = waits
        #: the nodes that have failed, and have not come again
        self._lost: set[str] = set()
        #: the nodes that have joined and have not left, including those that are in no world yet
        self._here: set[str] = set()
        self._joined: set[str] = set()
        self._before: GenerationStarted | None = None
        #: the nodes among them that replace draining nodes, each with the node it replaces, which was still a member
        self._beside: Mapping[str, str] = {}

    def called(self, name: str) -> None:
        """A pool has a standby join: it may come as a node like any other, which is told of once all of it runs."""
        self._joined.add(name)

    def take(self, event: AnyEvent, record: Record) -> None:
        """Check an event against `record`, the record at that time.

        Raises:
            InvariantError: A member has not joined, or its world differs from the one before.
        """
        self._follow(event)
        if isinstance(event, GenerationStarted):
            for name in event.members:
                if name not in self._joined:
                    raise InvariantError(f"node {name} is a member, and has not joined: {event}")
            before, self._before = self._before, event
            # A job that is ending does not wait for lost nodes: the present ones save its progress.
            waits = self.waits and event.reason not in ("start", "save")
            if waits and before is not None and before.seq < event.seq:
                self._as_many(before, event)
            if event.reason == "replace" and before is not None and before.seq < event.seq:
                self._same_but_for_the_lost(before, event)
            self._beside = record.replacements_among(event.members)

    def cut(self, events: Iterable[AnyEvent]) -> None:
        """Rebuild the state from the events left in the journal. A failure that the journal lost counts as none."""
        self._lost.clear()
        self._here.clear()
        for event in events:
            self._follow(event)

    def _follow(self, event: AnyEvent) -> None:
        if isinstance(event, NodesJoined):
            self._joined.update(event.names)
            self._lost.difference_update(event.names)
            self._here.update(event.names)
        elif isinstance(event, NodeLeft):
            self._here.discard(event.node)
        elif isinstance(event, FailureDetected) and event.severity is Severity.NODE:
            self._lost.add(event.node)
        elif isinstance(event, CoordinatorRestarted):
            self._lost -= self._here  # the previous coordinator died in the transaction in which it lost these nodes
        elif isinstance(event, FailureDetected) and event.severity is Severity.PROCESS:
            # The node is present: the coordinator that lost it died before it wrote that to the record.
            self._lost.discard(event.node)

    def _as_many(self, before: GenerationStarted, event: GenerationStarted) -> None:
        taken = {whose for name, whose in self._beside.items() if name in event.members}
        lost = self._lost.intersection(before.members).difference(event.members, self._beside, taken)
        if len(self._here.difference(before.members)) < len(lost):
            raise InvariantError(f"a place is empty, and nobody has waited: {event}, before {before}, lost {lost}")

    def _same_but_for_the_lost(self, before: GenerationStarted, event: GenerationStarted) -> None:
        stay = [name for name in event.members if name in before.members]
        if event.world_size != before.world_size or len(event.members) != len(before.members):
            raise InvariantError(f"the world is not as large as before a place was taken: {event}, before {before}")
        if stay != [name for name in before.members if name in event.members]:
            raise InvariantError(f"others have other ranks where a place was taken: {event}, before {before}")
        if event.global_batch != before.global_batch:
            raise InvariantError(f"the batch is another where a place was taken: {event}, before {before}")
