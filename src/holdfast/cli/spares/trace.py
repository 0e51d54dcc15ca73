"""Reads traces of failures and repairs from CSV, plain or gzipped, in three layouts."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holdfast.documents import open_given
from holdfast.errors import BadInputError
from holdfast.reliability.traces.trace import FailureTrace, merged

LAYOUTS = (
    "`start_s,end_s,node` (one line per failure), `seconds,event,node` with event add or remove (one line per change), "
    "or `start_s_since_1996,system,node,system_nodes,repair_min` (one line per failure, several systems)"
)

Row = dict[str, str]
#: Characters of a header that are shown.
_MOST_SHOWN = 200


@dataclass(slots=True)
class _Failures:
    """Columns while they are read."""

    node: list[str] = field(default_factory=list[str])
    start_s: list[float] = field(default_factory=list[float])
    end_s: list[float] = field(default_factory=list[float])
    line: list[int] = field(default_factory=list[int])
    #: machines the file itself tells of
    nodes: int = 0
    #: when observation begins and the last thing happens
    begin_s: float = 0.0
    last_s: float = 0.0

    def add(self, node: str, start_s: float, end_s: float, line: int) -> None:
        self.node.append(node)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.line.append(line)


def read_trace(
    path: Path, *, nodes: int | None, hours: float | None, system: int | None, merge_overlaps: bool
) -> FailureTrace:
    """Read a trace.

    Args:
        path: the CSV file; `.gz` is unpacked.
        nodes: machines observed; by default what the file tells (nodes added at the start, `system_nodes`).
        hours: length of the observation; by default up to the last failure or repair.
        system: which system of a file that holds several.
        merge_overlaps: join overlapping outages of one node instead of refusing them; sorts, too.

    Raises:
        BadInputError: naming the line and the rule.
    """
    try:
        failures = _read(path, system)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    if nodes is None and failures.nodes == 0:
        raise BadInputError(f"{path}: does not say how many nodes were observed: give --nodes")
    codes = np.unique(np.array(failures.node), return_inverse=True)[1].astype(np.int64)
    start = (np.array(failures.start_s, dtype=np.float64) - failures.begin_s) / 3600.0
    end = (np.array(failures.end_s, dtype=np.float64) - failures.begin_s) / 3600.0
    last = max(failures.last_s - failures.begin_s, 1e-9) / 3600.0
    span = last if hours is None else hours
    ended = np.isfinite(end) & (end <= span)
    end = np.where(np.isfinite(end), end, span)
    columns = (codes, start, end, ended, np.array(failures.line, dtype=np.int64))
    codes, start, end, ended, line = merged(*columns) if merge_overlaps else columns
    try:
        return FailureTrace(
            nodes=failures.nodes if nodes is None else nodes,
            span_hours=span,
            node=codes,
            start_hours=start,
            end_hours=end,
            ended=ended,
            line=line,
        )
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _read(path: Path, system: int | None) -> _Failures:
    try:
        with open_given(path) as file:
            raw = file.read()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot be read: {error}") from error
    rows = csv.DictReader(io.StringIO(text))
    try:
        return _failures(rows, system)
    except csv.Error as error:
        raise BadInputError(f"trace, line {rows.line_num + 1}: not CSV ({error})") from None


def _failures(rows: csv.DictReader[str], system: int | None) -> _Failures:
    columns = set(rows.fieldnames or ())
    if system is not None and "system" not in columns:
        raise BadInputError("--system was given, but the file has no column system")
    if {"start_s", "end_s", "node"} <= columns:
        return _outages(rows)
    if {"seconds", "event", "node"} <= columns:
        return _events(rows)
    if {"start_s_since_1996", "system", "node", "system_nodes", "repair_min"} <= columns:
        return _systems(rows, system)
    named = ", ".join(sorted(columns))
    named = named if len(named) <= _MOST_SHOWN else named[:_MOST_SHOWN] + "..."
    raise BadInputError(f"has the columns {named or 'none'}; needed are {LAYOUTS}")


def _whole(rows: csv.DictReader[str]) -> Iterator[Row]:
    """Yield the rows, each of which must have as many cells as the header."""
    columns = len(rows.fieldnames or ())
    for row in rows:
        cells = sum(cell is not None for cell in row.values())  # (what is too much comes as a list, under None)
        if cells != columns:
            wrong = "more" if cells > columns else f"{cells}"
            raise BadInputError(f"trace, line {rows.line_num}: has {wrong} cells where the header has {columns}")
        yield row


def _outages(rows: csv.DictReader[str]) -> _Failures:
    failures = _Failures()
    for row in _whole(rows):
        failures.add(row["node"], _value(rows, row, "start_s"), _value(rows, row, "end_s"), rows.line_num)
    failures.last_s = max(failures.end_s, default=0.0)
    return failures


def _events(rows: csv.DictReader[str]) -> _Failures:
    failures = _Failures()
    down: dict[str, int] = {}
    up: set[str] = set()
    for row in _whole(rows):
        node, at, event = row["node"], _value(rows, row, "seconds"), row["event"]
        if at < failures.last_s:
            raise BadInputError(f"trace, line {rows.line_num}: seconds = {at:g} is before the line above it: sort them")
        failures.last_s = at
        if event == "remove" and node in up:
            up.remove(node)
            down[node] = len(failures.line)
            failures.add(node, at, math.inf, rows.line_num)
        elif event == "add" and node not in up:
            up.add(node)
            if node in down:
                failures.end_s[down.pop(node)] = at
        else:
            rule = 'must be "add" or "remove"' if event not in ("add", "remove") else "does not change the node's state"
            raise BadInputError(f"trace, line {rows.line_num}: event = {event!r} of node {node} {rule}")
    failures.nodes = len(up) + len(down)
    return failures


def _systems(rows: csv.DictReader[str], system: int | None) -> _Failures:
    failures = _Failures()
    seen: set[str] = set()
    for row in _whole(rows):
        seen.add(row["system"])
        if system is None and len(seen) > 1:
            raise BadInputError("holds several systems: choose one with --system")
        if system is not None and row["system"] != str(system):
            continue
        start = _value(rows, row, "start_s_since_1996")
        failures.add(row["node"], start, start + 60.0 * _value(rows, row, "repair_min"), rows.line_num)
        failures.nodes = int(_value(rows, row, "system_nodes"))
    if not failures.line:
        raise BadInputError(f"has no system {system}; it has {', '.join(sorted(seen, key=lambda name: name.zfill(9)))}")
    # Nothing tells when a system went into service: its first failure is the nearest to that.
    failures.begin_s, failures.last_s = min(failures.start_s), max(failures.end_s)
    return failures


def _value(rows: csv.DictReader[str], row: Row, key: str) -> float:
    try:
        value = float(row[key])
    except ValueError:
        raise BadInputError(f"trace, line {rows.line_num}: {key} = {row[key]!r} must be a number") from None
    if not math.isfinite(value):
        raise BadInputError(f"trace, line {rows.line_num}: {key} = {row[key]} must be finite")
    return value
