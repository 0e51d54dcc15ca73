"""The pool's shell: feeds inputs to its machine, and executes its instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from holdfast.control.serving.machine_shell import MachineShell
from holdfast.control.serving.stored_record import StoredRecord, outdated_store
from holdfast.control.store.interface import Store
from holdfast.coordination.inputs import StoreBack
from holdfast.coordination.pool.inputs import NodeDisconnected, NodeMessage, PoolInput
from holdfast.coordination.pool.instructions import (
    DisconnectNode,
    EmitPool,
    PersistPool,
    PoolInstruction,
    SendToJob,
    SendToNode,
    SolveNextPlans,
    StartCoordinator,
    StopCoordinator,
    StopOutdatedPool,
    merge_answers,
)
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion
from holdfast.errors import OutdatedStoreError
from holdfast.observability.journal import Journal
from holdfast.protocol.pool.record import POOL_SCHEMA, PooledJob, PoolRecord
from holdfast.protocol.pool.sharing import JobShares

_RECORD = msgspec.msgpack.Decoder(PoolRecord)


class PoolRecordKeeper(StoredRecord[PoolRecord]):
    """The pool's record in the store."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "pool/record", _RECORD, POOL_SCHEMA, "the pool's record")


class JobsOfPool(Protocol):
    """The coordinators of a pool's jobs. No method waits or fails."""

    def start(self, job: PooledJob) -> None:
        """Start a coordinator for a job, unless it has one."""
        ...

    def send_shares(self, job: str, shares: JobShares) -> None:
        """Send the pool's decision to a job's coordinator, now or once it runs."""
        ...

    def close(self, job: str, submission: int) -> None:
        """Close the coordinator of a job."""
        ...


class PoolShell(MachineShell[PoolInput, PoolInstruction, PoolRecord]):
    """Drives a pool's machine.

    Args:
        machine: the pool's state machine.
        keeper: keeps the pool's record.
        journal: of the pool.
        jobs: the coordinators of its jobs.
        on_question: called with each question about possible next events.
        now: as of `MachineShell`.
        on_failure: as of `MachineShell`.
    """

    def __init__(
        self,
        machine: Pool,
        keeper: PoolRecordKeeper,
        journal: Journal,
        jobs: JobsOfPool,
        *,
        on_question: Callable[[NextPlansQuestion], None],
        now: Callable[[], float],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(now=now, on_connected=lambda _: None, on_failure=on_failure)
        self.machine = machine
        self.journal = journal
        self._keeper = keeper
        self._jobs = jobs
        self._on_question = on_question
        self._encoder = msgspec.msgpack.Encoder()

    def _handle(self, event: PoolInput) -> list[PoolInstruction]:
        return self.machine.handle(event, self.now())

    def _merge_instructions(self, answers: list[list[PoolInstruction]]) -> list[PoolInstruction]:
        return merge_answers(answers)

    def _input_for_message(self, number: int, message: Any) -> PoolInput:
        return NodeMessage(number, message)

    def _input_for_disconnect(self, number: int) -> PoolInput:
        return NodeDisconnected(number)

    def _input_for_store_back(self, away_s: float) -> PoolInput:
        return StoreBack(away_s)

    def _write_record(self, record: PoolRecord) -> None:
        # The journal must contain all events that the record counts, before the record is written.
        self.journal.sync()
        self._keeper.swap(record)

    def _execute(self, instruction: PoolInstruction) -> PoolRecord | None:
        """Execute one instruction: emit an event, send a message, or start or stop a coordinator, for example.

        Return the record of a `PersistPool`, else None.

        Raises:
            OutdatedStoreError: the instruction is `StopOutdatedPool`.
        """
        match instruction:
            case PersistPool(record):
                return record
            case EmitPool(event):
                self.journal.append(event)
            case SendToNode(number, message):
                if number in self.connections:
                    self.connections[number].send(self._encoder.encode(message))
            case DisconnectNode(number):
                self._close(number)
            case StartCoordinator(job):
                self._jobs.start(job)
            case SendToJob(job, shares):
                self._jobs.send_shares(job, shares)
            case StopCoordinator(job, submission):
                self._jobs.close(job, submission)
            case SolveNextPlans(question):
                self._on_question(question)
            case StopOutdatedPool(newer):
                raise OutdatedStoreError(outdated_store("pool", self._keeper.url, newer))
        return None
