"""Decode events from JSON lines, including events that a newer version wrote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.documents import open_given
from holdfast.errors import BadInputError, HoldfastError
from holdfast.protocol.events import EVENTS, AnyEvent, OtherEvent, ReadEvent
from holdfast.protocol.names import MALFORMED

_DECODER = msgspec.json.Decoder(AnyEvent)


class _Head(msgspec.Struct, kw_only=True):
    """The fields that every event has."""

    event: str
    time: float
    job: str = ""
    term: int = 0
    generation: int = 0
    seq: int = 0


_HEAD = msgspec.json.Decoder(_Head)
#: Bytes to read from the end of a file to find its last complete event.
_TAIL_BYTES = 1 << 20


class NoEventError(HoldfastError):
    """A line is not an event. The message gives the reason."""


def decode_event(line: bytes | str) -> ReadEvent:
    """Decode one line. Unknown fields of known events are dropped; an unknown event keeps all its fields.

    Raises:
        NoEventError: the line is not an event, or a known event lacks a field.
    """
    try:
        return _DECODER.decode(line)
    except MALFORMED as error:
        return _other(line, str(error))


def _other(line: bytes | str, why: str) -> OtherEvent:
    """Return a line that is not a known, complete event as an `OtherEvent` with all its fields.

    Args:
        why: why it could not be decoded as a known event.

    Raises:
        NoEventError: the line lacks the common fields of events, or it has the name of a known event.
    """
    try:
        head = _HEAD.decode(line)
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED as error:
        raise NoEventError(str(error)) from None
    if head.event in EVENTS:
        raise NoEventError(f"{head.event}: {why}")
    return OtherEvent(
        event=head.event,
        time=head.time,
        job=head.job,
        term=head.term,
        generation=head.generation,
        seq=head.seq,
        fields=fields,
    )


def last_number(path: Path) -> int:
    """Return the highest event number in the last `_TAIL_BYTES` of a file; 0 without one, or if it cannot be read."""
    last = 0
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        for line in file.read().split(b"\n")[:-1]:
            with contextlib.suppress(*MALFORMED):
                last = max(last, _HEAD.decode(line).seq)
    return last


def read_events(path: Path, warn: Callable[[str], None] = lambda _: None) -> list[ReadEvent]:
    """Read an event file. An incomplete last line is left out.

    Args:
        warn: called with a sentence if the last line is incomplete.

    Raises:
        BadInputError: the file cannot be read, has no event, or has a line that is not an event.
    """
    try:
        with open_given(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be read as an event file: {error.strerror}; give the file that --events wrote"
        ) from None
    events: list[ReadEvent] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            events.append(decode_event(line))
        except NoEventError as error:
            raise BadInputError(
                f"{path}, line {number} is not an event ({error}): give the file that --events wrote"
            ) from None
    if not events:
        raise BadInputError(f"{path} contains no event yet")
    if lines[-1]:
        warn(f"{path}, line {len(lines)} is left out: it is incomplete (its writer is still writing it, or was killed)")
    return events
