"""What all events have in common (the contract: `protocol.events`)."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all events carry."""

    time: float
    job: str
    term: int
    generation: int
    seq: int = 0
