"""For how long a process's threads were ready to run and had no core, waits that are not over included.

The kernel counts such a wait once it is over: on a loaded machine a thread may be ready for half a second, and all its
counters stand. So who was ready at two looks and has not run between them has waited from the first one on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ThreadClock(NamedTuple):
    """What the kernel tells of a thread: whether it is ready to run (or runs), and in its life, in seconds, for how
    long it ran, and for how long it was ready and had no core, as far as those waits are over."""

    ready: bool
    ran_s: float
    waited_s: float


@dataclass(slots=True)
class _Known:
    clock: ThreadClock
    #: since when it has been seen to be ready, and not to run
    ready_since: float


class CoreWaits:
    """Of one process; times in seconds."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def look(self, now: float, threads: Mapping[int, ThreadClock]) -> dict[int, float]:
        """Return for how long each of these threads was ready and had no core, in its life."""
        waited = dict[int, float]()
        for thread, clock in threads.items():
            known = self._known.get(thread)
            if known is None:
                known = self._known[thread] = _Known(clock, now)
            elif not (known.clock.ready and clock.ready and clock[1:] == known.clock[1:]):
                known.ready_since = now
            known.clock = clock
            waited[thread] = clock.waited_s + (now - known.ready_since if clock.ready else 0.0)
        return waited

    def forget_but(self, threads: Mapping[int, ThreadClock]) -> None:
        """Those that are not among these have ended."""
        self._known = {thread: known for thread, known in self._known.items() if thread in threads}
