"""What the coordinator's machine asks its shell to do, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.pool.sharing import JobState
from holdfast.protocol.record import Record

if TYPE_CHECKING:
    from holdfast.coordination.experts.searching import Search  # its imports take half a second that no command needs

#: instructions: any, those that write, and those that tell an event
O = TypeVar("O")
W = TypeVar("W")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Persist:
    """Compare-and-swap the record; if another coordinator was there first, stop at once: nothing after this counts."""

    record: Record


@dataclass(frozen=True, slots=True)
class Emit:
    """Append to the journal."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send to an agent; a connection that is gone is no error (Disconnected follows)."""

    connection: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the same message to several agents, each once; it is encoded once for all of them."""

    connections: tuple[int, ...]
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after what was sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over; the coordinator ends once the agents are gone, a few seconds later at most."""

    exit_code: int
    why: str


@dataclass(frozen=True, slots=True)
class StopOutdated:
    """End this coordinator and leave the job alone: the store is older than the job. `newer`: what shows that."""

    newer: str


@dataclass(frozen=True, slots=True)
class PlanExperts:
    """Call the search's `solve` beside everything else, and feed what it returns as Planned.

    It may take any time, or never return. A new search makes the one before worthless.
    """

    search: Search


@dataclass(frozen=True, slots=True)
class TellPool:
    """Tell the pool in which the job runs how the job stands; where nobody can be told it is said again."""

    stands: JobState


Instruction = Persist | Emit | Send | Broadcast | Close | EndJob | StopOutdated | PlanExperts | TellPool


def at_once(answers: Iterable[list[Instruction]]) -> list[Instruction]:
    """Return what the machine asks for in answer to several inputs, with one record at most: see `with_one_record`."""

    def one(first: Persist, last: Persist, emits: Iterable[Emit]) -> Persist:
        outbox = tuple(emit.event for emit in emits)
        return Persist(msgspec.structs.replace(last.record, position=first.record.position, outbox=outbox))

    return with_one_record(answers, Persist, Emit, one)


def with_one_record(
    answers: Iterable[list[O]], writes: type[W], tells: type[E], one: Callable[[W, W, Iterable[E]], O]
) -> list[O]:
    """Return the answers to several inputs with one record, in the place of the first: the last one's, for them all.

    Nothing is told before the record that it rests on, as before. A crash leaves the state before all of these inputs,
    or the one after all that have changed anything.

    Args:
        answers: one that changes the record begins with it. one: made of the first and the last record, and the events
            from the first's transition to the last's.
    """
    before, after, events = list[O](), list[O](), list[E]()
    first = last = None
    known = 0
    for answer in answers:
        record = answer[0] if answer and isinstance(answer[0], writes) else None
        rest = answer[1:] if record is not None else answer
        first, last = first or record, record or last
        (before if first is None else after).extend(rest)
        if first is not None:
            events += (said for said in rest if isinstance(said, tells))
        if record is not None:
            known = len(events)
    return [*before, one(first, last, events[:known]), *after] if first is not None and last is not None else before
