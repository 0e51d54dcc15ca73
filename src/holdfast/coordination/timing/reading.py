"""A worker's progress as its agent reads it, and how long its threads wait for a core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.protocol.messages.progress import Activity


@dataclass(frozen=True, slots=True)
class Total:
    """All durations of an activity in the life of a worker's process."""

    #: how often the activity has ended
    count: int
    #: the sum of its durations, in seconds
    sum_s: float
    #: the longest duration, in seconds
    longest_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveWait:
    """One of a worker's newest waits in a collective, on the machine's monotonic clock."""

    #: the name of the collective
    what: str
    #: the number of ranks that take part
    size: int
    #: the bytes on this rank
    bytes: int
    since: float
    #: None if the wait is not over
    until: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The activity of a worker's training thread. Times are on the machine's monotonic clock, in seconds."""

    generation: int
    step: int
    activity: Activity
    micro_batch: int | None
    #: when the activity began
    since: float
    #: the number of members of its generation
    world: int
    #: when the wait in a collective began, or None if it does not wait
    waits_since: float | None = None
    #: when the thread last checked whether that wait is over, or found that the last one was
    looked: float = 0.0
    #: for how long, in its life, the thread was ready to run but had no core
    starved_s: float = 0.0
    #: for how long, in its life, the process has collected garbage; no thread runs meanwhile
    collected_s: float = 0.0
    #: `starved_s` of the process's other threads that were checked, by number; one of them may hold the interpreter's
    #: lock
    others_starved_s: Mapping[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressAccount:
    """A worker's totals and its newest waits, oldest first. The agent reads them less often than `Reading`."""

    totals: Mapping[Activity, Total] = field(default_factory=dict[Activity, Total])
    waits: tuple[CollectiveWait, ...] = ()
    reason: str = ""
    #: the rate at which its data reaches a peer, or 0 if unknown
    link_bytes_per_s: float = 0.0


class ThreadClock(NamedTuple):
    """The kernel's counters of a thread."""

    #: whether the thread is ready to run, or runs
    ready: bool
    #: for how long it ran in its life, in seconds
    ran_s: float
    #: for how long it was ready but had no core, in seconds; only waits that are over
    waited_s: float


@dataclass(slots=True)
class _Known:
    clock: ThreadClock
    #: since when it has been ready without running
    ready_since: float


class CoreWaits:
    """Measures how long a process's threads were ready to run but had no core, including waits that still last.

    The kernel counts such a wait only once it is over. On a loaded machine a thread may wait for half a second while
    its counters do not change. So a thread that is ready at two checks, and has not run in between, has waited since
    the first.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def measure(self, now: float, threads: Mapping[int, ThreadClock]) -> dict[int, float]:
        """Return for each thread how many seconds of its life it was ready to run but had no core.

        A wait that has not ended is counted from the first of the unchanged readings.

        Args:
            now: The machine's monotonic clock.
            threads: The present reading of each thread, by thread id.
        """
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
        """Forget the threads that are not among these: they have ended."""
        self._known = {thread: known for thread, known in self._known.items() if thread in threads}
