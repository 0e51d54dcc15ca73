"""The coordinator's shell: what its machine is fed, and how what it asks for is carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.control.serving.stored_record import StoredRecord, outdated_store
from holdfast.control.serving.turns import MachineShell, in_parts
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
    StopOutdated,
    TellPool,
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
    """What the shell drives: `holdfast.coordination.job.coordinator.Coordinator`, or a fake."""

    def start(
        self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()
    ) -> list[Instruction]: ...

    def handle(self, event: Input, now: float) -> list[Instruction]: ...


def record_key(job: str) -> str:
    """Return under which key of a store the record of a job lies."""
    return f"jobs/{job}/record"


class RecordKeeper(StoredRecord[Record]):
    """The record of one job in the store."""

    def __init__(self, store: Store, job: str) -> None:
        super().__init__(store, record_key(job), _RECORD, SCHEMA, "the job's record")


def _to_nobody(_: object) -> None:
    """A job outside of pools tells none."""


class Shell(MachineShell[Input, Instruction, Record]):
    """Drives a job's machine.

    Args:
        now: the time, in unix seconds that never step back.
        on_request: called with each new event that asks a person for something, once it is in the journal.
        on_plan: called with a search to make elsewhere; what comes of it is to be fed.
        on_end: called with the exit code once the machine says that the job is over.
        on_failure: called with what broke the shell; from then on it handles nothing.
        on_stand: called with what the job's pool is to hear.
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
        on_stand: Callable[[JobState], None] = _to_nobody,
        on_event: Callable[[AnyEvent], None] = _to_nobody,
    ) -> None:
        super().__init__(now=now, on_connected=metrics.connected, on_failure=on_failure)
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
        #: what was told last, and as which bytes: one thing may be told to many, one after the other
        self._told: CoordinatorMessage | None = None
        self._frames: list[bytes] = []

    async def start(self, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> None:
        """Let the machine begin: afterwards the store and the journal know this coordinator.

        Raises:
            SupersededError, JournalError, StoreError: as `feed`.
        """
        await self.begin(lambda: self.machine.start(self.now(), url, pid, checkpoints))

    def _on_journal_lost(self, file: str, why: str) -> None:
        """Have the machine report it, once the turn that found it is over."""
        self.feed_later(FileFailed(file, why))

    def refused(self) -> None:
        self.metrics.refused()

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
        # What the record has counted must not be missing before it.
        self.journal.sync()
        self._keeper.swap(record)

    def _execute(self, instruction: Instruction) -> Record | None:
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
            case TellPool(stands):
                self._on_stand(stands)
            case StopOutdated(newer):
                raise OutdatedStoreError(outdated_store("job", self._keeper.url, newer))
            case EndJob(exit_code, why):
                self.journal.sync()
                _log.info("the job ends with exit code %d: %s", exit_code, why)
                self._on_end(exit_code)
        return None

    def _emit(self, event: AnyEvent) -> None:
        if self.journal.append(event):
            self.metrics.observe(event)
            self._on_event(event)
            if isinstance(event, ActionRequested):
                self._on_request(event)

    def _send(self, numbers: Sequence[int], message: CoordinatorMessage) -> None:
        here = [self.connections[number] for number in numbers if number in self.connections]
        if message is not self._told:
            self._told, self._frames = message, in_parts(self._encoder.encode(message))
        for frame in self._frames:
            for connection in here:
                connection.send(frame)
