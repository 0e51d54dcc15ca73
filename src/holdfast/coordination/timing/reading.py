"""What an agent reads of one worker's progress, and what a coordinator is to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.protocol.messages.progress import Activity


@dataclass(frozen=True, slots=True)
class Total:
    """How often a worker was done with an activity in its process's life, and how long all of those took, and the
    longest, in seconds."""

    count: int
    sum_s: float
    longest_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveWait:
    """One of a worker's newest waits in a collective: its name, how many took part, its bytes here.

    `since` and `until` (None: not over) are on the machine's monotonic clock.
    """

    what: str
    size: int
    bytes: int
    since: float
    until: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Where a worker's training thread stands; times on the machine's monotonic clock, in seconds.

    `since`: when this activity began. `waits_since`: in a collective, None where it waits in none; `looked`: when it
    last looked whether that has ended, or found that the last one had. `world`: members of its generation.
    `starved_s`: for how long in its life it was ready to run and had no core; `others_starved_s`: the same of the
    process's other threads, by number, where they were looked at: one of them may have the interpreter's lock.
    `collected_s`: for how long the process has collected garbage in its life; no thread runs meanwhile.
    """

    generation: int
    step: int
    activity: Activity
    micro_batch: int | None
    since: float
    world: int
    waits_since: float | None = None
    looked: float = 0.0
    starved_s: float = 0.0
    collected_s: float = 0.0
    others_starved_s: Mapping[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressAccount:
    """What an agent reads more seldom: a worker's totals, and its newest waits, oldest first.

    `link_bytes_per_s`: how fast its data goes out to a peer; 0: not known.
    """

    totals: Mapping[Activity, Total] = field(default_factory=dict[Activity, Total])
    waits: tuple[CollectiveWait, ...] = ()
    reason: str = ""
    link_bytes_per_s: float = 0.0


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
    """For how long one process's threads were ready to run and had no core, in seconds, waits included that last.

    The kernel counts such a wait once it is over: on a loaded machine a thread may be ready for half a second, and all
    its counters stand. So who was ready at two looks and has not run between them has waited from the first one on.
    """

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
