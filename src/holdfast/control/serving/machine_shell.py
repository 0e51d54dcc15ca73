"""The shell of a state machine: feeds it inputs, and executes its instructions in order, one transaction at a time.

An input is handled completely before the next one: when `feed` returns, the record is swapped, the events are in the
journal and the messages in their queues. Only a write to the store takes time. It is made in a thread. The instructions
that follow the record, and inputs that arrive meanwhile, wait for it in their order (docs/protocol.md, Durable before
told). All waiting inputs are then handled in one transaction, with one write.
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

from holdfast.control.serving.retrying_writer import RetryingWriter
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.messages.agent import Part
from holdfast.protocol.names import MAX_PART_BYTES

#: most waiting inputs handled in one transaction, because it blocks the event loop
MAX_INPUTS = 64

T = TypeVar("T")
#: type of the inputs of the machine, of its instructions, and of its record
I = TypeVar("I")
O = TypeVar("O")
R = TypeVar("R")


class Connection(Protocol):
    """An agent's connection, as the shell uses it. Neither method waits or fails."""

    def send(self, message: bytes) -> None:
        """Queue a message. A full queue closes the connection."""
        ...

    def close(self) -> None:
        """Close the connection after the sent messages."""
        ...


class TransactionLock:
    """The lock that lets one transaction run at a time, in the order of the requests.

    It is an asynchronous context manager. `try_acquire` acquires it without waiting if it is free.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free, and return whether it was."""
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        """Pass the lock to the longest waiter that was not cancelled, or free it."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self._is_held = False

    async def __aenter__(self) -> None:
        """Wait for the lock behind earlier waiters. If it was passed to a waiter that is cancelled, pass it on."""
        if self.try_acquire():
            return
        acquired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(acquired)
        try:
            await acquired
        except asyncio.CancelledError:
            if not acquired.cancelled():
                self.release()  # the lock was passed to this waiter already
            raise

    async def __aexit__(self, *_: object) -> None:
        self.release()


class _QueuedInput(Generic[I]):
    """An input that waits for its transaction, or for the end of one in which it is handled with others.

    Args:
        admit: called when the input is handled. Does what belongs to it, and returns the input, or None to drop it.
    """

    def __init__(self, admit: Callable[[], I | None]) -> None:
        self.admit = admit
        #: the result: whether it was handled
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """Set an error as the result, unless there is a result."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark it as retrieved, because a cancelled waiter does not retrieve it

    def complete(self, *, handled: bool) -> None:
        """Set the result."""
        if not self.done.done():
            self.done.set_result(handled)


