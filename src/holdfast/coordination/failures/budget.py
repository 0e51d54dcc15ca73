"""How often a rung of the ladder may be tried: within a window of time. Steps that pass refill nothing."""

from __future__ import annotations

from collections import deque

#: A restart costs the others two changes of membership, a tenth of a second together, and nobody waits for it. So a
#: node may fail once a minute for a while (five times, `recovery.max_restarts`); what dies as soon as it is there has
#: used that up within seconds.
WINDOW_S = 300.0
#: processes of a node that die together have died once
TOGETHER_S = 1.0


class Budget:
    """Counts the tries of one rung on one node, each with the time at which it was made, in seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._tries: deque[float] = deque()
        #: the places for which the last try was made
        self._together: set[int] = set()

    def use(self, now: float, place: int = 0) -> int:
        """Try once more, for a place of the node; return how often that makes within the window."""
        while self._tries and self._tries[0] <= now - self.window_s:
            self._tries.popleft()
        if not self._tries or place in self._together or now - self._tries[-1] >= TOGETHER_S:
            self._tries.append(now)
            self._together.clear()
        self._together.add(place)
        return len(self._tries)

    def undo(self, at: float) -> None:
        """The last try does not count, if it was made then."""
        if self._tries and self._tries[-1] == at:
            self._tries.pop()

    @property
    def tries(self) -> int:
        """How many there were within the window, at the last one."""
        return len(self._tries)
