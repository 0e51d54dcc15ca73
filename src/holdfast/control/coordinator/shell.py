"""The coordinator's shell: feeds the machine what happens, and carries out what it asks for, in order: a turn.

An input is handled to its end before the next one is looked at: the record is swapped, the events are in the journal
and the messages in their queues when `feed` returns. Only a write to the store takes time. It is made in a thread of
its own; what the machine wants told after it waits for it, and so do inputs that come meanwhile, in their order
(docs/protocol.md, Durable before told).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.control.store.interface import Store
from holdfast.coordination.experts.searching import Search
from holdfast.coordination.inputs import Disconnected, Input, Received
from holdfast.coordination.instructions import (
    Broadcast,
    Close,
    Emit,
    EndJob,
    Instruction,
    Persist,
    PlanExperts,
    Send,
    TellPool,
)
from holdfast.errors import BadInputError, RefusedError, SupersededError, UnreachableError
from holdfast.observability.journal import Journal
from holdfast.observability.metrics import Metrics
from holdfast.protocol.events import ActionRequested
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage, Hello, Part
from holdfast.protocol.names import MAX_PART_BYTES
from holdfast.protocol.pool.sharing import JobStands
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record

#: What msgspec raises for bytes that are no message: bad UTF-8 and deep nesting are no DecodeError of its.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_log = logging.getLogger("holdfast.coordinator")

T = TypeVar("T")

#: a record that is to be written, and what is to be done after it
_Left = tuple[Record, Iterator[Instruction]]


class Machine(Protocol):
    """What the shell drives: `holdfast.coordination.coordinator.Coordinator`, or a fake."""

    def start(
        self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()
    ) -> list[Instruction]: ...

    def handle(self, event: Input, now: float) -> list[Instruction]: ...


class Connection(Protocol):
    """An agent's connection, as the shell sees it. Neither method waits or fails."""

    def send(self, message: bytes) -> None:
        """Queue a message; a queue that is full closes the connection."""
        ...

    def close(self) -> None:
        """Close after what was sent."""
        ...


