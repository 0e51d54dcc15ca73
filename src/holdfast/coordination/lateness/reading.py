"""What an agent reads of one worker's progress, and what a coordinator is to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
