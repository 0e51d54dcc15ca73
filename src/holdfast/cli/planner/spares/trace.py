"""Reads traces of failures and repairs from CSV, plain or gzipped, in three layouts."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from holdfast.documents import open_given
from holdfast.errors import BadInputError
from holdfast.planner.reliability.traces.trace import FailureTrace, merged
from holdfast.planning.special import IntArray

LAYOUTS = (
    "`start_s,end_s,node` (one line per failure), `seconds,event,node` with event add or remove (one line per change), "
    "or `start_s_since_1996,system,node,system_nodes,repair_min` (one line per failure, several systems)"
)

#: Keys that `--map` names columns for.
MAP_KEYS = ("start", "end", "node", "rack", "scope")
#: Larger numbers are seconds since 1970: 1980 and later.
_UNIX_FROM_S = 315_532_800.0
#: Larger numbers are not seconds since 1970: the year 5138. Milliseconds are larger from 1973 on.
_MOST_S = 1e11
#: What `start_s_since_1996` counts from.
_UNIX_1996_S = 820_454_400.0
#: Values of a mapped scope: the failure is one of a whole rack, or of a node.
_SCOPES = ("rack", "node")

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
    #: the rack of each node, if the file has racks
    rack_of: dict[str, str] = field(default_factory=dict[str, str])
    #: lines of failures of whole racks
    rack_lines: set[int] = field(default_factory=set[int])
    #: when the observation begins, and when the last event happens; None before there is one
    begin_s: float | None = None
    last_s: float = 0.0
    #: add to the file's seconds for unix seconds
    unix_offset_s: float = 0.0

    def add(self, node: str, start_s: float, end_s: float, line: int) -> None:
        """Add a failure from start to end, in seconds by the file's clock; `line`: of the file."""
        self.node.append(node)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.line.append(line)


def read_trace(
    path: Path,
    *,
    nodes: int | None,
    hours: float | None,
    system: int | None,
    merge_overlaps: bool,
    columns: Sequence[str] = (),
    since: str | None = None,
) -> FailureTrace:
    """Read a trace.

    Args:
        path: the CSV file; `.gz` is unpacked.
        nodes: machines observed; by default from the file (nodes added at the start, `system_nodes`).
        hours: length of the observation; by default up to the last failure or repair.
        system: which system of a file that holds several.
        merge_overlaps: join overlapping outages of one node instead of refusing them; sorts, too.
        columns: `KEY=COLUMN` for columns that have other names.
        since: when the observation began, a date or seconds by the file's clock; by default the first event.

    Raises:
        BadInputError: naming the line and the rule.
    """
    try:
        failures = _read(path, system, _mapped(columns))
        begin_s = _find_start(failures, since)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    if nodes is None and failures.nodes == 0:
        raise BadInputError(f"{path}: does not say how many nodes were observed: give --nodes")
    names, codes = np.unique(np.array(failures.node), return_inverse=True)
    codes = codes.astype(np.int64)
    start = (np.array(failures.start_s, dtype=np.float64) - begin_s) / 3600.0
    end = (np.array(failures.end_s, dtype=np.float64) - begin_s) / 3600.0
    last = max(failures.last_s - begin_s, 1e-9) / 3600.0
    span = last if hours is None else hours
    ended = np.isfinite(end) & (end <= span)
    end = np.where(np.isfinite(end), end, span)
    arrays = (codes, start, end, ended, np.array(failures.line, dtype=np.int64))
    codes, start, end, ended, line = merged(*arrays) if merge_overlaps else arrays
    try:
        return FailureTrace(
            nodes=failures.nodes if nodes is None else nodes,
            span_hours=span,
            node=codes,
            start_hours=start,
            end_hours=end,
            ended=ended,
            line=line,
            rack_of=_rack_codes(failures, [str(name) for name in names]),
            rack_lines=frozenset(failures.rack_lines),
            began_unix_s=_unix(begin_s, failures.unix_offset_s),
        )
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _mapped(columns: Sequence[str]) -> dict[str, str]:
    """Return the columns of `--map`, by key.

    Raises:
        BadInputError: one is not KEY=COLUMN with a known key, or a key is given twice.
    """
    found: dict[str, str] = {}
    for given in columns:
        key, equals, column = given.partition("=")
        if not equals or not column or key not in MAP_KEYS:
            raise BadInputError(f"--map {given}: must be KEY=COLUMN, with a key of {', '.join(MAP_KEYS)}")
        if key in found:
            raise BadInputError(f"--map {given}: {key} is mapped to {found[key]} already")
        found[key] = column
    return found


