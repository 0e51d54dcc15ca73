"""What each step led to, a row a step, in a file that follows the events: JSON lines, CSV, or TensorBoard's own.

A step's rows stand there once, however often its event is read: what comes of a step cuts what the file had of it and
of later ones, and so does a roll-back. A file of before is gone on with: where the job resumes, its rows stay.
What an evaluation came to is part of the step whose state it is of, whenever it is told.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.errors import BadInputError
from holdfast.protocol.events import Evaluated, ReadEvent, RolledBack, StepCommitted
from holdfast.protocol.names import MALFORMED

_CSV_HEAD = ("step", "time", "name", "value")

#: values by name; None: no finite number
Values = Mapping[str, float | None]


class Rows(Protocol):
    """Where rows go."""

    def cut(self, step: int) -> None:
        """Take out the rows of this step and of later ones."""
        ...

    def add(self, event: StepCommitted) -> None:
        """Add the rows of a step that is later than all that are there."""
        ...

    def amend(self, step: int, time: float, values: Values) -> None:
        """Add values to the rows of a step, in place of those that it has by these names; nothing where it has none."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class MetricWriter:
    """Follows a job's events."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        #: what evaluations came to, of the newest step and of later ones; and all their names
        self._found: dict[int, dict[str, float | None]] = {}
        self._names: set[str] = set()

    def take(self, event: ReadEvent) -> None:
        """Take the next event; one that was taken before may come again."""
        match event:
            case StepCommitted(step=step):
                self._found = {at: values for at, values in self._found.items() if at >= step}
                # (the step after an evaluation has its values as well: they are not its own)
                own = {name: value for name, value in event.metrics.items() if name not in self._names}
                self._rows.cut(step)
                self._rows.add(msgspec.structs.replace(event, metrics=own | self._found.get(step, {})))
            case Evaluated(step=step):
                values = {f"{event.name}/{name}": value for name, value in event.metrics.items()}
                self._names |= values.keys()
                self._found.setdefault(step, {}).update(values)
                self._rows.amend(step, event.time, values)
            case RolledBack(to_step=step):
                self._found = {at: values for at, values in self._found.items() if at <= step}
                self._rows.cut(step + 1)
            case _:
                pass

    def close(self) -> None:
        """Write what is not written yet."""
        self._rows.close()


def values_of(event: StepCommitted) -> Iterator[tuple[str, float | None]]:
    """Yield what is known of a step by name: loss, gradient's norm, what the script has logged; None: not finite."""
    yield "loss", event.loss
    yield "grad_norm", event.grad_norm
    yield from event.metrics.items()


