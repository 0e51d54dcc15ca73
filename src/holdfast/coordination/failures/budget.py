"""Limits how often an escalation step may be tried within a window of time. Committed steps refill nothing."""

from __future__ import annotations

from collections import deque

#: A restart costs the other nodes two changes of membership, together a tenth of a second; they do not wait for it. So
#: a node may fail once a minute for a while (five times, `recovery.max_restarts`). A process that dies at each start
#: uses that up within seconds.
WINDOW_S = 300.0
#: processes of a node that end within this many seconds count as one try
TOGETHER_S = 1.0


class Budget:
    """Counts the tries of one escalation step on one node, each with its time in seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._tries: deque[float] = deque()
        #: the local ranks of the last try
        self._together: set[int] = set()

    def count_try(self, now: float, place: int = 0) -> int:
        """Count a try, and return the number of tries within the window.

        Ends of processes with different local ranks within a second are one try.

        Args:
            place: the local rank of the process, or 0 for the whole node.
        """
        while self._tries and self._tries[0] <= now - self.window_s:
            self._tries.popleft()
        if not self._tries or place in self._together or now - self._tries[-1] >= TOGETHER_S:
            self._tries.append(now)
            self._together.clear()
        self._together.add(place)
        return len(self._tries)

    def undo_try(self, at: float) -> None:
        """Remove the last try if it was made at this time, because the node was not its cause."""
        if self._tries and self._tries[-1] == at:
            self._tries.pop()

    @property
    def tries(self) -> int:
        """The number of tries within the window, as of the last one."""
        return len(self._tries)