def _find_start(failures: _Failures, since: str | None) -> float:
    """Return when the observation begins, by the file's clock: `since`, the first add event, or the first failure.

    Raises:
        BadInputError: `since` is neither date nor number, is a date for a clock without dates, or is after the first
            failure.
    """
    first = min(failures.start_s, default=0.0)
    if since is None:
        return first if failures.begin_s is None else failures.begin_s
    try:
        begin_s = float(since)
    except ValueError:
        try:
            begin_s = _date(since) - failures.unix_offset_s
        except ValueError:
            raise BadInputError(f"--from {since}: must be a date such as 2025-01-31, or seconds") from None
        if failures.unix_offset_s == 0.0 and first < _UNIX_FROM_S:
            raise BadInputError(
                f"--from {since}: the log's times are not dates: give the seconds by its clock"
            ) from None
    if not begin_s <= first:
        at = f"{first:.15g} s by the log's clock"
        if (unix_s := first + failures.unix_offset_s) >= _UNIX_FROM_S:
            at = f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ} ({at})"
        raise BadInputError(f"--from {since}: is after the first failure, at {at}")
    return begin_s


def _date(text: str) -> float:
    """Return a date in ISO format as unix seconds; without a zone it is UTC.

    Raises:
        ValueError: it is not such a date.
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _unix(begin_s: float, offset_s: float) -> float | None:
    return begin_s + offset_s if offset_s or begin_s >= _UNIX_FROM_S else None


def _rack_codes(failures: _Failures, names: Sequence[str]) -> IntArray:
    """Return the number of each node's rack (N,), by the sorted names; empty if the file has no racks."""
    if not failures.rack_of:
        return np.empty(0, dtype=np.int64)
    racks = [failures.rack_of[name] for name in names]
    return np.unique(np.array(racks), return_inverse=True)[1].astype(np.int64)


def _read(path: Path, system: int | None, mapped: dict[str, str]) -> _Failures:
    """Return the failures in a CSV file, which is unpacked if it ends in .gz.

    Raises:
        BadInputError: the file cannot be read, is not text or CSV, or breaks a rule of traces.
    """
    try:
        with open_given(path) as file:
            raw = file.read()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot be read: {error}") from error
    rows = csv.DictReader(io.StringIO(text))
    try:
        return _failures(rows, system, mapped)
    except csv.Error as error:
        raise BadInputError(f"trace, line {rows.line_num + 1}: not CSV ({error})") from None


def _failures(rows: csv.DictReader[str], system: int | None, mapped: dict[str, str]) -> _Failures:
    """Return the failures of a file in one of the known layouts, which its columns decide.

    Raises:
        BadInputError: no layout fits, or --map or --system does not.
    """
    columns = set(rows.fieldnames or ())
    for key, column in mapped.items():
        if column not in columns:
            raise BadInputError(f"--map {key}={column}: the file has no column {column}")
    names = {"start": "start_s", "end": "end_s", "node": "node", **mapped}
    if system is not None and "system" not in columns:
        raise BadInputError("--system was given, but the file has no column system")
    if {names["start"], names["end"], names["node"]} <= columns:
        return _read_outages(rows, {**({"rack": "rack"} if "rack" in columns else {}), **names})
    if mapped:
        raise BadInputError("--map: is for files with one line per failure; name the columns of start, end and node")
    if {"seconds", "event", "node"} <= columns:
        return _read_add_remove_events(rows)
    if {"start_s_since_1996", "system", "node", "system_nodes", "repair_min"} <= columns:
        return _read_system_log(rows, system)
    named = ", ".join(sorted(columns))
    named = named if len(named) <= _MOST_SHOWN else named[:_MOST_SHOWN] + "..."
    raise BadInputError(f"has the columns {named or 'none'}; needed are {LAYOUTS}")


