"""Write the metrics of each step to a file: JSON lines, CSV, or TensorBoard.

Each step has its rows once, even if its event is read several times: a step first removes its own rows and the rows of
later steps. A roll-back removes the rows of undone steps. An existing file is continued, so rows of earlier runs stay.
The results of an evaluation belong to the evaluated step, even if they arrive later.
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

#: Values by name; None for a value that is not finite.
Values = Mapping[str, float | None]


class Rows(Protocol):
    """A file or table that receives rows of metrics, one group per step."""

    def cut(self, step: int) -> None:
        """Remove the rows of this step and of later ones."""
        ...

    def add(self, event: StepCommitted) -> None:
        """Add the rows of a step. All existing rows must be of earlier steps."""
        ...

    def amend(self, step: int, time: float, values: Values) -> None:
        """Set values of a step by name. Do nothing if the step has no rows."""
        ...

    def close(self) -> None:
        """Write all pending rows, and close."""
        ...


class MetricWriter:
    """Writes rows from a job's events."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        #: Evaluation results of the newest step and of later ones, by step.
        self._found: dict[int, dict[str, float | None]] = {}
        #: All names of evaluation results.
        self._names: set[str] = set()

    def on_event(self, event: ReadEvent) -> None:
        """Write the rows of a step, add an evaluation's results to its step, or remove steps that a roll-back undid.

        Other events are ignored. An event may come again: its rows are then replaced. Raises `OSError` if the rows
        cannot be written.
        """
        match event:
            case StepCommitted(step=step):
                self._found = {at: values for at, values in self._found.items() if at >= step}
                # The step after an evaluation also carries its results, but they belong to the evaluated step.
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
        """Write all pending rows, and close."""
        self._rows.close()


def values_of(event: StepCommitted) -> Iterator[tuple[str, float | None]]:
    """Yield a step's values by name: loss, gradient norm, and logged metrics. None means not finite."""
    yield "loss", event.loss
    yield "grad_norm", event.grad_norm
    yield from event.metrics.items()


class LineFile:
    """A file with one or more lines for each step, ordered by step."""

    def __init__(
        self,
        path: Path,
        lines_of: Callable[[StepCommitted], bytes],
        amended: Callable[[bytes, float, Values], bytes],
        step_of: Callable[[bytes], int],
        head: bytes = b"",
    ) -> None:
        """Open the file, or create it.

        If a method raises `OSError` (a full disk), it can be called again with the same step.

        Args:
            lines_of: makes the lines of a step.
            amended: returns the lines of a step with values set, as in `Rows.amend`.
            step_of: returns the step of a line.
            head: the first line of the file.

        Raises:
            BadInputError: the file cannot be written, or has another format.
        """
        self._lines_of, self._amended = lines_of, amended
        #: Each step with the offset of its first line, in file order.
        self._places: list[tuple[int, int]] = []
        #: The end of the file that could not be written yet, with its offset.
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
        """Remove the rows of this step and of later ones. First write what a failed call left unwritten."""
        self._write_rest()
        cut_at = None
        while self._places and self._places[-1][0] >= step:
            cut_at = self._places.pop()[1]
        if cut_at is not None:
            self._file.truncate(cut_at)
            self._file.seek(cut_at)

    def add(self, event: StepCommitted) -> None:
        """Append the rows of a step, which must be later than those in the file."""
        self._write_rest()
        self._places.append((event.step, self._file.tell()))
        self._write(self._lines_of(event))

    def amend(self, step: int, time: float, values: Values) -> None:
        """Set values of a step, and rewrite the rows of later steps. A step without rows is ignored."""
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
        """Close the file; all rows are written already."""
        self._file.close()

    def _write_rest(self) -> None:
        """Write the end of the file that a failed call left unwritten."""
        if self._unwritten is not None:
            at, lines = self._unwritten
            self._file.truncate(at)
            self._file.seek(at)
            self._write(lines)
            self._unwritten = None

    def _write(self, lines: bytes) -> None:
        """Write all bytes at the current offset; the unbuffered file may take only some of them at a time."""
        left = memoryview(lines)
        while left:
            left = left[self._file.write(left) :]

    def _read(self, path: Path, step_of: Callable[[bytes], int], head: bytes) -> None:
        """Index the steps of the existing file, and cut off an incomplete last line.

        Write the head if the file has no complete line.

        Raises:
            BadInputError: the file has another head, or a line without a step.
        """
        data = self._file.read()
        end = data.rfind(b"\n") + 1  # An incomplete line is written again.
        at = len(head)
        if end and data[:at] != head:
            raise BadInputError(f"the file {path} does not begin as a metrics file of this format: give another")
        for line in data[at:end].splitlines(keepends=True) if end else ():
            try:
                step = step_of(line)
            except (ValueError, *MALFORMED):
                raise BadInputError(f"the file {path} has a line without a step: give another") from None
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
    """Return a file of one JSON object per step: `step`, `time`, `loss`, `grad_norm`, `samples`, and `metrics` by name.

    An existing file is continued.

    Raises:
        BadInputError: the file cannot be written, or has another format.
    """

    def line(event: StepCommitted) -> bytes:
        known = {"step": event.step, "time": event.time, "loss": event.loss, "grad_norm": event.grad_norm}
        return msgspec.json.encode({**known, "samples": event.samples, "metrics": event.metrics}) + b"\n"

    def amended(text: bytes, time: float, values: Values) -> bytes:
        """Return the line of a step with these metrics replaced or added."""
        row = msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.json.encode({**row, "metrics": {**row.get("metrics", {}), **values}}) + b"\n"

    return LineFile(path, line, amended, lambda text: msgspec.json.decode(text, type=_Row).step)


