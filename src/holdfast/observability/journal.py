"""Journal of the events of a job or a pool, in order and without gaps, in a bounded memory.

The creator of an event numbers it. The journal ignores numbers that it already has, and refuses a gap. So a coordinator
that died between the writes of its record and its journal can append all its events again. Only `journal_repaired` may
skip numbers: it replaces a range of lost events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

import msgspec

from holdfast.errors import HoldfastError
from holdfast.protocol.events import AnyEvent, Event, JournalRepaired
from holdfast.protocol.pool.events import PoolEvent, PoolJournalRepaired
from holdfast.protocol.position import Position

#: Number of events in memory for followers. Older ones are read from the file, if the journal has one.
RECENT = 4096


class JournalError(HoldfastError):
    """An event has the wrong number, or comes after the journal was closed."""


class JournalTakenError(JournalError):
    """Another process appended to the file: another coordinator leads this job now."""


def first_number_of(event: Event | PoolEvent) -> int:
    """Return the first event number that an event covers: its own, or the start of the range of `journal_repaired`."""
    return event.from_seq if isinstance(event, JournalRepaired | PoolJournalRepaired) else event.seq


class Journal:
    """The newest `recent` events of a job in memory, for use in one asyncio loop."""

    def __init__(self, *, recent: int = RECENT) -> None:
        #: The position after all events that existed when the journal was opened.
        self.position = Position()
        #: The highest term and generation of the events that existed when the journal was opened.
        self.term = self.generation = 0
        #: Whether the job had ended by those events.
        self.ended = False
        #: The newest of those events that the job's record must contain, or None.
        self.recorded: AnyEvent | None = None
        #: The newest events, numbered without a gap.
        self._lines: deque[bytes] = deque(maxlen=recent)
        self._last = 0
        self._encoder = msgspec.json.Encoder()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        #: Called with the journal's file and the reason when a write fails for the first time.
        self.on_lost: Callable[[str, str], object] = lambda _file, _why: None

    @property
    def last_seq(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._last

    @property
    def closed(self) -> bool:
        """Whether no event will follow."""
        return self._closed

    def append(self, event: Event | PoolEvent) -> bool:
        """Append one event and wake all callers of `wait_beyond`.

        In a file, the event survives an exit of this process at once, and a power failure after `sync`.

        Returns:
            False if the journal already has an event with this number.

        Raises:
            JournalError: the number is not the next one, or the journal is closed.
            JournalTakenError: another process writes to the file.
        """
        seq = event.seq
        if self._closed:
            raise JournalError(f"event {seq} came after the journal was closed")
        if seq <= self._last:
            return False
        if first_number_of(event) != self._last + 1:
            raise JournalError(f"event {seq} cannot follow event {self._last}: the events between are missing")
        line = self._encoder.encode(event) + b"\n"
        self._write(line, seq)
        self._remember(line, seq)
        self._wake()
        return True

    def sync(self) -> None:
        """Flush the file, so that its events survive a power failure. Does nothing in memory."""

    def read(self, after: int, limit: int = 1000) -> list[bytes]:
        """Return up to `limit` events with numbers above `after`, each a line of JSON with its newline.

        If the memory no longer has the first of them, the result starts with the oldest event in memory.
        """
        first = self._last - len(self._lines) + 1
        start = max(after + 1 - first, 0)
        return list(islice(self._lines, start, start + limit))

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until an event above `seq` exists, the journal is closed, or the timeout passes."""
        if self._last > seq or self._closed:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout_s)
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Refuse further events and wake the followers. Idempotent."""
        self._closed = True
        self._wake()

    def _remember(self, line: bytes, seq: int) -> None:
        """Keep a line in memory as the newest event. If its number is not the next one, forget the older lines."""
        if seq != self._last + 1:
            self._lines.clear()  # The lines in memory must be numbered without a gap.
        self._lines.append(line)
        self._last = seq

    def _wake(self) -> None:
        """Let all callers of `wait_beyond` return."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _write(self, line: bytes, seq: int) -> None:
        """Write one line to the file. Does nothing in memory."""
