"""The base class of events (see `protocol.events`)."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all events."""

    time: float
    job: str
    term: int
    generation: int
    seq: int = 0