def csv_file(path: Path) -> LineFile:
    """Return a CSV file with one line for each value of a step: step, time, name, value.

    A value that is not finite is left empty. An existing file is continued.

    Raises:
        BadInputError: the file cannot be written, or has another format.
    """

    def line(row: tuple[object, ...]) -> str:
        """Return one CSV line. Line breaks in a name become spaces."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["" if value is None else value for value in row])
        return text.getvalue().replace("\n", " ").rstrip() + "\n"  # A name may contain line breaks.

    def lines(event: StepCommitted) -> bytes:
        return "".join(line((event.step, event.time, *pair)) for pair in values_of(event)).encode()

    def amended(text: bytes, time: float, values: Values) -> bytes:
        """Replace the lines of these names, and add those of new names."""
        old = text.decode().splitlines(keepends=True)
        step, replaced = step_of(text), {line((name,)) for name in values}
        stay = [one for one in old if line((next(csv.reader([one]))[2],)) not in replaced]
        return "".join([*stay, *(line((step, time, *pair)) for pair in values.items())]).encode()

    def step_of(text: bytes) -> int:
        return int(text.partition(b",")[0])

    return LineFile(path, lines, amended, step_of, head=line(_CSV_HEAD).encode())


class TensorBoardRows:
    """A folder of TensorBoard event files. Rows are removed by TensorBoard's own purge of restarted runs."""

    def __init__(self, folder: Path) -> None:
        """Start a new file in the folder.

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
        #: The newest step of this file. None if the file is empty; the folder may have other files.
        self._last: int | None = None

    def cut(self, step: int) -> None:
        """Make TensorBoard hide the rows of this step and of later ones, also in earlier files.

        Do nothing if this file has only earlier steps.
        """
        if self._last is not None and self._last < step:
            return
        begun = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step, session_log=begun))
        self._last = step - 1

    def add(self, event: StepCommitted) -> None:
        """Add the values of a step."""
        self._write_values(event.step, event.time, dict(values_of(event)))
        self._last = event.step

    def amend(self, step: int, time: float, values: Values) -> None:
        """Add values to a step of this file or an earlier one."""
        if self._last is None or step <= self._last:
            self._write_values(step, time, values)

    def _write_values(self, step: int, time: float, values: Values) -> None:
        """Write the values of a step as one event at unix time `time`. None is left out."""
        told = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        summary = self._summaries.Summary(value=told)
        self._writer.add_event(self._events.Event(step=step, wall_time=time, summary=summary))

    def close(self) -> None:
        """Write all pending rows, and close."""
        self._writer.close()


#: The formats of metrics files, by name.
FORMATS: dict[str, Callable[[Path], Rows]] = {"jsonl": json_lines, "csv": csv_file, "tensorboard": TensorBoardRows}


def writer_for(path: Path) -> MetricWriter:
    """Return a writer for the format of a path's suffix: .jsonl, .csv, or none for a TensorBoard folder.

    Raises:
        BadInputError: the suffix is unknown, or the file cannot be opened in this format.
    """
    name = path.suffix.removeprefix(".") or "tensorboard"
    if name not in FORMATS:
        raise BadInputError(
            f"the file {path} has an unknown suffix: use .jsonl or .csv, or a folder without a suffix for TensorBoard"
        )
    return MetricWriter(FORMATS[name](path))
