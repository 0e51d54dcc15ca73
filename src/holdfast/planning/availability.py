"""Recorded availability traces: when nodes join and leave. Parses and checks a trace and selects a window of it.

A trace is CSV with the header `seconds,event,node`. Seconds count from the start of the trace and never decrease. The
events are `add` and `remove`. Callers that support it also accept `fault`: a process fails on a live node.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from holdfast.errors import BadInputError

HEADER = ("seconds", "event", "node")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEvent:
    """One row of a trace."""

    #: Seconds since the start of the trace.
    seconds: float
    #: Whether the node joins. If False, it leaves or has a fault.
    add: bool
    node: str
    #: The row's line in the file, for messages.
    line: int
    #: A process fails, and the node stays.
    fault: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """All events of one moment, in the order of their rows."""

    #: Seconds since the start of the window.
    seconds: float
    events: tuple[NodeEvent, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of a trace during which a job runs."""

    #: The nodes present at the start.
    start_nodes: tuple[str, ...]
    #: The later events.
    batches: tuple[Batch, ...]
    #: The length of the window.
    seconds: float

    @property
    def names(self) -> frozenset[str]:
        """All nodes that are present at any time in the window."""
        return frozenset(self.start_nodes) | {event.node for batch in self.batches for event in batch.events}


def parse_trace(text: str, *, faults: bool = False) -> tuple[NodeEvent, ...]:
    """Return the events of a trace, after checking it.

    Args:
        text: The CSV text.
        faults: Whether `fault` events are allowed.

    Raises:
        BadInputError: A line breaks a rule (the message names the line and the rule), or there are no events.
    """
    rows = csv.reader(text.removeprefix("\ufeff").splitlines())
    try:
        return _parse_rows(rows, ("add", "remove", "fault") if faults else ("add", "remove"))
    except csv.Error as error:
        raise _line_error(rows.line_num, f"it is not CSV: {error}") from None


def _parse_rows(rows: Any, known: Sequence[str]) -> tuple[NodeEvent, ...]:
    """Return the events of a trace's CSV rows, of the kinds in `known`. Blank lines are skipped.

    Raises `BadInputError` if the header is wrong, a row is malformed, times decrease, an event does not fit the nodes
    that are present, or there are no events.
    """
    header = next(rows, list[str]())
    if tuple(field.strip() for field in header) != HEADER:
        raise BadInputError(f"line 1: the header is {','.join(header)!r}: it must be {','.join(HEADER)!r}")
    events: list[NodeEvent] = []
    present: set[str] = set()
    for row in rows:
        if not row:
            continue
        event = _parse_event([field.strip() for field in row], rows.line_num, known)
        if events and event.seconds < events[-1].seconds:
            raise _line_error(event.line, f"{event.seconds:g} s come after {events[-1].seconds:g} s: sort by time")
        _apply_event(event, present)
        events.append(event)
    if not events:
        raise BadInputError("the trace has only a header: give at least one event that adds a node")
    return tuple(events)


def select_window(events: Sequence[NodeEvent], *, begin: float = 0.0, end: float | None = None) -> Window:
    """Return the part of a trace after `begin` up to and including `end`, both in seconds of the trace.

    Times in the window count from `begin`. The trace must not have `fault` events.

    Args:
        events: The trace, in the order of time.
        begin: The start of the window. Events at this moment count as the state at the start.
        end: The end of the window; None for the last event.

    Raises:
        BadInputError: No node is present at the start, or the end is before the start.
    """
    last = events[-1].seconds if end is None else end
    if last < begin:
        raise BadInputError(f"it would end at {last:g} s, before it begins at {begin:g} s")
    present: dict[str, None] = {}  # in the order in which they joined
    for event in events:
        if event.seconds <= begin and event.add:
            present[event.node] = None
        elif event.seconds <= begin:
            del present[event.node]
    if not present:
        later = next((event.seconds for event in events if event.add and event.seconds > begin), None)
        remedy = "give another --from" if later is None else f"give --from {later:g}"
        raise BadInputError(f"no node is there at {begin:g} s: {remedy}")
    rest = [event for event in events if begin < event.seconds <= last]
    batches = tuple(
        Batch(seconds=seconds - begin, events=tuple(group)) for seconds, group in groupby(rest, lambda e: e.seconds)
    )
    return Window(start_nodes=tuple(present), batches=batches, seconds=last - begin)


def _parse_event(row: Sequence[str], line: int, known: Sequence[str]) -> NodeEvent:
    """Return the event in the fields of a row: seconds, the kind of event, and the node.

    Raises `BadInputError` for another number of fields, a time below 0, a kind not in `known`, or a bad node name.
    """
    if len(row) != len(HEADER):
        raise _line_error(line, f"there are {len(row)} fields: it must be {len(HEADER)}, {','.join(HEADER)}")
    seconds = _parse_seconds(row[0], line)
    if row[1] not in known:
        raise _line_error(line, f"the event is {row[1]!r}: it must be {', '.join(known[:-1])} or {known[-1]}")
    if not _NAME.fullmatch(row[2]):
        raise _line_error(line, f"the node is {row[2]!r}: use letters, digits, dots, dashes, at most 64")
    return NodeEvent(seconds=seconds, add=row[1] == "add", node=row[2], line=line, fault=row[1] == "fault")


def _parse_seconds(text: str, line: int) -> float:
    """Return the time; raise `BadInputError` with the line unless it is a finite number of at least 0."""
    try:
        seconds = float(text)
    except ValueError:
        raise _line_error(line, f"seconds is {text!r}: it must be a number") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _line_error(line, f"seconds is {text}: it must be finite, and 0 or more")
    return seconds


def _apply_event(event: NodeEvent, present: set[str]) -> None:
    """Add or remove the event's node in `present`; a fault changes nothing.

    Raises `BadInputError` if a present node is added, or an absent one is removed or has a fault.
    """
    if event.fault:
        if event.node not in present:
            raise _line_error(event.line, f"{event.node} has a fault, but it is not there: add it before")
        return
    if event.add and event.node in present:
        raise _line_error(event.line, f"{event.node} is added, but it is there already: remove it before")
    if not event.add and event.node not in present:
        raise _line_error(
            event.line, f"{event.node} is removed, but it is not there: only a node that was added can go"
        )
    (present.add if event.add else present.remove)(event.node)


def _line_error(line: int, why: str) -> BadInputError:
    return BadInputError(f"line {line}: {why}")