class LineFile:
    """A file of lines, some for each step, in their order."""

    def __init__(
        self,
        path: Path,
        lines_of: Callable[[StepCommitted], bytes],
        amended: Callable[[bytes, float, Values], bytes],
        step_of: Callable[[bytes], int],
        head: bytes = b"",
    ) -> None:
        """Go on with the file, or begin it.

        If a method raises `OSError` (a full disk), it can be called again with the same step.

        Args:
            lines_of: makes a step's lines. amended: as `Rows.amend`, of a step's lines.

        Raises:
            BadInputError: it cannot be written, or its lines are none of ours.
        """
        self._lines_of, self._amended = lines_of, amended
        #: each step, and the place of its first line, in the file's order
        self._places: list[tuple[int, int]] = []
        #: The end of the file that could not be written yet, and its place.
        self._unwritten: tuple[int, bytes] | None = None
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise BadInputError(f"the file {path} cannot be written: {error.strerror}; give another") from None
        try:
            self._read(path, step_of, head)
        except OSError as error:
            self._file.close()
            raise BadInputError(f"the file {path} cannot be written: {error.strerror}; give another") from None
        except BaseException:
            self._file.close()
            raise

    def cut(self, step: int) -> None:
        """Take out the rows of this step and of later ones."""
        self._write_rest()
        cut_at = None
        while self._places and self._places[-1][0] >= step:
            cut_at = self._places.pop()[1]
        if cut_at is not None:
            self._file.truncate(cut_at)
            self._file.seek(cut_at)

    def add(self, event: StepCommitted) -> None:
        """Add the rows of a step."""
        self._write_rest()
        self._places.append((event.step, self._file.tell()))
        self._write(self._lines_of(event))

    def amend(self, step: int, time: float, values: Values) -> None:
        """Add values to a step's rows, and write those of later ones again."""
        self._write_rest()
        number = next((number for number, (at, _) in enumerate(self._places) if at == step), None)
        if number is None:
            return
        places = [place for _, place in self._places[number:]]
        self._file.seek(places[0])
        tail = self._file.read()
        end = places[1] - places[0] if len(places) > 1 else len(tail)
        lines = self._amended(tail[:end], time, values)
        later = [(at, place + len(lines) - end) for at, place in self._places[number + 1 :]]
        self._places[number + 1 :] = later
        self._unwritten = places[0], lines + tail[end:]
        self._write_rest()

    def close(self) -> None:
        """All is written already."""
        self._file.close()

    def _write_rest(self) -> None:
        """Write the end of the file that could not be written before."""
        if self._unwritten is not None:
            at, lines = self._unwritten
            self._file.truncate(at)
            self._file.seek(at)
            self._write(lines)
            self._unwritten = None

    def _write(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            left = left[self._file.write(left) :]

    def _read(self, path: Path, step_of: Callable[[bytes], int], head: bytes) -> None:
        data = self._file.read()
        end = data.rfind(b"\n") + 1  # (a line that is not whole is written again)
        at = len(head)
        if end and data[:at] != head:
            raise BadInputError(f"the file {path} does not begin as one of these: give another")
        for line in data[at:end].splitlines(keepends=True) if end else ():
            try:
                step = step_of(line)
            except (ValueError, *MALFORMED):
                raise BadInputError(f"the file {path} holds a line that is none of a step: give another") from None
            if not self._places or self._places[-1][0] != step:
                self._places.append((step, at))
            at += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write(head)


class _Row(msgspec.Struct):
    step: int


def json_lines(path: Path) -> LineFile:
    """Return a file of JSON, an object a step: `step`, `time`, `loss`, `grad_norm`, `samples`, `metrics` by name.

    Raises:
        BadInputError: as `LineFile`.
    """

    def line(event: StepCommitted) -> bytes:
        known = {"step": event.step, "time": event.time, "loss": event.loss, "grad_norm": event.grad_norm}
        return msgspec.json.encode({**known, "samples": event.samples, "metrics": event.metrics}) + b"\n"

    def amended(text: bytes, time: float, values: Values) -> bytes:
        row = msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.json.encode({**row, "metrics": {**row.get("metrics", {}), **values}}) + b"\n"

    return LineFile(path, line, amended, lambda text: msgspec.json.decode(text, type=_Row).step)


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

    def amended(text: bytes, time: float, values: Values) -> bytes:
        old = text.decode().splitlines(keepends=True)
        step, replaced = step_of(text), {line((name,)) for name in values}
        stay = [one for one in old if line((next(csv.reader([one]))[2],)) not in replaced]
        return "".join([*stay, *(line((step, time, *pair)) for pair in values.items())]).encode()

    def step_of(text: bytes) -> int:
        return int(text.partition(b",")[0])

    return LineFile(path, lines, amended, step_of, head=line(_CSV_HEAD).encode())


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
        self._tell(event.step, event.time, dict(values_of(event)))
        self._last = event.step

    def amend(self, step: int, time: float, values: Values) -> None:
        """Add values to a step, of this file or of an earlier one."""
        if self._last is None or step <= self._last:
            self._tell(step, time, values)

    def _tell(self, step: int, time: float, values: Values) -> None:
        told = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        summary = self._summaries.Summary(value=told)
        self._writer.add_event(self._events.Event(step=step, wall_time=time, summary=summary))

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
