"""Events that belong together: from a failure, an arrival or a rebalance to the first step committed after it."""

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

#: what an episode begins with
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

#: generations that take effect between two steps: nobody has failed
SWAPS = ("join", "rebalance")


@dataclass(slots=True)
class Episode:
    """What follows from one failure, arrival or rebalance: its events, but for the steps that are redone in it.

    What was there when it began: `members` (nodes), `step` the newest committed one, `checkpoint` the step of the
    newest checkpoint, None for none. `begun`: place among all events of its first one that is no arrival; `ended`: of
    the one after it.
    """

    members: tuple[str, ...] = ()
    step: int = 0
    checkpoint: int | None = None
    events: list[ReadEvent] = field(default_factory=list[ReadEvent])
    begun: int = 0
    ended: int = 0

    @property
    def recovered(self) -> Recovered | Rebalanced | None:
        """The event that says what it has cost; None where none came (yet)."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Recovered | Rebalanced) else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Who failed or came, in this order."""
        named: list[str] = []
        for event in self.events:
            if isinstance(event, FailureDetected):
                named.append(event.node)
            elif isinstance(event, NodesJoined):
                named += event.names
            elif isinstance(event, GenerationStarted) and event.reason == "start":
                named.clear()  # (the first ones are no news)
        return tuple(dict.fromkeys(named))

    @property
    def generations(self) -> list[GenerationStarted]:
        """Those that it has led to, one after the other."""
        return [event for event in self.events if isinstance(event, GenerationStarted)]

    def has(self, seq: int) -> bool:
        """Tell whether the event with this number is one of its."""
        return any(event.seq == seq for event in self.events)


def episodes(events: Iterable[ReadEvent]) -> Iterator[Episode]:
    """Yield all episodes, in order; the last one may be under way."""
    teller = _Teller()
    for place, event in enumerate(events):
        if (done := teller.take(place, event)) is not None:
            yield done
    if teller.now.events:
        yield teller.end()


class _Teller:
    """Puts events together, one after the other; `now` is the episode under way, without events where none is."""

    def __init__(self) -> None:
        self.now = Episode()
        self._place = -1
        self._step = self._furthest = 0
        self._checkpoint: int | None = None
        self._members: tuple[str, ...] = ()
        #: it ends here, unless the next event says what it has cost
        self._over = False

    def take(self, place: int, event: ReadEvent) -> Episode | None:
        """Take in an event; return the episode that has ended before it."""
        told = isinstance(event, Recovered | Rebalanced)
        done = self.end() if self._over and not told else None
        self._place, self._over = place, False
        match event:
            case StepCommitted():
                self._over = bool(self.now.events) and self._settled(event)
                self._step, self._furthest = event.step, max(self._furthest, event.step)
            case CheckpointSaved():
                self._checkpoint = event.step
            case ActionRequested() | RebalanceDecided(adopted=False) | SnapshotSaved() | SnapshotFailed() | JobAtRisk():
                pass
            case _ if self.now.events or isinstance(event, _OPENING):
                self._add(event)
                self._over = told or isinstance(event, JobFinished | JobFailed)
            case _:
                pass
        return done

    def end(self) -> Episode:
        """End the episode under way; who has come in it, and is no member yet, is the next one's."""
        done = self.now
        done.ended = self._place + 1
        self.now = Episode()
        if done.recovered is None:
            arrivals = [one for one in done.events if isinstance(one, NodesJoined) and self._outside(one)]
            if len(arrivals) < len(done.events):
                done.events = [one for one in done.events if one not in arrivals]
                self.now.events += arrivals
        return done

    def _add(self, event: ReadEvent) -> None:
        now = self.now
        if all(isinstance(known, NodesJoined) for known in now.events):
            # (arrivals wait for long; what comes of them begins later)
            now.begun, now.members, now.step, now.checkpoint = self._place, self._members, self._step, self._checkpoint
        now.events.append(event)
        if isinstance(event, GenerationStarted):
            self._members = event.members

    def _outside(self, event: NodesJoined) -> bool:
        return not set(event.names) <= set(self._members)

    def _settled(self, step: StepCommitted) -> bool:
        """Tell whether a committed step ends the episode; where it has cost something, that is told right after it."""
        broken = [event for event in self.now.generations if event.reason not in SWAPS]
        if broken:
            return step.step > self._furthest and step.time >= broken[-1].time
        # What failed, and took no member along, is over with the next step; who has come waits to be taken in.
        failed = [event.time for event in self.now.events if isinstance(event, FailureDetected)]
        return not self.now.generations and bool(failed) and step.time > max(failed)
