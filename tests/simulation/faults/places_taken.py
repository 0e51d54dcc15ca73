"""Checks of standbys in the journal: a waiting standby is not a member, and a replacement changes no other rank.

Also checks that a job that waits for lost nodes continues with as many nodes as before.
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
    """Follows the events of one job. An event that is repeated after a crash has no effect."""

    def __init__(self, *, waits: bool = False) -> None:
        """Start empty. `waits`: the job waits for lost nodes."""
        self.waits = waits
        #: the nodes that have failed and have not returned
        self._lost: set[str] = set()
        #: the nodes that have joined and have not left, including nodes that are not members yet
        self._here: set[str] = set()
        self._joined: set[str] = set()
        self._before: GenerationStarted | None = None
        #: the members of the last generation that will replace draining members -> the draining node
        self._beside: Mapping[str, str] = {}

    def called(self, name: str) -> None:
        """Allow a standby that the pool calls to be a member before its NodesJoined event."""
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
                    raise InvariantError(f"node {name} is a member but has not joined: {event}")
            before, self._before = self._before, event
            # A job that is ending does not wait for lost nodes: the present ones save its progress.
            waits = self.waits and event.reason not in ("start", "save")
            if waits and before is not None and before.seq < event.seq:
                # The generation goes on without these draining members, and without a replacement for them.
                released = {one.node for one in record.leaving if one.owed and not one.stays}
                self._as_many(before, event, released)
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
            if event.node in self._joined:
                self._here.add(event.node)

    def _as_many(self, before: GenerationStarted, event: GenerationStarted, released: set[str]) -> None:
        taken = {whose for name, whose in self._beside.items() if name in event.members}
        lost = self._lost.intersection(before.members).difference(event.members, self._beside, taken, released)
        if len(self._here.difference(before.members)) < len(lost):
            raise InvariantError(f"the job did not wait for lost nodes: {event}, before {before}, lost {lost}")

    def _same_but_for_the_lost(self, before: GenerationStarted, event: GenerationStarted) -> None:
        stay = [name for name in event.members if name in before.members]
        if event.world_size != before.world_size or len(event.members) != len(before.members):
            raise InvariantError(f"a replacement changed the world size: {event}, before {before}")
        if stay != [name for name in before.members if name in event.members]:
            raise InvariantError(f"a replacement changed the ranks of other nodes: {event}, before {before}")
        if event.global_batch != before.global_batch:
            raise InvariantError(f"a replacement changed the batch: {event}, before {before}")
