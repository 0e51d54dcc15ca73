"""Journal in a file of JSON lines."""

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
from holdfast.observability.journal import RECENT, Journal, JournalTakenError, first_number_of
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

#: Lines per block. The file offset of each block is kept, to read old events without reading the whole file.
_BLOCK = 256
#: Upper limit of the events that wait in memory until the file can be written again, in bytes.
MAX_PENDING_BYTES = 64 << 20
_BEGINNING = b'{"event":"'
_LOCK_TRIES = 200
_LOCK_PAUSE_S = 0.01


_log = logging.getLogger(__name__)

_POOL = msgspec.json.Decoder(AnyPoolEvent)


class FileJournal(Journal):
    """Journal in the file `path`. The first append creates the file or truncates a damaged end.

    A kill or a power failure can damage the end: it leaves an incomplete line, or NUL bytes that the disk never
    replaced by data. Everything after that is damaged too. The length of the file fences coordinators: a coordinator
    that finds the file longer than its own last write has been replaced.

    If the file cannot be written, e.g. because the disk is full, up to `MAX_PENDING_BYTES` of events wait in memory.
    Beyond that, this process writes no more to the file. The file then ends early but has no gap, and the next
    coordinator repairs it from its record.

    Raises:
        BadInputError: the file cannot be written, or contains something other than events.
    """

    whose = "a job's"

    def __init__(
        self, path: Path, *, recent: int = RECENT, on_existing: Callable[[ReadEvent], object] = lambda _: None
    ) -> None:
        """Read the existing events; `on_existing` is called with each of them, in order. No file is created yet.

        Raises:
            BadInputError: the file or its folder cannot be written, the file cannot be read, or has other contents than
                events.
        """
        super().__init__(recent=recent)
        #: The job of the newest event; "" before the first event.
        self.job = ""
        #: Number of damaged bytes at the end of the file.
        self.damaged = 0
        self._path = path
        self._on_existing = on_existing
        self._file: int | None = None
        self._synced = True
        #: For each block of events without a gap: the number of its first event, and its file offset.
        self._blocks: list[tuple[int, int]] = []
        self._size = 0
        #: The number of the newest event in the file.
        self._written = 0
        #: Events that wait to be written, with their numbers.
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
        """Flush the file to disk if events were written since the last flush.

        A failure is logged, and the next call tries again.
        """
        if self._synced or self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self._note_failure(error)
        else:
            self._synced = True

    def read(self, after: int, limit: int = 1000) -> list[bytes]:
        """Return up to `limit` lines of events with numbers above `after`.

        They come from memory if it has them, else from the file and the events that wait to be written to it. If the
        file was given up, its missing events are left out.
        """
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
        """Return up to `limit` lines of the file with numbers above `after`.

        Only the blocks that contain them are read.
        """
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
        """Refuse further events, try once more to write pending events, and sync and close the file."""
        super().close()
        self.on_lost = lambda _file, _why: None  # A report would become an event, and the journal is closed.
        if self._pending:
            with contextlib.suppress(JournalTakenError):
                self._write_pending()
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes, seq: int) -> None:
        """Write a line, after the ones that wait. If the file cannot be written, the line waits in memory.

        If more than `MAX_PENDING_BYTES` wait, they are dropped, and the file is given up: nothing is written to it
        again.
        """
        if self._abandoned:
            return
        self._pending.append((seq, line))
        self._pending_bytes += len(line)
        self._write_pending()
        if self._pending_bytes > MAX_PENDING_BYTES:
            _log.error("the events file %s ends with event %d: too many events wait for it", self._path, self._written)
            self._abandoned, self._pending, self._pending_bytes = True, [], 0

    def _write_pending(self) -> None:
        """Write pending events until all are written or a write fails. Create the file if it is not open yet.

        Failures of the disk are logged, and the events that were not written stay pending.

        Raises:
            JournalTakenError: another process writes to the file or holds its lock.
        """
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
        """Log the start of each period of failing writes. Report only the first one to `on_lost`."""
        why = error.strerror or str(error)
        if not self._fails:
            _log.warning("the events file %s cannot be written: %s; its events wait in memory", self._path, why)
        self._fails = True
        if not self._reported:
            self._reported = True
            self.on_lost(str(self._path), why)

    def _append(self, file: int, line: bytes, seq: int) -> None:
        """Write one line at the end of the file. A damaged end is cut off first.

        Raises:
            JournalTakenError: the file has another size than this process has written.
            OSError: the line was not written; a part of it is removed again.
        """
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
        self._record_line(line, seq)

    def _record_line(self, line: bytes, seq: int) -> None:
        """Record that a line is in the file: its offset, if a new block starts with it, and the new end of the file."""
        if seq != self._written + 1 or not self._blocks or seq - self._blocks[-1][0] >= _BLOCK:
            self._blocks.append((seq, self._size))
        self._size += len(line)
        self._written = seq

    def _load(self) -> None:
        """Read the existing events up to the first incomplete line.

        Count the bytes from there as damaged, to be cut off later.

        Raises:
            BadInputError: the file contains something other than events.
        """
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or b"\0" in line:
                    # Truncate later only if this may be the start of an event: the user may have given a wrong path.
                    begin = line.partition(b"\0")[0][: len(_BEGINNING)]
                    self._check(_BEGINNING.startswith(begin), "holds something else than events")
                    self.damaged = os.fstat(file.fileno()).st_size - self._size
                    break
                self._load_line(line)

    def _load_line(self, line: bytes) -> None:
        """Restore the state of the journal from a line of the existing file.

        Raises:
            BadInputError: the line is not an event, or its number is not the next one.
        """
        event = self._decoded(line)
        follows = event is not None and first_number_of(event) == self._last + 1 <= event.seq
        self._check(follows, f"holds something else than {self.whose} events after event {self._last}")
        assert event is not None
        self._record_line(line, event.seq)
        self._remember(line, event.seq)
        self._restore_state(event)

    def _decoded(self, line: bytes) -> Any:
        """Return the event of a line, or None if the line is not an event."""
        with contextlib.suppress(NoEventError):
            return decode_event(line)
        return None

    def _restore_state(self, event: Any) -> None:
        """Update position, job, term, generation, recorded event and end of the job from an event that already existed.

        Pass it to `on_existing`.
        """
        self.position, self.job, self.term = self.position.after(event), event.job, event.term
        self.generation = max(self.generation, event.generation)
        if isinstance(event, RECORDED):
            self.recorded = event
        if isinstance(event, JobStarted | CoordinatorRestarted | JobFinished | JobFailed):
            self.ended = isinstance(event, JobFinished | JobFailed)
        self._on_existing(event)


class PoolJournal(FileJournal):
    """Journal of a pool in a file. `pool` is the pool of the newest event."""

    whose = "a pool's"

    def __init__(self, path: Path) -> None:
        """Read the existing events."""
        self.pool = ""
        super().__init__(path)

    def _decoded(self, line: bytes) -> Any:
        """Return the pool event of a line, or None if the line is not one."""
        with contextlib.suppress(*MALFORMED):
            return _POOL.decode(line)
        return None

    def _restore_state(self, event: Any) -> None:
        self.pool, self.term = event.pool, event.term


def sync_directory(path: Path) -> None:
    """Flush a directory, so that its new entries survive a power failure."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _locked(file: int, path: Path) -> Generator[None]:
    """Lock the file against other processes for the microseconds between the check and the write.

    Raises:
        JournalTakenError: another process holds the lock after `_LOCK_TRIES` tries.
    """
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