def _full_rows(rows: csv.DictReader[str]) -> Iterator[Row]:
    """Yield the rows.

    Raises:
        BadInputError: a row has fewer or more cells than the header.
    """
    columns = len(rows.fieldnames or ())
    for row in rows:
        cells = sum(cell is not None for cell in row.values())  # Surplus cells come as a list, under None.
        if cells != columns:
            wrong = "more" if cells > columns else f"{cells}"
            raise BadInputError(f"trace, line {rows.line_num}: has {wrong} cells where the header has {columns}")
        yield row


def _read_outages(rows: csv.DictReader[str], names: Mapping[str, str]) -> _Failures:
    """Return the failures of a file with one failure per line: start, end (may be empty), node, and optional rack and
    scope.

    Args:
        names: the file's column for each of these keys.

    Raises:
        BadInputError: a cell cannot be used, or a node is in two racks.
    """
    failures = _Failures()
    for row in _full_rows(rows):
        node, open_ = row[names["node"]], not row[names["end"]].strip()
        start_s = _time(rows, row, names["start"])
        failures.add(node, start_s, math.inf if open_ else _time(rows, row, names["end"]), rows.line_num)
        if "rack" in names:
            known = failures.rack_of.setdefault(node, row[names["rack"]])
            if known != row[names["rack"]]:
                raise BadInputError(f"trace, line {rows.line_num}: node {node} was in rack {known} before")
        if "scope" in names:
            scope = row[names["scope"]]
            if scope not in _SCOPES:
                rule = f"must be {' or '.join(_SCOPES)}"
                raise BadInputError(f"trace, line {rows.line_num}: {names['scope']} = {scope!r} {rule}")
            if scope == "rack":
                failures.rack_lines.add(rows.line_num)
    ends = [end_s for end_s in failures.end_s if math.isfinite(end_s)]
    failures.last_s = max((*failures.start_s, *ends), default=0.0)
    return failures


def _read_add_remove_events(rows: csv.DictReader[str]) -> _Failures:
    """Return the failures in "add" and "remove" events: each lasts from a node's removal to its next add.

    Raises:
        BadInputError: the events are not in order of time, or one does not change the node's state.
    """
    failures = _Failures()
    down: dict[str, int] = {}
    up: set[str] = set()
    for row in _full_rows(rows):
        node, at, event = row["node"], _value(rows, row, "seconds"), row["event"]
        if failures.begin_s is None:
            failures.begin_s = failures.last_s = at
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


def _read_system_log(rows: csv.DictReader[str], system: int | None) -> _Failures:
    """Return the failures of one system in a file with one failure per line and the column `start_s_since_1996`.

    Args:
        system: the chosen one; None for the only one in the file.

    Raises:
        BadInputError: there are several systems and none is chosen, or the chosen one does not occur.
    """
    failures = _Failures(unix_offset_s=_UNIX_1996_S)
    seen: set[str] = set()
    for row in _full_rows(rows):
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
    failures.last_s = max(failures.end_s)
    return failures


def _time(rows: csv.DictReader[str], row: Row, key: str) -> float:
    """Return a time of a cell: a number of seconds, or an ISO date as unix seconds.

    Raises:
        BadInputError: it is neither; the message has the line.
    """
    try:
        return _value(rows, row, key)
    except BadInputError as error:
        try:
            return _date(row[key])
        except ValueError:
            raise error from None


def _value(rows: csv.DictReader[str], row: Row, key: str) -> float:
    """Return the finite number of a cell. Raises `BadInputError` with the line, also if it is too large for seconds."""
    try:
        value = float(row[key])
    except ValueError:
        raise BadInputError(f"trace, line {rows.line_num}: {key} = {row[key]!r} must be a number") from None
    if not math.isfinite(value):
        raise BadInputError(f"trace, line {rows.line_num}: {key} = {row[key]} must be finite")
    if abs(value) > _MOST_S:
        raise BadInputError(f"trace, line {rows.line_num}: {key} = {row[key]} is too large for seconds: milliseconds?")
    return value
