"""What a mutant is: one wrong line, and why it must not pass unnoticed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One wrong line. `quick`: a few schedules catch it. `equivalent`: why it is none, where nothing can catch it."""

    name: str
    file: str
    old: str
    new: str
    why: str
    quick: bool = False
    equivalent: str = ""