class MachineShell(ABC, Generic[I, O, R]):
    """Drives one state machine. Subclasses define its inputs, its instructions and its record.

    Args:
        now: the time, in unix seconds that never step back.
        on_connected: called with the number of connections whenever it changes.
        on_failure: called with the error that stopped the shell. From then on it handles nothing.
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
        self._lock = TransactionLock()
        #: inputs that no transaction has handled yet, in order
        self._waiting: deque[_QueuedInput[I]] = deque()
        self._writer = RetryingWriter(now, self._store_back)
        self._tasks: set[asyncio.Task[None]] = set()

    # the machine, defined by subclasses

    @abstractmethod
    def _handle(self, event: I) -> list[O]:
        """Pass an input to the machine, and return its instructions."""

    @abstractmethod
    def _merge_instructions(self, answers: list[list[O]]) -> list[O]:
        """Merge the instructions for several inputs, so that at most one record is written."""

    @abstractmethod
    def _input_for_message(self, number: int, message: Any) -> I:
        """Return the input for a message on a connection."""

    @abstractmethod
    def _input_for_disconnect(self, number: int) -> I:
        """Return the input for the end of a connection."""

    @abstractmethod
    def _input_for_store_back(self, away_s: float) -> I:
        """Return the input for the first answer of the store, after `away_s` seconds without one."""

    @abstractmethod
    def _execute(self, instruction: O) -> R | None:
        """Execute an instruction at once. If it is a record to write, return the record instead."""

    @abstractmethod
    def _write_record(self, record: R) -> None:
        """Write a record to the store. Called in a thread."""

    def count_refusal(self) -> None:
        """Note that a connection was closed because of an invalid message."""

    # transactions

    async def start_machine(self, start: Callable[[], list[O]]) -> None:
        """Execute the instructions that `start` returns, as the first transaction.

        Afterwards the store and the journal contain this server as the leader.

        Raises:
            SupersededError, JournalError, StoreError: as `feed`.
        """
        async with self._lock:
            unfinished = self._execute_until_record(iter(start()))
            if unfinished is not None:
                await _wait_uninterrupted(self._write_and_continue(*unfinished))

    def check_store(self) -> None:
        """Refuse a user's request that would have to wait for the store.

        Raises:
            RefusedError: the store is unavailable.
        """
        self._writer.check_available()

    @property
    def unanswered_s(self) -> float:
        """Seconds for which the store has not answered the current write, or 0 without one."""
        return self._writer.unanswered_s

    async def feed(self, event: I) -> bool:
        """Handle one input after the earlier ones, and execute all resulting instructions. Do nothing after `stop`.

        If the caller is cancelled during its own transaction, the cancellation takes effect at the transaction's end.
        If its input is handled in another caller's transaction, it takes effect at once.

        Returns:
            Whether it was handled.

        Raises:
            BadInputError, UnreachableError, RefusedError: the machine refuses a user's request; nothing has happened.
            SupersededError: another server leads; no message about this input was sent.
            JournalError, StoreError: the disk or the store fails.
        """
        return await self._run_in_order(lambda: event)

    def on_message(self, number: int, message: Any) -> asyncio.Future[None] | None:
        """Handle an agent's message as `feed` does.

        If no transaction is open, handle it within this call, up to a write to the store. After `stop` it is ignored.
        An error other than a refusal stops the shell.

        Returns:
            The rest of the work, which may fail as `feed`, or None if all is done.

        Raises:
            JournalError: the disk fails.
        """
        event = self._input_for_message(number, message)
        if not self._lock.try_acquire():
            return asyncio.ensure_future(self._feed(event))
        rest = None
        try:
            rest = self._start_transaction(event)
        finally:
            if rest is None:
                self._lock.release()
        return None if rest is None else asyncio.ensure_future(self._finish_transaction(*rest))

    async def add_connection(self, number: int, connection: Connection, hello: Any) -> None:
        """Add a connection, report their number, and handle its first message, after the earlier inputs.

        If the shell has stopped, close the connection instead.
        """

        def admit() -> I | None:
            """Add the connection, and return the input for its first message.

            If the shell has stopped, close it, and return None.
            """
            if self._stopped:
                connection.close()
                return None
            self.connections[number] = connection
            self._on_connected(len(self.connections))
            return self._input_for_message(number, hello)

        await self._run_in_order(admit)

    async def remove_connection(self, number: int) -> None:
        """Remove a connection, report their number, and pass its end to the machine, after the earlier inputs.

        One that never sent a Hello is ignored.
        """

        def admit() -> I | None:
            """Remove the connection, and return the input for its end, or None if it was never added."""
            if self.connections.pop(number, None) is None:
                return None
            self._on_connected(len(self.connections))
            return self._input_for_disconnect(number)

        await self._run_in_order(admit)

    async def read_durable(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, called while no transaction is open: it sees only decisions in the store.

        Raises:
            RefusedError: the store is unavailable.
        """
        self.check_store()
        async with self._lock:
            return read()

    async def stop(self) -> None:
        """Handle nothing from now on, and wait for the open transaction.

        It ends, or fails if the store is unavailable.
        """
        self._stopped = True
        self._writer.give_up()
        async with self._lock:
            pass

    async def _feed(self, event: I) -> None:
        await self.feed(event)

    def _store_back(self, away_s: float) -> None:
        """Report to the machine that the store answers, after the transaction that has waited for it."""
        self.feed_later(self._input_for_store_back(away_s))

    def feed_later(self, event: I) -> None:
        """Handle an input in a background task, after the open transaction. Its errors reach only `on_failure`."""
        task = asyncio.get_running_loop().create_task(self._feed(event))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Forget a background task, and mark its error as retrieved."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # `_stop_on_failure` has reported it

    async def _run_in_order(self, admit: Callable[[], I | None]) -> bool:
        """Queue an input, and return once it is handled.

        The inputs that wait when the lock is free share a transaction.

        Args:
            admit: called at the input's turn, also after `stop`. Returns the input, or None if there is nothing to
                handle.

        Returns:
            Whether it was handled: False after `stop`.

        Raises:
            Exception: the error of the input or of its transaction, as in `feed`. A cancelled caller withdraws an input
                that still waits.
        """
        queued = _QueuedInput(admit)
        self._waiting.append(queued)
        try:
            async with self._lock:
                if not queued.done.done():
                    await self._handle_waiting()
        except asyncio.CancelledError:
            if queued in self._waiting:
                self._waiting.remove(queued)
            raise
        return queued.done.result()

    async def _handle_waiting(self) -> None:
        """Pass the waiting inputs to the machine, execute all instructions with one write, and complete the inputs.

        If that fails, stop the shell, and give the error to all of these inputs.
        """
        taken: list[_QueuedInput[I]] = []
        try:
            with self._stop_on_failure():
                unfinished = self._execute_until_record(iter(self._merge_instructions(self._handle_queued(taken))))
                if unfinished is not None:
                    await _wait_uninterrupted(self._write_and_continue(*unfinished))
        except asyncio.CancelledError:
            raise  # the transaction is complete
        except BaseException as error:  # reported to the callers of these inputs only
            for queued in taken:
                queued.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            for queued in taken:
                queued.complete(handled=True)

    def _handle_queued(self, taken: list[_QueuedInput[I]]) -> list[list[O]]:
        """Pass up to `MAX_INPUTS` waiting inputs to the machine, and return the instructions for each.

        Add the inputs to `taken`.

        A refused request fails alone. Inputs that were dropped, or come after `stop`, are completed without
        instructions.
        """
        answers: list[list[O]] = []
        while self._waiting and len(taken) < MAX_INPUTS:
            queued = self._waiting.popleft()
            taken.append(queued)
            stopped, event = self._stopped, queued.admit()
            if stopped or event is None:
                queued.complete(handled=not stopped)
                continue
            try:
                answers.append(self._handle(event))
            except (BadInputError, UnreachableError, RefusedError) as error:
                queued.fail(error)
        return answers

    def _start_transaction(self, event: I) -> tuple[R, Iterator[O]] | None:
        """Handle an input up to the first record to write.

        Return the record and the later instructions, or None if all is done or the shell has stopped. Errors are
        raised; one that is not a refusal also stops the shell.
        """
        if self._stopped:
            return None
        try:
            return self._execute_until_record(iter(self._handle(event)))
        # a context manager would take as long as the rest of the transaction of a heartbeat
        except BaseException as error:
            self._on_error(error)
            raise

    async def _finish_transaction(self, record: R, rest: Iterator[O]) -> None:
        """Write the record, execute the later instructions, and release the lock. A failure stops the shell."""
        try:
            with self._stop_on_failure():
                await _wait_uninterrupted(self._write_and_continue(record, rest))
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _stop_on_failure(self) -> Generator[None]:
        """Stop the shell if the code inside fails, other than by a refusal or a cancellation.

        The error is raised again.
        """
        try:
            yield
        except BaseException as error:
            self._on_error(error)
            raise

    def _on_error(self, error: BaseException) -> None:
        """Stop the shell and report the error, unless it is a refused request of a user or a cancellation."""
        if isinstance(error, BadInputError | UnreachableError | RefusedError | asyncio.CancelledError):
            return
        # The state of the machine may contain decisions that were never announced. Another server must start from the
        # record.
        self._stopped = True
        self._on_failure(error)

    async def _write_and_continue(self, record: R, rest: Iterator[O]) -> None:
        """Write a record, and execute the instructions after it. Do the same for each further record among them."""
        unfinished: tuple[R, Iterator[O]] | None = record, rest
        while unfinished is not None:
            await self._writer.write(partial(self._write_record, unfinished[0]))
            unfinished = self._execute_until_record(rest)

    def _execute_until_record(self, instructions: Iterator[O]) -> tuple[R, Iterator[O]] | None:
        """Execute instructions up to the first record to write.

        Return it and the later instructions, or None if all are done.
        """
        for instruction in instructions:
            record = self._execute(instruction)
            if record is not None:
                return record, instructions
        return None

    def _close(self, number: int) -> None:
        """Close a connection after its sent messages, if it still exists."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.close()


def split_message(data: bytes) -> list[bytes]:
    """Return an encoded message alone, or if it is large, as several encoded `Part` messages for the agent to join.

    A message to a thousand agents waits as the same bytes for all, except for the part that each socket has not yet
    accepted. Parts keep that small.
    """
    if len(data) <= MAX_PART_BYTES:
        return [data]
    size = MAX_PART_BYTES - 64  # room for the envelope of a part
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [msgspec.msgpack.encode(Part(data=part, left=len(parts) - 1 - n)) for n, part in enumerate(parts)]


async def _wait_uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that must not be interrupted, and raise its error.

    A cancellation takes effect once it has ended.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
