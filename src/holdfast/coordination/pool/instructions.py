"""The instructions of the pool's state machine to its shell, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from holdfast.coordination.instructions import with_one_record
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion
from holdfast.protocol.messages.pool import ToNode
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.record import PooledJob, PoolRecord
from holdfast.protocol.pool.sharing import JobShares


@dataclass(frozen=True, slots=True)
class PersistPool:
    """Compare-and-swap the record; if another pool server was faster, stop at once without the later instructions."""

    record: PoolRecord


@dataclass(frozen=True, slots=True)
class EmitPool:
    """Append an event to the pool's journal."""

    event: AnyPoolEvent


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to an agent; a closed connection is not an error (NodeDisconnected follows)."""

    connection: int
    message: ToNode


@dataclass(frozen=True, slots=True)
class DisconnectNode:
    """Close an agent's connection after the messages sent before."""

    connection: int


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Start a coordinator for this job unless it has one; JobConnected follows once it can receive messages."""

    job: PooledJob


@dataclass(frozen=True, slots=True)
class SendToJob:
    """Send shares to a job's coordinator; one that is not connected gets them when it connects."""

    job: str
    shares: JobShares


@dataclass(frozen=True, slots=True)
class StopCoordinator:
    """Stop the job's coordinator: the job has ended, or has no nodes."""

    job: str
    submission: int


@dataclass(frozen=True, slots=True)
class SolveNextPlans:
    """Solve this question in the background, and feed NextPlansSolved; drop an earlier question."""

    question: NextPlansQuestion


@dataclass(frozen=True, slots=True)
class StopOutdatedPool:
    """End this server, and leave the pool alone: the store is older than the pool."""

    #: the evidence, in words
    newer: str


PoolInstruction = (
    PersistPool
    | EmitPool
    | SendToNode
    | DisconnectNode
    | StartCoordinator
    | SendToJob
    | StopCoordinator
    | SolveNextPlans
    | StopOutdatedPool
)


def merge_answers(answers: Iterable[list[PoolInstruction]]) -> list[PoolInstruction]:
    """Return the answers to several inputs as one list in which only one record is written: the last one, in the first
    one's place.

    Its outbox has the events of all answers from the first record to the last. Without a record, the answers are only
    joined.
    """

    def merged(_first: PersistPool, last: PersistPool, emits: Iterable[EmitPool]) -> PersistPool:
        return PersistPool(msgspec.structs.replace(last.record, outbox=tuple(emit.event for emit in emits)))

    return with_one_record(answers, PersistPool, EmitPool, merged)
