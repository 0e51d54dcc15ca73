"""Virtual time: events ordered by (time, priority, sequence), so that all runs resolve ties in the same way."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

FIRST = -1
URGENT = 0
NORMAL = 1


class Timeline:
    """A queue of future actions, and the clock that they advance. It is a `holdfast.clock.Clock`."""

    def __init__(self, start: float = 0.0) -> None:
        """Create an empty queue whose clock shows `start` seconds."""
        self.now = start
        self._queue: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = count()

    def monotonic(self) -> float:
        """Return virtual seconds."""
        return self.now

    def time(self) -> float:
        """Return virtual seconds, as unix time."""
        return self.now

    def after(self, delay: float, action: Callable[..., object], *args: Any) -> None:
        """Schedule an action `delay` seconds from now."""
        heappush(self._queue, (self.now + delay, NORMAL, next(self._sequence), action, args))

    def at(self, time: float, action: Callable[..., object], *args: Any, priority: int = NORMAL) -> None:
        """Schedule an action at `time`, or now if that is past."""
        heappush(self._queue, (max(time, self.now), priority, next(self._sequence), action, args))

    def step(self) -> bool:
        """Advance the clock to the next action, and run it. Return False if the queue is empty, else True."""
        if not self._queue:
            return False
        self.now, _, _, action, args = heappop(self._queue)
        action(*args)
        return True
