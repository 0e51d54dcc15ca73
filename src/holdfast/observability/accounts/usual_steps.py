"""How long a step usually takes, by how many workers share it: the yardstick for what recoveries and losses cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

#: more than this times the usual step is no fluctuation any more: late (Unicron, section 4.1 and Figure 6)
LATE = 1.1
#: and more than this is a failure
FAILED = 3.0
#: steps that the median is of; a job whose data change (longer sequences) changes its usual step
WINDOW = 64
#: with fewer nothing is known: the first steps of a world compile, allocate and connect
LEAST = 3


class RunningMedian:
    """The median of the newest `WINDOW` values."""

    def __init__(self) -> None:
        self._ordered: list[float] = []
        self._newest: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Take in a value; the oldest one goes where there are too many."""
        if len(self._newest) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(value)
        insort(self._ordered, value)

    @property
    def value(self) -> float:
        """The median; of an even number, the upper one of the two in the middle. There is a value."""
        return self._ordered[len(self._ordered) // 2]


class UsualSteps:
    """Medians of undisturbed steps, in seconds, by the world's size."""

    def __init__(self) -> None:
        self._of: dict[int, RunningMedian] = {}
        #: the largest world that is known, 0 for none
        self.full_world = 0

    def note(self, world: int, seconds: float) -> None:
        """An undisturbed step of so many workers took so long."""
        median = self._of.setdefault(world, RunningMedian())
        median.add(seconds)
        if len(median) >= LEAST:
            self.full_world = max(self.full_world, world)

    @property
    def full(self) -> float | None:
        """The full job's: that of the largest world which is known; None before one is."""
        return self._of[self.full_world].value if self.full_world else None

    def of(self, world: int) -> float | None:
        """Return a world's own; where it is not known, what the full job's work takes so many workers."""
        known = self._of.get(world)
        if known is not None and len(known) >= LEAST:
            return known.value
        full = self.full
        return None if full is None else full * self.full_world / max(world, 1)
