"""The journal on disk: one JSON object a line, readable by anything."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import BadInputError
from holdfast.observability.event_lines import NoEventError, decode_event
from holdfast.observability.journal import RECENT, Journal, JournalTakenError, first_of
from holdfast.protocol.events import (
    RECORDED,
    CoordinatorRestarted,
    JobFailed,
    JobFinished,
    JobStarted,
    ReadEvent,
)
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.pool.events import AnyPoolEvent

#: Every so many lines the place of one in the file is remembered, to read older events without reading all.
_BLOCK = 256
#: Events that wait until the file can be written again, in bytes.
MAX_PENDING_BYTES = 64 << 20
_BEGINNING = b'{"event":"'
_LOCK_TRIES = 200
_LOCK_PAUSE_S = 0.01


_log = logging.getLogger(__name__)

_POOL = msgspec.json.Decoder(AnyPoolEvent)


class FileJournal(Journal):
    """A journal in the file `path`. The first event creates it, or cuts off a damaged end; before, all is only read.

    A damaged end is what a process that is killed or a power cut may leave: a line that is not complete, or NULs where
    the disk never got the data, and all after them. Between coordinators the file is fenced by its length: who finds
    it longer than he left it has been replaced.

    If the file cannot be written (a full disk), events wait in memory until it can, `MAX_PENDING_BYTES` at most. Beyond
    that the file stays as it is while this process lives: a beginning of the journal without a gap, which the next
    coordinator repairs from its record.

    `job` and `term` are those of the newest event, "" and 0 where there is none; `damaged` is how many bytes are.

    Raises:
        BadInputError: the file cannot be written, or holds something else than events.
    """

    whose = "a job's"

    def __init__(
        self, path: Path, *, recent: int = RECENT, told: Callable[[ReadEvent], object] = lambda _: None
    ) -> None:
        """Read what is there; `told`: called with each event of it, in order."""
        super().__init__(recent=recent)
        self.job = ""
        self.damaged = 0
        self._path = path
        self._told = told
        self._file: int | None = None
        self._synced = True
        #: blocks of events whose numbers have no gap: the first one's number and its place in the file
        self._blocks: list[tuple[int, int]] = []
        self._size = 0
        #: The newest event in the file, and those that wait for it, with their numbers.
        self._written = 0
        self._pending: list[tuple[int, bytes]] = []
        self._pending_bytes = 0
        self._fails = self._reported = self._abandoned = False
        try:
            if path.exists():
                self._check(path.is_file(), "is not a file")
                self._check(os.access(path, os.W_OK), "cannot be written")
                self._load()
            else:
                self._check(
                    path.parent.is_dir() and os.access(path.parent, os.W_OK), "lies in no directory to write to"
                )
        except OSError as error:
            raise BadInputError(f"the events file {path} cannot be read: {error.strerror}; give another path") from None

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise BadInputError(f"the events file {self._path} {what}: give another path")

    def sync(self) -> None:
        if self._synced or self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self._note_failure(error)
        else:
            self._synced = True

    def read(self, after: int, limit: int = 1000) -> list[bytes]:
        """Return up to `limit` events with numbers above `after`, however old."""
        after = max(after, 0)
        if after >= self._last - len(self._lines):
            return super().read(after, limit)
        out = self._read_file(after, limit) if after < self._written else []
        if len(out) < limit:
            start = bisect_right(self._pending, after, key=lambda pending: pending[0])
            out += [line for _, line in self._pending[start : start + limit]]
            out += self._lines if self._abandoned else ()
        return out[:limit]

    def _read_file(self, after: int, limit: int) -> list[bytes]:
        first = max(bisect_right(self._blocks, after, key=lambda block: block[0]) - 1, 0)
        ends = [*(place for _, place in self._blocks[first + 1 :]), self._size]
        out: list[bytes] = []
        with open(self._path, "rb") as file:
            for (number, place), end in zip(self._blocks[first:], ends, strict=True):
                file.seek(place)
                lines = file.read(end - place).splitlines(keepends=True)
                out += lines[max(after + 1 - number, 0) :]
                if len(out) >= limit:
                    break
        return out[:limit]

    def close(self) -> None:
        """Say that no event will follow, and let go of the file."""
        super().close()
        self.on_lost = lambda _file, _why: None  # nobody could be told any more
        if self._pending:
            with contextlib.suppress(JournalTakenError):
                self._write_pending()
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes, seq: int) -> None:
        if self._abandoned:
            return
        self._pending.append((seq, line))
        self._pending_bytes += len(line)
        self._write_pending()
        if self._pending_bytes > MAX_PENDING_BYTES:
            _log.error("the events file %s ends with event %d: too many events wait for it", self._path, self._written)
            self._abandoned, self._pending, self._pending_bytes = True, [], 0

    def _write_pending(self) -> None:
        """Write the events that wait, as many as the file takes."""
        count = 0
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                sync_directory(self._path.parent)
            with _locked(self._file, self._path):
                for seq, line in self._pending:
                    self._append(self._file, line, seq)
                    self._pending_bytes -= len(line)
                    count += 1
        except OSError as error:
            self._note_failure(error)
        else:
            if self._fails:
                _log.warning("the events file %s is written again", self._path)
            self._fails = False
        finally:
            del self._pending[:count]

    def _note_failure(self, error: OSError) -> None:
        """Report that the file cannot be written, once; log each time that it begins."""
        why = error.strerror or str(error)
        if not self._fails:
            _log.warning("the events file %s cannot be written: %s; its events wait in memory", self._path, why)
        self._fails = True
        if not self._reported:
            self._reported = True
            self.on_lost(str(self._path), why)

    def _append(self, file: int, line: bytes, seq: int) -> None:
        size = os.fstat(file).st_size
        if size != self._size + self.damaged:
            raise JournalTakenError(
                f"the events file {self._path} has {size} bytes where this coordinator knows of "
                f"{self._size + self.damaged}: another one writes to it"
            )
        if self.damaged:
            os.ftruncate(file, self._size)
            self.damaged = 0
        self._synced = False
        if os.write(file, line) != len(line):
            os.ftruncate(file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._note(line, seq)

    def _note(self, line: bytes, seq: int) -> None:
        """A line is in the file."""
        if seq != self._written + 1 or not self._blocks or seq - self._blocks[-1][0] >= _BLOCK:
            self._blocks.append((seq, self._size))
        self._size += len(line)
        self._written = seq

    def _load(self) -> None:
        """Read what is there and remember where the last good line ends."""
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or b"\0" in line:
                    # Only what can be the beginning of an event of ours is damaged: the path may be a slip of the pen.
                    begin = line.partition(b"\0")[0][: len(_BEGINNING)]
                    self._check(_BEGINNING.startswith(begin), "holds something else than events")
                    self.damaged = os.fstat(file.fileno()).st_size - self._size
                    break
                self._read_back(line)

    def _read_back(self, line: bytes) -> None:
        event = self._decoded(line)
        follows = event is not None and first_of(event) == self._last + 1 <= event.seq
        self._check(follows, f"holds something else than {self.whose} events after event {self._last}")
        assert event is not None
        self._note(line, event.seq)
        self._take(line, event.seq)
        self._account(event)

    def _decoded(self, line: bytes) -> Any:
        """Return the event of a line, None where it is none."""
        with contextlib.suppress(NoEventError):
            return decode_event(line)
        return None

    def _account(self, event: Any) -> None:
        """Take an event that was there already into account."""
        self.position, self.job, self.term = self.position.after(event), event.job, event.term
        self.generation = max(self.generation, event.generation)
        if isinstance(event, RECORDED):
            self.recorded = event
        if isinstance(event, JobStarted | CoordinatorRestarted | JobFinished | JobFailed):
            self.ended = isinstance(event, JobFinished | JobFailed)
        self._told(event)


class PoolJournal(FileJournal):
    """A pool's journal in a file; `pool` and `term` are those of the newest event."""

    whose = "a pool's"

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self.pool = ""
        super().__init__(path)

    def _decoded(self, line: bytes) -> Any:
        with contextlib.suppress(*MALFORMED):
            return _POOL.decode(line)
        return None

    def _account(self, event: Any) -> None:
        self.pool, self.term = event.pool, event.term


def sync_directory(path: Path) -> None:
    """Have a directory's new entries outlive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _locked(file: int, path: Path) -> Generator[None]:
    """Hold the file against another process for the few microseconds between looking and writing."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(_LOCK_PAUSE_S)
    else:
        raise JournalTakenError(f"the events file {path} is locked by another process")
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
