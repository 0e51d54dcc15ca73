"""The coordinator's shell: feeds inputs to the job's machine, and executes its instructions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.control.serving.machine_shell import MachineShell, split_message
from holdfast.control.serving.stored_record import StoredRecord, outdated_store
from holdfast.control.store.interface import Store
from holdfast.coordination.experts.searching import PlacementSearch
from holdfast.coordination.inputs import Disconnected, FileFailed, Input, Received, StoreBack
from holdfast.coordination.instructions import (
    Broadcast,
    Close,
    Emit,
    EndJob,
    Instruction,
    Persist,
    PlanExperts,
    Send,
    SendToPool,
    StopOutdated,
    at_once,
)
from holdfast.errors import OutdatedStoreError
from holdfast.observability.journal import Journal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import ActionRequested, AnyEvent
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage
from holdfast.protocol.pool.sharing import JobState
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record

_log = logging.getLogger("holdfast.coordinator")
_RECORD = msgspec.msgpack.Decoder(Record)


class Machine(Protocol):
    """The machine that the shell drives: `holdfast.coordination.job.coordinator.Coordinator`, or a fake."""

    def start(
        self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()
    ) -> list[Instruction]: ...

    def handle(self, event: Input, now: float) -> list[Instruction]: ...


def record_key(job: str) -> str:
    """Return the key of a job's record in the store."""
    return f"jobs/{job}/record"


class RecordKeeper(StoredRecord[Record]):
    """The record of one job in the store."""

    def __init__(self, store: Store, job: str) -> None:
        super().__init__(store, record_key(job), _RECORD, SCHEMA, "the job's record")


def _ignore(_: object) -> None:
    """Do nothing."""


class Shell(MachineShell[Input, Instruction, Record]):
    """Drives the machine of a job.

    Args:
        now: the time, in unix seconds that never step back.
        on_request: called with each new event that asks a person for something, once it is in the journal.
        on_plan: called with a search to make in another process. Its result must be fed.
        on_end: called with the exit code when the machine ends the job.
        on_failure: called with the error that stopped the shell. From then on it handles nothing.
        on_stand: called with each state that the job reports to its pool.
        on_event: called with each new event, once it is in the journal.
    """

    def __init__(
        self,
        machine: Machine,
        keeper: RecordKeeper,
        journal: Journal,
        metrics: Metrics,
        *,
        now: Callable[[], float],
        on_request: Callable[[ActionRequested], None],
        on_plan: Callable[[PlacementSearch], None],
        on_end: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
        on_stand: Callable[[JobState], None] = _ignore,
        on_event: Callable[[AnyEvent], None] = _ignore,
    ) -> None:
        super().__init__(now=now, on_connected=metrics.set_connected_agents, on_failure=on_failure)
        self.machine = machine
        self.journal = journal
        self.metrics = metrics
        journal.on_lost = self._on_journal_lost
        self._keeper = keeper
        self._on_request = on_request
        self._on_plan = on_plan
        self._on_end = on_end
        self._on_stand = on_stand
        self._on_event = on_event
        self._encoder = msgspec.msgpack.Encoder()
        #: the last message and its encoded parts: consecutive sends of the same message reuse them
        self._last_message: CoordinatorMessage | None = None
        self._last_parts: list[bytes] = []

    async def start(self, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> None:
        """Start the machine. Afterwards the store and the journal contain this coordinator as the leader.

        Raises:
            SupersededError, JournalError, StoreError: as `feed`.
        """
        await self.start_machine(lambda: self.machine.start(self.now(), url, pid, checkpoints))

    def _on_journal_lost(self, file: str, why: str) -> None:
        """Feed the failure of the events file, after the open transaction."""
        self.feed_later(FileFailed(file, why))

    def count_refusal(self) -> None:
        self.metrics.count_refused_message()

    def _handle(self, event: Input) -> list[Instruction]:
        return self.machine.handle(event, self.now())

    def _merge_instructions(self, answers: list[list[Instruction]]) -> list[Instruction]:
        return at_once(answers)

    def _input_for_message(self, number: int, message: AgentMessage) -> Input:
        return Received(number, message)

    def _input_for_disconnect(self, number: int) -> Input:
        return Disconnected(number)

    def _input_for_store_back(self, away_s: float) -> Input:
        return StoreBack(away_s)

    def _write_record(self, record: Record) -> None:
        # The journal must contain all events that the record counts, before the record is written.
        self.journal.sync()
        self._keeper.swap(record)

    def _execute(self, instruction: Instruction) -> Record | None:
        """Execute one instruction: send messages, emit an event, start a search or end the job, for example.

        Return the record of a `Persist`, else None.

        Raises:
            OutdatedStoreError: the instruction is `StopOutdated`.
        """
        match instruction:
            case Persist(record):
                return record
            case Send(number, message):
                self._send((number,), message)
            case Broadcast(numbers, message):
                self._send(numbers, message)
            case Emit(event):
                self._emit(event)
            case Close(number):
                self._close(number)
            case PlanExperts(search):
                self._on_plan(search)
            case SendToPool(stands):
                self._on_stand(stands)
            case StopOutdated(newer):
                raise OutdatedStoreError(outdated_store("job", self._keeper.url, newer))
            case EndJob(exit_code, why):
                self.journal.sync()
                _log.info("the job ends with exit code %d: %s", exit_code, why)
                self._on_end(exit_code)
        return None

    def _emit(self, event: AnyEvent) -> None:
        """Append an event to the journal.

        If it is new there, count it in the metrics, and pass it to `on_event`, and to `on_request` if it asks a person
        for something.
        """
        if self.journal.append(event):
            self.metrics.observe(event)
            self._on_event(event)
            if isinstance(event, ActionRequested):
                self._on_request(event)

    def _send(self, numbers: Sequence[int], message: CoordinatorMessage) -> None:
        """Send a message to the connections that still exist, in parts if it is large.

        It is encoded once for consecutive calls.
        """
        recipients = [self.connections[number] for number in numbers if number in self.connections]
        if message is not self._last_message:
            self._last_message, self._last_parts = message, split_message(self._encoder.encode(message))
        for part in self._last_parts:
            for connection in recipients:
                connection.send(part)
