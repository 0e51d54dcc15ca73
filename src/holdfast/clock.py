"""Time as a dependency: shells are given a clock, and nothing below a shell reads one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a shell asks for the time."""

    def monotonic(self) -> float:
        """Return seconds that never step back, for durations."""
        ...

    def time(self) -> float:
        """Return unix seconds, for people and for events."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


class ShiftedClock:
    """A clock whose wall time somebody has set to another one: fault injection."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.monotonic = clock.monotonic
        self._clock, self._seconds = clock, seconds

    def time(self) -> float:
        return self._clock.time() + self._seconds
