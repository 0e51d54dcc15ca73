"""The events of a job, or of a pool, in order, without gaps: an append-only JSON-lines file, and a bounded memory.

The events' numbers come from whoever makes them; the journal skips what it has and refuses a gap, so that a coordinator
that died between its record and its journal can say it all again. Only `journal_repaired` may leave numbers out: those
of the events for which it stands.
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

#: How many events the memory holds for followers; older ones are read from the file, where there is one.
RECENT = 4096


class JournalError(HoldfastError):
    """An event does not follow the one before it, or comes after the end."""


class JournalTakenError(JournalError):
    """Somebody else appended to our file: another coordinator leads this job now."""


def first_of(event: Event | PoolEvent) -> int:
    """Return the number of the first event for which one stands: its own, but for `journal_repaired`."""
    return event.from_seq if isinstance(event, JournalRepaired | PoolJournalRepaired) else event.seq


class Journal:
    """The events of one job in memory, the newest `recent` of them; for one asyncio loop.

    `position` is what the events that were there at the begin add up to.
    """

    def __init__(self, *, recent: int = RECENT) -> None:
        self.position = Position()
        #: of the events that were there at the begin: the highest term and generation
        self.term = self.generation = 0
        #: whether the job was over by those events
        self.ended = False
        #: the newest event that was there at the begin and of which the job's record must know, None if there is none
        self.recorded: AnyEvent | None = None
        #: the newest ones, numbered without a gap
        self._lines: deque[bytes] = deque(maxlen=recent)
        self._last = 0
        self._encoder = msgspec.json.Encoder()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        #: Called with the journal's file and the reason, the first time that it cannot be written.
        self.on_lost: Callable[[str, str], object] = lambda _file, _why: None

    @property
    def last_seq(self) -> int:
        """The number of the newest event, 0 before the first."""
        return self._last

    @property
    def closed(self) -> bool:
        """Whether no event will follow."""
        return self._closed

    def append(self, event: Event | PoolEvent) -> bool:
        """Append one event; followers see it, and it outlives this process, but not yet a power cut.

        Returns:
            False where the journal has it already, by its number.

        Raises:
            JournalError: its number is not the next one, or the journal is closed.
            JournalTakenError: somebody else writes to the file.
        """
        seq = event.seq
        if self._closed:
            raise JournalError(f"event {seq} came after the journal was closed")
        if seq <= self._last:
            return False
        if first_of(event) != self._last + 1:
            raise JournalError(f"event {seq} cannot follow event {self._last}: the events between are missing")
        line = self._encoder.encode(event) + b"\n"
        self._write(line, seq)
        self._take(line, seq)
        self._wake()
        return True

    def sync(self) -> None:
        """Have all events that are in the file outlive a power cut; in memory there is nothing to do."""

    def read(self, after: int, limit: int = 1000) -> list[bytes]:
        """Return up to `limit` events with numbers above `after`, each a line of JSON with its newline.

        Where the memory has forgotten the first of them, the oldest known ones come.
        """
        first = self._last - len(self._lines) + 1
        start = max(after + 1 - first, 0)
        return list(islice(self._lines, start, start + limit))

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until there is an event above `seq`, the journal is closed, or the time is up."""
        if self._last > seq or self._closed:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout_s)
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Say that no event will follow; followers are woken. The second call does nothing."""
        self._closed = True
        self._wake()

    def _take(self, line: bytes, seq: int) -> None:
        if seq != self._last + 1:
            self._lines.clear()  # what came before the gap is numbered otherwise
        self._lines.append(line)
        self._last = seq

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _write(self, line: bytes, seq: int) -> None:
        """Hand one line to the file; in memory there is nothing to do."""
