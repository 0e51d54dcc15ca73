"""The job's events, in order and without gaps: an append-only JSON-lines file, and a bounded memory for followers.

The events' numbers come from whoever makes them; the journal skips what it has and refuses a gap, so that a coordinator
that died between its record and its journal can say it all again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

import msgspec

from holdfast.errors import HoldfastError
from holdfast.protocol.events import Event

#: How many events the memory holds for followers; older ones are read from the file, where there is one.
RECENT = 4096


class JournalError(HoldfastError):
    """The journal cannot be written, or an event does not follow the one before it."""


class JournalTakenError(JournalError):
    """Somebody else appended to our file: another coordinator leads this job now."""


class JournalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator must know of the events so far; the names are those of coordination's `JournalTail`.

    `step`, `step_time` (unix seconds) and `loss` are the last committed step's, `samples` the sum over all steps that
    no roll-back undid, `epoch_announced` the last epoch that was said to have started.
    """

    seq: int = 0
    step: int = 0
    step_time: float = 0.0
    samples: int = 0
    loss: float = 0.0
    epoch_announced: int = 0


class Journal:
    """The events of one job in memory, the newest `recent` of them; for one asyncio loop."""

    def __init__(self, *, recent: int = RECENT) -> None:
        self.facts = JournalFacts()
        self._lines: deque[bytes] = deque(maxlen=recent)
        self._last = 0
        self._encoder = msgspec.json.Encoder()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def last_seq(self) -> int:
        """The number of the newest event, 0 before the first."""
        return self._last

    @property
    def closed(self) -> bool:
        """Whether no event will follow."""
        return self._closed

    def append(self, event: Event) -> bool:
        """Append one event; it is on its way to the disk when this returns.

        Returns:
            False where the journal has it already, by its number.

        Raises:
            JournalError: its number is not the next one, or the journal is closed or cannot be written.
            JournalTakenError: somebody else writes to the file.
        """
        seq = event.seq
        if self._closed:
            raise JournalError(f"event {seq} came after the journal was closed")
        if seq <= self._last:
            return False
        if seq != self._last + 1:
            raise JournalError(f"event {seq} cannot follow event {self._last}: the events between are missing")
        line = self._encoder.encode(event) + b"\n"
        self._write(line)
        self._lines.append(line)
        self._last = seq
        self._wake()
        return True

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

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _write(self, line: bytes) -> None:
        """Make one line durable; in memory there is nothing to do."""
