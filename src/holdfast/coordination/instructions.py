"""The instructions of the coordinator's state machine to its shell, executed in order."""

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
    from holdfast.coordination.experts.searching import (
        PlacementSearch,  # its imports take half a second that no command needs
    )

#: Any instruction.
O = TypeVar("O")
#: Instructions that write a record.
W = TypeVar("W")
#: Instructions that emit an event.
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Persist:
    """Compare-and-swap the record. If another coordinator wrote first, stop and drop all later instructions."""

    record: Record


@dataclass(frozen=True, slots=True)
class Emit:
    """Append an event to the journal."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an agent. If the connection is lost, `Disconnected` follows."""

    connection: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the same message once to each of several agents. It is encoded once."""

    connections: tuple[int, ...]
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after the earlier messages are sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job. The coordinator ends once all agents have disconnected, a few seconds later at most."""

    exit_code: int
    why: str


@dataclass(frozen=True, slots=True)
class StopOutdated:
    """End this coordinator but not the job, because the store is older than the job."""

    #: The evidence, for users.
    newer: str


@dataclass(frozen=True, slots=True)
class PlanExperts:
    """Run the search's `solve` in the background, and pass its result as `Planned`.

    It may take any time, or never return. A new search replaces the previous one.
    """

    search: PlacementSearch


@dataclass(frozen=True, slots=True)
class SendToPool:
    """Send the job's state to its pool. If the pool cannot be reached, the state is sent again later."""

    stands: JobState


Instruction = Persist | Emit | Send | Broadcast | Close | EndJob | StopOutdated | PlanExperts | SendToPool


def at_once(answers: Iterable[list[Instruction]]) -> list[Instruction]:
    """Merge the coordinator's instructions for several inputs into one list that writes at most one record.

    The record's outbox holds all events that it covers. See `with_one_record`.
    """

    def one(first: Persist, last: Persist, emits: Iterable[Emit]) -> Persist:
        """Return the last record with the first one's position, and all events between them in its outbox."""
        outbox = tuple(emit.event for emit in emits)
        return Persist(msgspec.structs.replace(last.record, position=first.record.position, outbox=outbox))

    return with_one_record(answers, Persist, Emit, one)


def with_one_record(
    answers: Iterable[list[O]], writes: type[W], tells: type[E], one: Callable[[W, W, Iterable[E]], O]
) -> list[O]:
    """Merge the answers to several inputs so that only one record is written: the last one, in the first one's place.

    Each event and message still follows the record that it depends on. A crash leaves the state before all of these
    inputs, or the state after all of them. Without a record, the answers are only joined.

    Args:
        answers: each begins with a record if it changes the record.
        writes: the type of instructions that write a record.
        tells: the type of instructions that emit an event.
        one: makes the merged instruction from the first and the last record and the events that they cover.
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
            events += (instruction for instruction in rest if isinstance(instruction, tells))
        if record is not None:
            known = len(events)
    return [*before, one(first, last, events[:known]), *after] if first is not None and last is not None else before
