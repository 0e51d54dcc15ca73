"""The shell of a machine that decides: feeds it what happens, and carries out what it asks for, in order: a turn.

An input is handled to its end before the next one is looked at: the record is swapped, the events are in the journal
and the messages in their queues when `feed` returns. Only a write to the store takes time. It is made in a thread of
its own; what the machine wants told after it waits for it, and so do inputs that come meanwhile, in their order
(docs/protocol.md, Durable before told). Those that wait are handled in one turn, and written down at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from holdfast.control.serving.patience import PatientWriter
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.messages.agent import Part
from holdfast.protocol.names import MAX_PART_BYTES

#: of those that wait, so many are handled in one turn: until it ends nothing else has the process
MOST_AT_ONCE = 64

T = TypeVar("T")
#: what the machine is fed, what it asks for, and what it has written down
I = TypeVar("I")
O = TypeVar("O")
R = TypeVar("R")


class Connection(Protocol):
    """An agent's connection, as the shell sees it. Neither method waits or fails."""

    def send(self, message: bytes) -> None:
        """Queue a message; a queue that is full closes the connection."""
        ...

    def close(self) -> None:
        """Close after what was sent."""
        ...


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


class _Waiting(Generic[I]):
    """An input that waits for its turn, or for the end of one in which it is handled with others.

    Args:
        come: called once it is handled: does what comes with it, and returns the input; None: there is none any more.
    """

    def __init__(self, come: Callable[[], I | None]) -> None:
        self.come = come
        #: whether it was handled
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def failed(self, error: BaseException) -> None:
        """Something has broken, or it was refused."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # (whoever was cancelled does not look)

    def handled(self, *, handled: bool) -> None:
        """Its turn is over."""
        if not self.done.done():
            self.done.set_result(handled)


class MachineShell(ABC, Generic[I, O, R]):
    """Drives one machine: what it is fed, what it asks for and what it has written down are its own.

    Args:
        now: the time, in unix seconds that never step back.
        on_connected: called with the number of connections whenever that changes.
        on_failure: called with what broke the shell; from then on it handles nothing.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        on_connected: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.connections: dict[int, Connection] = {}
        self.now = now
        self._on_connected = on_connected
        self._on_failure = on_failure
        self._stopped = False
        self._turn = Turns()
        #: inputs that no turn has begun to handle, in the order in which they wait for theirs
        self._waiting: deque[_Waiting[I]] = deque()
        self._writer = PatientWriter(now, self._store_back)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what the machine is ----

    @abstractmethod
    def _ask(self, event: I) -> list[O]:
        """Have the machine handle an input."""

    @abstractmethod
    def _at_once(self, answers: list[list[O]]) -> list[O]:
        """Return what the machine asks for in answer to several inputs, with one record at most."""

    @abstractmethod
    def _said(self, number: int, message: Any) -> I:
        """Return the input that a message on a connection is."""

    @abstractmethod
    def _gone(self, number: int) -> I:
        """Return the input that a connection's end is."""

    @abstractmethod
    def _answers(self, away_s: float) -> I:
        """Return the input that the store's answer is, after it was away for some time."""

    @abstractmethod
    def _carry_out(self, instruction: O) -> R | None:
        """Do what the machine asks for, at once; return the record where one is to be written instead."""

    @abstractmethod
    def _write(self, record: R) -> None:
        """Write a record down; called in a thread."""

    def refused(self) -> None:
        """A connection is closed for what has come over it."""

    # ---- turns ----

    async def begin(self, ask: Callable[[], list[O]]) -> None:
        """Let the machine begin: afterwards the store and the journal know whoever leads now.

        Raises:
            SupersededError, JournalError, StoreError: as `feed`.
        """
        async with self._turn:
            left = self._up_to_a_record(iter(ask()))
            if left is not None:
                await _to_its_end(self._write_and_go_on(*left))

    def check_store(self) -> None:
        """Refuse a user's request that would have to wait until the store answers again.

        Raises:
            RefusedError: it is away.
        """
        self._writer.check()

    @property
    def unanswered_s(self) -> float:
        """For how long the store has not answered the write at hand, in seconds; 0: none is at hand."""
        return self._writer.unanswered_s

    async def feed(self, event: I) -> bool:
        """Handle one input, after those that came before it, and carry out all that follows; once stopped, nothing.

        Whoever is cancelled while its turn is under way learns of that at the turn's end; one that is handled in
        another's turn learns of it at once.

        Returns:
            Whether it was handled.

        Raises:
            BadInputError, UnreachableError, RefusedError: the machine refuses a user's request; nothing has happened.
            SupersededError: another coordinator leads; nothing of this input was said to anybody.
            JournalError, StoreError: the disk fails us.
        """
        return await self._in_order(lambda: event)

    def heard(self, number: int, message: Any) -> asyncio.Future[None] | None:
        """Handle an agent's message as `feed` does, but at once where no turn is under way.

        Returns:
            What is still to be done of it, None where all is done.

        Raises:
            JournalError: the disk fails us.
        """
        event = self._said(number, message)
        if not self._turn.take():
            return asyncio.ensure_future(self._in_turn(event))
        left = None
        try:
            left = self._begin(event)
        finally:
            if left is None:
                self._turn.give()
        return None if left is None else asyncio.ensure_future(self._end_turn(*left))

    async def add(self, number: int, connection: Connection, hello: Any) -> None:
        """Take in a connection with its first message."""

        def come() -> I | None:
            if self._stopped:
                connection.close()
                return None
            self.connections[number] = connection
            self._on_connected(len(self.connections))
            return self._said(number, hello)

        await self._in_order(come)

    async def remove(self, number: int) -> None:
        """A connection has ended; one that never said Hello is nobody's business."""

        def come() -> I | None:
            if self.connections.pop(number, None) is None:
                return None
            self._on_connected(len(self.connections))
            return self._gone(number)

        await self._in_order(come)

    async def between_turns(self, look: Callable[[], T]) -> T:
        """Look at the machine while all that it says is written down.

        Raises:
            RefusedError: the store is away.
        """
        self.check_store()
        async with self._turn:
            return look()

    async def stop(self) -> None:
        """Handle nothing from now on; the turn that is under way comes to its end, or fails where the store is away."""
        self._stopped = True
        self._writer.give_up()
        async with self._turn:
            pass

    async def _in_turn(self, event: I) -> None:
        await self.feed(event)

    def _store_back(self, away_s: float) -> None:
        """Have the machine hear that the store answers, once the turn is over that has waited for it."""
        self.feed_later(self._answers(away_s))

    def feed_later(self, event: I) -> None:
        """Handle an input after the turn that is under way."""
        task = asyncio.get_running_loop().create_task(self._in_turn(event))
        self._tasks.add(task)
        task.add_done_callback(self._heard_of_store)

    def _heard_of_store(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # (`_failing` has told of it)

    async def _in_order(self, come: Callable[[], I | None]) -> bool:
        """Handle an input after those that came before it, and with it those that wait behind it by then."""
        one = _Waiting(come)
        self._waiting.append(one)
        try:
            async with self._turn:
                if not one.done.done():
                    await self._handle_waiting()
        except asyncio.CancelledError:
            if one in self._waiting:
                self._waiting.remove(one)
            raise
        return one.done.result()

    async def _handle_waiting(self) -> None:
        """Handle those that wait, in their order; what they have led to is written down at once."""
        taken: list[_Waiting[I]] = []
        try:
            with self._failing():
                left = self._up_to_a_record(iter(self._at_once(self._answers_to_waiting(taken))))
                if left is not None:
                    await _to_its_end(self._write_and_go_on(*left))
        except asyncio.CancelledError:
            raise  # (all is done)
        except BaseException as error:  # (each of those learns of it, and nobody else)
            for one in taken:
                one.failed(error)
            if not isinstance(error, Exception):
                raise
        finally:
            for one in taken:
                one.handled(handled=True)

    def _answers_to_waiting(self, taken: list[_Waiting[I]]) -> list[list[O]]:
        """Have the machine handle those that wait; `taken`: is added to by these."""
        answers: list[list[O]] = []
        while self._waiting and len(taken) < MOST_AT_ONCE:
            one = self._waiting.popleft()
            taken.append(one)
            stopped, event = self._stopped, one.come()
            if stopped or event is None:
                one.handled(handled=not stopped)
                continue
            try:
                answers.append(self._ask(event))
            except (BadInputError, UnreachableError, RefusedError) as error:
                one.failed(error)
        return answers

    def _begin(self, event: I) -> tuple[R, Iterator[O]] | None:
        """Handle an input up to the first record that is to be written; return that, and what comes after it."""
        if self._stopped:
            return None
        try:
            return self._up_to_a_record(iter(self._ask(event)))
        except BaseException as error:  # (a context manager would take as long as all else of a heartbeat's turn)
            self._note_failure(error)
            raise

    async def _end_turn(self, record: R, rest: Iterator[O]) -> None:
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
        except BaseException as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: BaseException) -> None:
        """Handle nothing any more, unless it is a user's request that is refused, or somebody who does not wait."""
        if isinstance(error, BadInputError | UnreachableError | RefusedError | asyncio.CancelledError):
            return
        # Whatever it was, the machine may now believe what nobody was told: another coordinator must begin anew.
        self._stopped = True
        self._on_failure(error)

    async def _write_and_go_on(self, record: R, rest: Iterator[O]) -> None:
        left: tuple[R, Iterator[O]] | None = record, rest
        while left is not None:
            await self._writer.make(partial(self._write, left[0]))
            left = self._up_to_a_record(rest)

    def _up_to_a_record(self, instructions: Iterator[O]) -> tuple[R, Iterator[O]] | None:
        """Carry out instructions; return the next record to write and what follows it, None where all is done."""
        for instruction in instructions:
            record = self._carry_out(instruction)
            if record is not None:
                return record, instructions
        return None

    def _close(self, number: int) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.close()


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
