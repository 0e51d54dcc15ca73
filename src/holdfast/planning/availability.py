"""When nodes come and go: a recorded availability trace, read and checked, and the part of it that a job lives through.

A trace is CSV with the header `seconds,event,node`; the events are `add` and `remove`, seconds count from its start and
never decrease. Who can do something with it also reads `fault`: a process fails on a node that lives.
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
    """One row: a node comes (`add`) or goes, or has a `fault` and stays. `line` is where it stands in the file."""

    seconds: float
    add: bool
    node: str
    line: int
    fault: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What happens at one moment, in the rows' order; `seconds` since the window's begin."""

    seconds: float
    events: tuple[NodeEvent, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of a trace that a job lives through, `seconds` long: the nodes at its begin, and what follows."""

    start_nodes: tuple[str, ...]
    batches: tuple[Batch, ...]
    seconds: float

    @property
    def names(self) -> frozenset[str]:
        """All nodes that ever are there."""
        return frozenset(self.start_nodes) | {event.node for batch in self.batches for event in batch.events}


def parse_trace(text: str, *, faults: bool = False) -> tuple[NodeEvent, ...]:
    """Read a trace; `faults`: one that may have such rows.

    Raises:
        BadInputError: with the line and the rule that it breaks.
    """
    rows = csv.reader(text.removeprefix("\ufeff").splitlines())
    try:
        return _parsed(rows, ("add", "remove", "fault") if faults else ("add", "remove"))
    except csv.Error as error:
        raise _broken(rows.line_num, f"it is not CSV: {error}") from None


def _parsed(rows: Any, known: Sequence[str]) -> tuple[NodeEvent, ...]:
    header = next(rows, list[str]())
    if tuple(field.strip() for field in header) != HEADER:
        raise BadInputError(f"line 1: the header is {','.join(header)!r}: it must be {','.join(HEADER)!r}")
    events: list[NodeEvent] = []
    present: set[str] = set()
    for row in rows:
        if not row:
            continue
        event = _event([field.strip() for field in row], rows.line_num, known)
        if events and event.seconds < events[-1].seconds:
            raise _broken(event.line, f"{event.seconds:g} s come after {events[-1].seconds:g} s: sort by time")
        _come_or_go(event, present)
        events.append(event)
    if not events:
        raise BadInputError("there is no event below the header: a trace needs at least one node")
    return tuple(events)


def window_of(events: Sequence[NodeEvent], *, begin: float = 0.0, end: float | None = None) -> Window:
    """Return the part of a trace from `begin` up to and with `end` (by default its last event), in its seconds.

    Raises:
        BadInputError: no node is there at the begin, or the end comes before it.
    """
    last = events[-1].seconds if end is None else end
    if last < begin:
        raise BadInputError(f"it would end at {last:g} s, before it begins at {begin:g} s")
    present: dict[str, None] = {}  # in the order in which they came
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


def _event(row: Sequence[str], line: int, known: Sequence[str]) -> NodeEvent:
    if len(row) != len(HEADER):
        raise _broken(line, f"there are {len(row)} fields: it must be {len(HEADER)}, {','.join(HEADER)}")
    seconds = _seconds(row[0], line)
    if row[1] not in known:
        raise _broken(line, f"the event is {row[1]!r}: it must be {', '.join(known[:-1])} or {known[-1]}")
    if not _NAME.fullmatch(row[2]):
        raise _broken(line, f"the node is {row[2]!r}: use letters, digits, dots, dashes, at most 64")
    return NodeEvent(seconds=seconds, add=row[1] == "add", node=row[2], line=line, fault=row[1] == "fault")


def _seconds(text: str, line: int) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise _broken(line, f"seconds is {text!r}: it must be a number") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _broken(line, f"seconds is {text}: it must be finite, and 0 or more")
    return seconds


def _come_or_go(event: NodeEvent, present: set[str]) -> None:
    if event.fault:
        if event.node not in present:
            raise _broken(event.line, f"{event.node} has a fault, but it is not there: add it before")
        return
    if event.add and event.node in present:
        raise _broken(event.line, f"{event.node} is added, but it is there already: remove it before")
    if not event.add and event.node not in present:
        raise _broken(event.line, f"{event.node} is removed, but it is not there: only a node that was added can go")
    (present.add if event.add else present.remove)(event.node)


def _broken(line: int, why: str) -> BadInputError:
    return BadInputError(f"line {line}: {why}")
