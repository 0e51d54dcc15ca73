"""The journal on disk: one JSON object a line, readable by anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import BadInputError
from holdfast.observability.journal import RECENT, Journal, JournalError, JournalFacts, JournalTakenError

#: Every so many lines the place of one in the file is remembered, to read older events without reading all.
_INDEX_EVERY = 256
_BEGINNING = b'{"event":"'
_LOCK_TRIES = 200
_LOCK_PAUSE_S = 0.01


class _Line(msgspec.Struct, kw_only=True):
    """What is read back of a line. A loss that is not finite is null in JSON."""

    seq: int
    event: str
    time: float = 0.0
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    samples: int = 0
    to_step: int = 0


class FileJournal(Journal):
    """A journal in the file `path`. The first event creates it, or cuts off a torn last line; before, all is only read.

    Between coordinators the file is fenced by its length: who finds it longer than he left it has been replaced.

    Raises:
        BadInputError: the file cannot be written, or holds something else than events.
    """

    def __init__(self, path: Path, *, recent: int = RECENT) -> None:
        super().__init__(recent=recent)
        self._path = path
        self._file: int | None = None
        #: where the block of every _INDEX_EVERY-th event begins in the file
        self._index: list[int] = []
        self._size = 0
        self._torn = 0
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

    def read(self, after: int, limit: int = 1000) -> list[bytes]:
        """Return up to `limit` events with numbers above `after`, however old."""
        after = max(after, 0)
        if after >= self._last - len(self._lines):
            return super().read(after, limit)
        out: list[bytes] = []
        for number, line in enumerate(
            self._lines_from(after // _INDEX_EVERY), after // _INDEX_EVERY * _INDEX_EVERY + 1
        ):
            if number > after:
                out.append(line)
            if len(out) >= limit or number >= self._last:
                break
        return out

    def close(self) -> None:
        """Say that no event will follow, and let go of the file."""
        super().close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with _locked(self._file, self._path):
                self._append(self._file, line)
        except OSError as error:
            raise JournalError(f"the events file {self._path} cannot be written: {error.strerror}") from error

    def _append(self, file: int, line: bytes) -> None:
        size = os.fstat(file).st_size
        if size != self._size + self._torn:
            raise JournalTakenError(
                f"the events file {self._path} has {size} bytes where this coordinator knows of "
                f"{self._size + self._torn}: another one writes to it"
            )
        if self._torn:
            os.ftruncate(file, self._size)
            self._torn = 0
        if self._last % _INDEX_EVERY == 0:
            self._index.append(self._size)
        if os.write(file, line) != len(line):
            os.ftruncate(file, self._size)
            raise JournalError(f"the events file {self._path} cannot be written: the disk is full")
        self._size += len(line)

    def _load(self) -> None:
        """Read what is there and remember where the last complete line ends."""
        reader = _FactsReader()
        for line in self._lines_from(0):
            if not line.endswith(b"\n"):
                # Only what can be the beginning of an event of ours is torn: the path may be a slip of the pen.
                self._check(line.startswith(_BEGINNING[: len(line)]), "holds something else than events")
                self._torn = len(line)
                break
            self._check(reader.take(line), f"holds something else than a job's events after event {self._last}")
            if self._last % _INDEX_EVERY == 0:
                self._index.append(self._size)
            self._lines.append(line)
            self._size += len(line)
            self._last += 1
        self.facts = reader.facts()

    def _lines_from(self, block: int) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            file.seek(self._index[block] if block else 0)
            yield from file


@contextlib.contextmanager
def _locked(file: int, path: Path) -> Iterator[None]:
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


class _FactsReader:
    """Adds up lines to facts; steps that a roll-back undid no longer count."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Line)
        self._seq = 0
        self._epoch = 0
        self._steps: list[tuple[int, float, float, int]] = [(0, 0.0, 0.0, 0)]  # step, time, loss, samples up to it

    def take(self, line: bytes) -> bool:
        """Take in one line; False where it cannot be the next event."""
        try:
            event = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        if event.seq != self._seq + 1:
            return False
        self._seq = event.seq
        if event.event == "epoch_started":
            self._epoch = event.epoch
        elif event.event == "step_committed":
            loss = float("nan") if event.loss is None else event.loss
            self._steps.append((event.step, event.time, loss, self._steps[-1][3] + event.samples))
        elif event.event == "rolled_back":
            while self._steps[-1][0] > event.to_step:
                self._steps.pop()
        return True

    def facts(self) -> JournalFacts:
        """Return the sums so far."""
        step, when, loss, samples = self._steps[-1]
        return JournalFacts(
            seq=self._seq, step=step, step_time=when, samples=samples, loss=loss, epoch_announced=self._epoch
        )
