"""Events that belong together: from a failure, an arrival or a rebalance to the first step committed after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.protocol.events import (
    ActionRequested,
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    NodesJoined,
    ReadEvent,
    Rebalanced,
    RebalanceDecided,
    Recovered,
    StepCommitted,
)

#: generations that take effect between two steps: nobody has failed
SWAPS = ("join", "rebalance")


@dataclass(slots=True)
class Episode:
    """What follows from one failure, arrival or rebalance: its events, but for the steps that are redone in it.

    What was there when it began: `members` (nodes), `step` the newest committed one, `checkpoint` the step of the
    newest checkpoint, None for none. `begun`: place of its first event among all, and `ended`, of the one after it.
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
    now, furthest, place = Episode(), 0, 0
    members: tuple[str, ...] = ()
    step, checkpoint, over = 0, None, False
    for place, event in enumerate(events):
        if over and not isinstance(event, Recovered | Rebalanced):
            yield _ended(now, place)
            now = Episode(members=members, step=step, checkpoint=checkpoint, begun=place)
        over = False
        match event:
            case StepCommitted():
                over = bool(now.events) and _settled(now, event, furthest)
                step, furthest = event.step, max(furthest, event.step)
            case CheckpointSaved():
                checkpoint = event.step
            case RebalanceDecided(adopted=False) | ActionRequested():
                pass
            case _:
                if not now.events:
                    now = Episode(members=members, step=step, checkpoint=checkpoint, begun=place)
                now.events.append(event)
                over = isinstance(event, Recovered | Rebalanced | JobFinished | JobFailed)
                members = event.members if isinstance(event, GenerationStarted) else members
    if now.events:
        yield _ended(now, place + 1)


def _ended(episode: Episode, place: int) -> Episode:
    episode.ended = place
    return episode


def _settled(episode: Episode, step: StepCommitted, furthest: int) -> bool:
    """Tell whether a committed step ends an episode; where it has cost something, that is told right after it."""
    broken = [event for event in episode.generations if event.reason not in SWAPS]
    if broken:
        return step.step > furthest and step.time >= broken[-1].time
    # What failed, and took no member along, is over with the next step; who has come waits to be taken in.
    seen = [event.time for event in episode.events if isinstance(event, FailureDetected)]
    return bool(seen) and step.time > max(seen) and not episode.generations
