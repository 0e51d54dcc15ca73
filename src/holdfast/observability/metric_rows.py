"""What each step led to, a row a step, in a file that follows the events: JSON lines, CSV, or TensorBoard's own.

A step's rows stand there once, however often its event is read: what comes of a step cuts what the file had of it and
of later ones, and so does a roll-back. A file of before is gone on with: where the job resumes, its rows stay.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.errors import BadInputError
from holdfast.protocol.events import ReadEvent, RolledBack, StepCommitted

_CSV_HEAD = ("step", "time", "name", "value")


class Rows(Protocol):
    """Where rows go."""

    def cut(self, step: int) -> None:
        """Take out the rows of this step and of later ones."""
        ...

    def add(self, event: StepCommitted) -> None:
        """Add the rows of a step that is later than all that are there."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class MetricWriter:
    """Follows a job's events."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def take(self, event: ReadEvent) -> None:
        """Take the next event; one that was taken before may come again."""
        if isinstance(event, StepCommitted):
            self._rows.cut(event.step)
            self._rows.add(event)
        elif isinstance(event, RolledBack):
            self._rows.cut(event.to_step + 1)

    def close(self) -> None:
        """Write what is not written yet."""
        self._rows.close()


def values_of(event: StepCommitted) -> Iterator[tuple[str, float | None]]:
    """Yield what is known of a step by name: its loss, then what the script has logged; None: no finite number."""
    yield "loss", event.loss
    yield from event.metrics.items()


class LineFile:
    """A file of lines, some for each step, in their order."""

    def __init__(
        self, path: Path, lines_of: Callable[[StepCommitted], bytes], step_of: Callable[[bytes], int], head: bytes = b""
    ) -> None:
        """Go on with the file, or begin it.

        Raises:
            BadInputError: it cannot be written, or its lines are none of ours.
        """
        self._lines_of = lines_of
        #: step and place of each line, in the file's order
        self._places: list[tuple[int, int]] = []
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise BadInputError(f"the file {path} cannot be written: {error.strerror}; give another") from None
        try:
            self._read(path, step_of, head)
        except BaseException:
            self._file.close()
            raise

    def cut(self, step: int) -> None:
        """Take out the rows of this step and of later ones."""
        cut_at = None
        while self._places and self._places[-1][0] >= step:
            cut_at = self._places.pop()[1]
        if cut_at is not None:
            self._file.truncate(cut_at)
            self._file.seek(cut_at)

    def add(self, event: StepCommitted) -> None:
        """Add the rows of a step."""
        self._places.append((event.step, self._file.tell()))
        left = memoryview(self._lines_of(event))
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """All is written already."""
        self._file.close()

    def _read(self, path: Path, step_of: Callable[[bytes], int], head: bytes) -> None:
        data = self._file.read()
        end = data.rfind(b"\n") + 1  # (a line that is not whole is written again)
        at = len(head)
        if end and data[:at] != head:
            raise BadInputError(f"the file {path} does not begin as one of these: give another")
        for line in data[at:end].splitlines(keepends=True) if end else ():
            try:
                self._places.append((step_of(line), at))
            except (ValueError, msgspec.DecodeError):
                raise BadInputError(f"the file {path} holds a line that is none of a step: give another") from None
            at += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._file.write(head)


class _Row(msgspec.Struct):
    step: int


def json_lines(path: Path) -> LineFile:
    """Return a file of JSON, an object a step: `step`, `time`, `loss`, `samples`, `metrics` by name.

    Raises:
        BadInputError: as `LineFile`.
    """

    def line(event: StepCommitted) -> bytes:
        known = {"step": event.step, "time": event.time, "loss": event.loss, "samples": event.samples}
        return msgspec.json.encode({**known, "metrics": event.metrics}) + b"\n"

    return LineFile(path, line, lambda text: msgspec.json.decode(text, type=_Row).step)


def csv_file(path: Path) -> LineFile:
    """Return a file of comma-separated values, a line for each value of a step: step, time, name, value.

    A value that is no finite number is left empty.

    Raises:
        BadInputError: as `LineFile`.
    """

    def line(row: tuple[object, ...]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["" if value is None else value for value in row])
        return text.getvalue().replace("\n", " ").rstrip() + "\n"  # (a name may hold line ends)

    def lines(event: StepCommitted) -> bytes:
        return "".join(line((event.step, event.time, *pair)) for pair in values_of(event)).encode()

    return LineFile(path, lines, lambda text: int(text.partition(b",")[0]), head=line(_CSV_HEAD).encode())


class TensorBoardRows:
    """A folder of TensorBoard's files; what is cut there is purged, as TensorBoard says of a run that began again."""

    def __init__(self, folder: Path) -> None:
        """Begin another file in the folder.

        Raises:
            BadInputError: TensorBoard is not installed, or the folder cannot be written.
        """
        try:
            writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        except ModuleNotFoundError as error:
            raise BadInputError(f"TensorBoard is not installed ({error}): pip install holdfast[tensorboard]") from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = writers.EventFileWriter(str(folder))
        except OSError as error:
            raise BadInputError(f"the folder {folder} cannot be written: {error.strerror}; give another") from None
        #: the newest step of this file; None: nothing is in it yet, and others may lie beside it
        self._last: int | None = None

    def cut(self, step: int) -> None:
        """Have TensorBoard leave out the rows of this step and of later ones, those of earlier files too."""
        if self._last is not None and self._last < step:
            return
        begun = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step, session_log=begun))
        self._last = step - 1

    def add(self, event: StepCommitted) -> None:
        """Add the values of a step."""
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values_of(event)
            if value is not None
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(step=event.step, wall_time=event.time, summary=summary))
        self._last = event.step

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


#: what a job's steps can be written as, by name
FORMATS: dict[str, Callable[[Path], Rows]] = {"jsonl": json_lines, "csv": csv_file, "tensorboard": TensorBoardRows}


def writer_for(path: Path) -> MetricWriter:
    """Return who writes the format that a path's ending says: .jsonl, .csv, or none for TensorBoard's folder.

    Raises:
        BadInputError: it is another ending, or the format's own complaint.
    """
    name = path.suffix.removeprefix(".") or "tensorboard"
    if name not in FORMATS:
        raise BadInputError(f"the file {path} is of no format: let it end in .jsonl or .csv; a folder is TensorBoard's")
    return MetricWriter(FORMATS[name](path))
