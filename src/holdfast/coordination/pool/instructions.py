"""What the pool's machine asks its shell to do, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from holdfast.coordination.instructions import with_one_record
from holdfast.coordination.pool.share.next_plans import Foresight
from holdfast.protocol.messages.pool import ToNode
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.record import PooledJob, PoolRecord
from holdfast.protocol.pool.sharing import JobShares


@dataclass(frozen=True, slots=True)
class PersistPool:
    """Compare-and-swap the record; if another pool was there first, stop at once: nothing after this counts."""

    record: PoolRecord


@dataclass(frozen=True, slots=True)
class EmitPool:
    """Append to the pool's journal."""

    event: AnyPoolEvent


@dataclass(frozen=True, slots=True)
class TellNode:
    """Send to an agent; a connection that is gone is no error (NodeGone follows)."""

    connection: int
    message: ToNode


@dataclass(frozen=True, slots=True)
class CloseNode:
    """Close an agent's connection after what was sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class BeginJob:
    """Have a coordinator for this job, if there is none; JobLinked follows once it can be told something."""

    job: PooledJob


@dataclass(frozen=True, slots=True)
class TellJob:
    """Tell a job's coordinator; where there is none now it hears it once it is linked."""

    job: str
    shares: JobShares


@dataclass(frozen=True, slots=True)
class CloseJob:
    """The job needs no coordinator any more: it is over, or without nodes."""

    job: str
    submission: int


@dataclass(frozen=True, slots=True)
class Foresee:
    """Solve this beside everything else, and say what comes of it (Foreseen); an earlier one is of no use any more."""

    question: Foresight


@dataclass(frozen=True, slots=True)
class StopOutdatedPool:
    """End this server and leave the pool alone: the store is older than the pool. `newer`: what shows that."""

    newer: str


PoolInstruction = (
    PersistPool | EmitPool | TellNode | CloseNode | BeginJob | TellJob | CloseJob | Foresee | StopOutdatedPool
)


def at_once(answers: Iterable[list[PoolInstruction]]) -> list[PoolInstruction]:
    """Return what the machine asks for in answer to several inputs, with one record at most: see `with_one_record`."""

    def one(_first: PersistPool, last: PersistPool, emits: Iterable[EmitPool]) -> PersistPool:
        return PersistPool(msgspec.structs.replace(last.record, outbox=tuple(emit.event for emit in emits)))

    return with_one_record(answers, PersistPool, EmitPool, one)
