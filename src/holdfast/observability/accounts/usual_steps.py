"""Usual step times by world size, to which costs of recoveries and losses are compared."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

#: A step longer than this multiple of the usual step is late (Unicron, section 4.1 and Figure 6).
LATE = 1.1
#: A step longer than this multiple counts as a failure.
FAILED = 3.0
#: Number of steps in the median. It is limited because the usual step changes with the data, e.g. longer sequences.
WINDOW = 64
#: Minimum number of steps for a usual step: the first steps of a world compile, allocate and connect.
LEAST = 3


class RunningMedian:
    """The median of the newest `WINDOW` values."""

    def __init__(self) -> None:
        self._ordered: list[float] = []
        self._newest: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Add a value. Remove the oldest value if the window is full."""
        if len(self._newest) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(value)
        insort(self._ordered, value)

    @property
    def value(self) -> float:
        """The median, or the upper median of an even number of values. Needs at least one value."""
        return self._ordered[len(self._ordered) // 2]


class UsualSteps:
    """Medians of undisturbed steps, in seconds, by the world's size."""

    def __init__(self) -> None:
        self._of: dict[int, RunningMedian] = {}
        #: The largest world with a usual step; 0 before the first one.
        self.full_world = 0

    def note(self, world: int, seconds: float) -> None:
        """Record an undisturbed step of `world` workers. With `LEAST` steps, a larger world becomes the full job."""
        median = self._of.setdefault(world, RunningMedian())
        median.add(seconds)
        if len(median) >= LEAST:
            self.full_world = max(self.full_world, world)

    @property
    def full(self) -> float | None:
        """The usual step of the full job, which is the largest known world; None if no world is known."""
        return self._of[self.full_world].value if self.full_world else None

    def of(self, world: int) -> float | None:
        """Return the usual step of `world` workers, in seconds.

        With fewer than `LEAST` steps of this world, scale the step of the full job by the number of workers. None if
        that is unknown, too.
        """
        known = self._of.get(world)
        if known is not None and len(known) >= LEAST:
            return known.value
        full = self.full
        return None if full is None else full * self.full_world / max(world, 1)