class RecordKeeper:
    """The record of one job in the store, and the revision of it that we know."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._key = f"jobs/{job}/record"
        self._encoder = msgspec.msgpack.Encoder()
        entry = store.get(self._key)
        self._revision = entry.revision if entry else 0
        self.record = _decode_record(entry.value, f"the store {store.url}") if entry else None

    def swap(self, record: Record) -> None:
        """Replace the record.

        Raises:
            SupersededError: it is no longer the one that we wrote or read.
        """
        revision = self._store.compare_and_swap(self._key, self._encoder.encode(record), self._revision)
        if revision is None:
            raise SupersededError(f"the record {self._key} was changed by another coordinator")
        self._revision, self.record = revision, record


def _decode_record(value: bytes, where: str) -> Record:
    """Read a record that a coordinator of this version wrote; one of another is refused, for it would be misread."""
    try:
        schema = msgspec.msgpack.decode(value, type=_Schema).schema
        if schema == SCHEMA:
            return msgspec.msgpack.decode(value, type=Record)
    except MALFORMED as error:
        raise BadInputError(f"the job's record in {where} cannot be read: {error}; give another store") from None
    known = f"the job's record in {where} has schema {schema}, this holdfast reads schema {SCHEMA}"
    if schema > SCHEMA:
        raise BadInputError(f"{known}: a newer one wrote it; upgrade holdfast, or give another store")
    raise BadInputError(
        f"{known}: an older one wrote it; end the job with that one, or give another store and events file, "
        "where the job resumes from its newest checkpoint"
    )


class _Schema(msgspec.Struct):
    schema: int


def _to_nobody(_: object) -> None:
    """A job outside of pools tells none."""


class Turns:
    """One at a time, in the order in which they were asked for.

    Used as an asynchronous context manager; one that can begin at once may be taken without waiting.
    """

    def __init__(self) -> None:
        self._under_way = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Begin a turn, where none is under way (nor, then, waited for); return whether it has begun."""
        if self._under_way:
            return False
        self._under_way = True
        return True

    def give(self) -> None:
        """End the turn: whoever has waited longest has it now."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self._under_way = False

    async def __aenter__(self) -> None:
        if self.take():
            return
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(begun)
        try:
            await begun
        except asyncio.CancelledError:
            if not begun.cancelled():
                self.give()  # it was ours already
            raise

    async def __aexit__(self, *_: object) -> None:
        self.give()


class Shell:
    """Drives one machine.

    Args:
        now: the time, in unix seconds that never step back.
        on_request: called with each new event that asks a person for something, once it is in the journal.
        on_plan: called with a search to make elsewhere; what comes of it is to be fed.
        on_end: called with the exit code once the machine says that the job is over.
        on_failure: called with what broke the shell; from then on it handles nothing.
        on_stand: called with what the job's pool is to hear.
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
        on_plan: Callable[[Search], None],
        on_end: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
        on_stand: Callable[[JobStands], None] = _to_nobody,
    ) -> None:
        self.machine = machine
        self.journal = journal
        self.metrics = metrics
        self.connections: dict[int, Connection] = {}
        self._keeper = keeper
        self.now = now
        self._on_request = on_request
        self._on_plan = on_plan
        self._on_end = on_end
        self._on_failure = on_failure
        self._on_stand = on_stand
        self._stopped = False
        self._turn = Turns()
        self._encoder = msgspec.msgpack.Encoder()
        #: what was said last, and as which bytes: one thing may be said to many, one after the other
        self._said: CoordinatorMessage | None = None
        self._frames: list[bytes] = []

    async def start(self, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> None:
        """Let the machine begin: afterwards the store and the journal know this coordinator.

        Raises:
            SupersededError, JournalError, StoreError: as `feed`.
        """
        async with self._turn:
            left = self._up_to_a_record(iter(self.machine.start(self.now(), url, pid, checkpoints)))
            if left is not None:
                await _to_its_end(self._write_and_go_on(*left))

    async def feed(self, event: Input) -> bool:
        """Handle one input, after those that came before it, and carry out all that follows; once stopped, nothing.

        Whoever is cancelled while its turn is under way learns of that at the turn's end.

        Returns:
            Whether it was handled.

        Raises:
            BadInputError, UnreachableError, RefusedError: the machine refuses a user's request; nothing has happened.
            SupersededError: another coordinator leads; nothing of this input was said to anybody.
            JournalError, StoreError: the disk fails us.
        """
        async with self._turn:
            return await self._handle(event)

    def heard(self, number: int, message: AgentMessage) -> asyncio.Future[None] | None:
        """Handle an agent's message as `feed` does, but at once where no turn is under way.

        Returns:
            What is still to be done of it, None where all is done.

        Raises:
            JournalError: the disk fails us.
        """
        event = Received(number, message)
        if not self._turn.take():
            return asyncio.ensure_future(self._in_turn(event))
        left = None
        try:
            left = self._begin(event)
        finally:
            if left is None:
                self._turn.give()
        return None if left is None else asyncio.ensure_future(self._end_turn(*left))

    async def add(self, number: int, connection: Connection, hello: Hello) -> None:
        """Take in a connection with its first message."""
        async with self._turn:
            if self._stopped:
                connection.close()
                return
            self.connections[number] = connection
            self.metrics.connected(len(self.connections))
            await self._handle(Received(number, hello))

    async def remove(self, number: int) -> None:
        """A connection has ended; one that never said Hello is nobody's business."""
        async with self._turn:
            if self.connections.pop(number, None) is not None:
                self.metrics.connected(len(self.connections))
                await self._handle(Disconnected(number))

    async def between_turns(self, look: Callable[[], T]) -> T:
        """Look at the machine while all that it says is written down."""
        async with self._turn:
            return look()

    async def stop(self) -> None:
        """Handle nothing from now on; the turn that is under way comes to its end."""
        self._stopped = True
        async with self._turn:
            pass

    async def _in_turn(self, event: Input) -> None:
        await self.feed(event)

    async def _handle(self, event: Input) -> bool:
        handles = not self._stopped
        left = self._begin(event)
        if left is not None:
            with self._failing():
                await _to_its_end(self._write_and_go_on(*left))
        return handles

    def _begin(self, event: Input) -> _Left | None:
        """Handle an input up to the first record that is to be written; return that, and what comes after it."""
        if self._stopped:
            return None
        with self._failing():
            return self._up_to_a_record(iter(self.machine.handle(event, self.now())))

    async def _end_turn(self, record: Record, rest: Iterator[Instruction]) -> None:
        try:
            with self._failing():
                await _to_its_end(self._write_and_go_on(record, rest))
        finally:
            self._turn.give()

    @contextlib.contextmanager
    def _failing(self) -> Generator[None]:
        """Handle nothing any more once something inside has failed."""
        try:
            yield
        except (BadInputError, UnreachableError, RefusedError, asyncio.CancelledError):
            raise
        except BaseException as error:
            # Whatever it was, the machine may now believe what nobody was told: another coordinator must begin anew.
            self._stopped = True
            self._on_failure(error)
            raise

    async def _write_and_go_on(self, record: Record, rest: Iterator[Instruction]) -> None:
        left: _Left | None = record, rest
        while left is not None:
            await asyncio.to_thread(self._write, left[0])
            left = self._up_to_a_record(rest)

    def _write(self, record: Record) -> None:
        """In a thread."""
        # What the record has counted must not be missing before it.
        self.journal.sync()
        self._keeper.swap(record)

    def _up_to_a_record(self, instructions: Iterator[Instruction]) -> _Left | None:
        """Carry out instructions; return the next record to write and what follows it, None where all is done."""
        for instruction in instructions:
            match instruction:
                case Persist(record):
                    return record, instructions
                case Send(number, message):
                    self._send((number,), message)
                case Broadcast(numbers, message):
                    self._send(numbers, message)
                case Emit(event):
                    if self.journal.append(event):
                        self.metrics.observe(event)
                        if isinstance(event, ActionRequested):
                            self._on_request(event)
                case Close(number):
                    self._close(number)
                case PlanExperts(search):
                    self._on_plan(search)
                case TellPool(stands):
                    self._on_stand(stands)
                case EndJob(exit_code, why):
                    self.journal.sync()
                    _log.info("the job ends with exit code %d: %s", exit_code, why)
                    self._on_end(exit_code)
        return None

    def _close(self, number: int) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.close()

    def _send(self, numbers: Sequence[int], message: CoordinatorMessage) -> None:
        here = [self.connections[number] for number in numbers if number in self.connections]
        if message is not self._said:
            self._said, self._frames = message, in_parts(self._encoder.encode(message))
        for frame in self._frames:
            for connection in here:
                connection.send(frame)


def in_parts(data: bytes) -> list[bytes]:
    """Return an encoded message, in parts where it is large.

    One that goes to a thousand agents waits as the same bytes for all, but for what the sockets have not taken yet: a
    part for each.
    """
    if len(data) <= MAX_PART_BYTES:
        return [data]
    size = MAX_PART_BYTES - 64  # (what is around a part)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [msgspec.msgpack.encode(Part(data=part, left=len(parts) - 1 - n)) for n, part in enumerate(parts)]


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that must not be broken off half-way: a cancellation takes effect once it has ended."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
