"""Group events into episodes: from a failure, join or rebalance to the first step committed after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.protocol.events import (
    ActionRequested,
    CheckpointRejected,
    CheckpointSaved,
    CorruptionFound,
    FailureDetected,
    GenerationStarted,
    JobAtRisk,
    JobFailed,
    JobFinished,
    JobWaiting,
    NodesJoined,
    ReadEvent,
    Rebalanced,
    RebalanceDecided,
    Recovered,
    RolledBack,
    SnapshotFailed,
    SnapshotSaved,
    StepCommitted,
)

#: Events that can start an episode.
_OPENING = (
    CheckpointRejected,
    CorruptionFound,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobWaiting,
    NodesJoined,
    Rebalanced,
    RebalanceDecided,
    Recovered,
    RolledBack,
)

#: Reasons of generations that start between two steps, without a failure.
SWAPS = ("join", "rebalance")


@dataclass(slots=True)
class Episode:
    """Events that follow from one failure, join or rebalance, without steps that are computed again."""

    #: Member nodes at the start of the episode.
    members: tuple[str, ...] = ()
    #: Newest committed step at the start.
    step: int = 0
    #: Step of the newest checkpoint at the start; None for none.
    checkpoint: int | None = None
    events: list[ReadEvent] = field(default_factory=list[ReadEvent])
    #: Index of the first event that is not a join, among all events of the job.
    begun: int = 0
    #: Index of the event after the last one.
    ended: int = 0

    @property
    def recovered(self) -> Recovered | Rebalanced | None:
        """The event with the costs of the episode, or None before that event."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Recovered | Rebalanced) else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that failed or joined since the job's first generation, in the order of the events.

        If the episode does not contain the first generation, all its nodes count.
        """
        named: list[str] = []
        for event in self.events:
            if isinstance(event, FailureDetected):
                named.append(event.node)
            elif isinstance(event, NodesJoined):
                named += event.names
            elif isinstance(event, GenerationStarted) and event.reason == "start":
                named.clear()  # The first members of a job are not worth a mention.
        return tuple(dict.fromkeys(named))

    @property
    def generations(self) -> list[GenerationStarted]:
        """The generations that the episode led to, in order."""
        return [event for event in self.events if isinstance(event, GenerationStarted)]

    def has(self, seq: int) -> bool:
        """Return whether the event with this number belongs to the episode."""
        return any(event.seq == seq for event in self.events)


def episodes(events: Iterable[ReadEvent]) -> Iterator[Episode]:
    """Yield all episodes in order. The last one may not have ended."""
    builder = _EpisodeBuilder()
    for place, event in enumerate(events):
        if (done := builder.add_event(place, event)) is not None:
            yield done
    if builder.current.events:
        yield builder.end()


class _EpisodeBuilder:
    """Groups events into episodes. `now` is the current episode, without events between two episodes."""

    def __init__(self) -> None:
        self.current = Episode()
        self._place = -1
        self._step = self._furthest = 0
        self._checkpoint: int | None = None
        self._members: tuple[str, ...] = ()
        #: Whether the episode ends here, unless the next event contains its costs.
        self._over = False

    def add_event(self, place: int, event: ReadEvent) -> Episode | None:
        """Add an event to the current episode, and return the previous one if that has ended.

        Args:
            place: index of the event in the journal.

        An episode starts with an event of `_OPENING`, and ends with the job, with `recovered` or `rebalanced`, or with
        a step that settles it. Commits and details are not part of it.
        """
        told = isinstance(event, Recovered | Rebalanced)
        done = self.end() if self._over and not told else None
        self._place, self._over = place, False
        match event:
            case StepCommitted():
                self._over = bool(self.current.events) and self._ends_at(event)
                self._step, self._furthest = event.step, max(self._furthest, event.step)
            case CheckpointSaved():
                self._checkpoint = event.step
            case ActionRequested() | RebalanceDecided(adopted=False) | SnapshotSaved() | SnapshotFailed() | JobAtRisk():
                pass
            case _ if self.current.events or isinstance(event, _OPENING):
                self._add(event)
                self._over = told or isinstance(event, JobFinished | JobFailed)
            case _:
                pass
        return done

    def end(self) -> Episode:
        """End the current episode, and return it.

        Without a recovery, joins of nodes that are not members yet move to the next episode, unless there are no other
        events.
        """
        done = self.current
        done.ended = self._place + 1
        self.current = Episode()
        if done.recovered is None:
            arrivals = [one for one in done.events if isinstance(one, NodesJoined) and self._outside(one)]
            if len(arrivals) < len(done.events):
                done.events = [one for one in done.events if one not in arrivals]
                self.current.events += arrivals
        return done

    def _add(self, event: ReadEvent) -> None:
        """Add an event to the current episode. A generation's members become the members from then on.

        Each event up to the first one other than a join sets the episode's start, with the members, step and checkpoint
        there.
        """
        now = self.current
        if all(isinstance(known, NodesJoined) for known in now.events):
            # Joined nodes may wait for a long time, so the episode starts with the first other event.
            now.begun, now.members, now.step, now.checkpoint = self._place, self._members, self._step, self._checkpoint
        now.events.append(event)
        if isinstance(event, GenerationStarted):
            self._members = event.members

    def _outside(self, event: NodesJoined) -> bool:
        return not set(event.names) <= set(self._members)

    def _ends_at(self, step: StepCommitted) -> bool:
        """Return whether a committed step ends the current episode. The event with its costs may follow directly.

        With a generation after a failure, the first step that is not computed again ends it. Without any generation,
        any step after the last failure does.
        """
        broken = [event for event in self.current.generations if event.reason not in SWAPS]
        if broken:
            return step.step > self._furthest and step.time >= broken[-1].time
        # A failure that removed no member is over at the next step. Joined nodes still wait for a generation.
        failed = [event.time for event in self.current.events if isinstance(event, FailureDetected)]
        return not self.current.generations and bool(failed) and step.time > max(failed)
