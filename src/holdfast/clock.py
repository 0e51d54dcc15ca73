"""Time as a dependency: shells are given a clock, and nothing below a shell reads one."""

from __future__ import annotations

import math
import time
from typing import Protocol

#: how far apart the marks of all clocks are, in seconds
MARK_S = 0.05


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


def until_mark(now: float, within_s: float) -> float:
    """Return how long to wait so that the wait ends at a mark of the clock: at most `within_s`, at least `MARK_S` less.

    Periodic actions of thousands of processes then happen at the same time, as often as before. The receiver wakes up
    once for many of them, and waking up is most of the cost of a heartbeat. Shorter periods are left unchanged.
    """
    if within_s < 2 * MARK_S:
        return within_s
    return min(within_s, math.floor((now + within_s) / MARK_S) * MARK_S - now)


class ShiftedClock:
    """A clock with a shifted wall time, for fault injection."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.monotonic = clock.monotonic
        self._clock, self._seconds = clock, seconds

    def time(self) -> float:
        return self._clock.time() + self._seconds
