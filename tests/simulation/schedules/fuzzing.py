"""Runs new schedules of all families on all cores; a failed schedule can be replayed by its number."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random

from holdfast.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.coverage import Seen, expected, table
from tests.simulation.schedules.enumeration import FAMILIES, Schedule, family_of
from tests.simulation.schedules.shrinking import failure, shrunk
from tests.simulation.world import Parts

#: The number of schedules of each family in one round.
SHARES = {
    "random": 3,
    "enumerated": 2,
    "baseline": 1,
    "wide": 4,
    "lively": 2,
    "power": 1,
    "interrupted": 1,
    "slow": 2,
    "witnesses": 2,
    "raising": 2,
    "ladder": 2,
    "beginning": 1,
    "stopping": 1,
    "skipping": 1,
    "differ": 2,
    "storm": 3,
    "work": 1,
    "links": 3,
    "large": 1,
    "levels": 2,
    "corrupt": 2,
    "memory": 3,
    "ready": 3,
    "leaving": 3,
    "standbys": 3,
    "moves": 3,
    "notices": 3,
    "stragglers": 1,
    "waiting": 3,
    "pooled": 3,
    "reserve": 3,
    "pooled_moves": 3,
    "layouts": 3,
    "combined": 6,
    "newcomers": 3,
    "outdated": 1,
    "pairs": 10,
}
#: The largest share of time for large schedules among other families; each takes as long as 50 others.
LARGE_SHARE = 0.15
#: A run of at least this many random schedules must cover every pair of fault and phase.
LONG_RUN = 100_000
#: The number of example schedules kept for each kind of failure.
_KEPT = 5


@dataclass(slots=True)
class Tally:
    """The results of several runs; `seconds` is the CPU time by family."""

    schedules: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    ended: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    failed: Counter[str] = field(default_factory=Counter[str])
    #: The first schedules of each kind of failure.
    examples: dict[str, list[Schedule]] = field(default_factory=dict[str, list[Schedule]])
    seen: Seen = field(default_factory=Counter[tuple[str, str]])

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.schedules += other.schedules
        self.ended += other.ended
        self.failed += other.failed
        self.seen += other.seen
        for family, seconds in other.seconds.items():
            self.seconds[family] = self.seconds.get(family, 0.0) + seconds
        for how, examples in other.examples.items():
            self.examples[how] = (self.examples.get(how, []) + examples)[:_KEPT]

    def run(self, schedule: Schedule, parts: Parts | None = None, *, must_end: int | None = None) -> None:
        """Run one schedule; if `must_end` is set, any other exit code counts as a failure."""
        family, cluster, since = family_of(schedule.number), SimCluster(schedule.plan, parts), time.process_time()
        how = failure(cluster)
        self.seconds[family] = self.seconds.get(family, 0.0) + time.process_time() - since
        self.schedules[family] += 1
        self.seen += cluster.injector.seen
        if not how and cluster.ended is not None and must_end not in (None, cluster.ended[0]):
            how = f"the job ended with an unexpected exit code: {cluster.ended[1]}"
        if how:
            self.failed[how] += 1
            self.examples[how] = [*self.examples.get(how, []), schedule][:_KEPT]
        elif cluster.ended is not None:
            self.ended[family, cluster.ended[0]] += 1


def fresh(families: tuple[str, ...]) -> Iterator[Schedule]:
    """Yield new random schedules without end."""
    rng = Random(os.urandom(16))
    turns = [family for family in families for _ in range(SHARES[family])]
    while True:
        for family in turns:
            yield Schedule(number=rng.choice(FAMILIES[family]))


def share(seconds: float, schedules: int, families: tuple[str, ...]) -> Tally:
    """Run new schedules in one process: `schedules` of them, or as many as fit into `seconds` if it is 0."""
    tally, until = Tally(), math.inf if schedules else time.monotonic() + seconds
    for schedule in fresh(families):
        if time.monotonic() >= until or (schedules and tally.schedules.total() >= schedules):
            break
        if families == ("large",) or not too_much(tally, schedule):
            tally.run(schedule)
    return tally


def too_much(tally: Tally, schedule: Schedule) -> bool:
    """Return whether this schedule is large and large schedules have used their share of the time."""
    large_s = tally.seconds.get("large", 0.0)
    return family_of(schedule.number) == "large" and large_s > LARGE_SHARE * sum(tally.seconds.values())


def fuzz(seconds: float, families: tuple[str, ...] = tuple(FAMILIES), processes: int = 0, schedules: int = 0) -> bool:
    """Run new schedules for `seconds`, or `schedules` of them if given; print the results; return True on success."""
    processes = processes or len(os.sched_getaffinity(0))
    since, tally = time.monotonic(), Tally()
    with ProcessPoolExecutor(processes) as pool:
        each = math.ceil(schedules / processes)
        for part in pool.map(share, [seconds] * processes, [each] * processes, [families] * processes):
            tally.add(part)
    unseen = report(tally, time.monotonic() - since, families)
    return not tally.failed and not unseen


def report(tally: Tally, wall_s: float, families: tuple[str, ...]) -> bool:
    """Print a tally; return True if a long run lacks a required pair of fault and phase."""
    print(table(tally.seen), end="\n\n")
    unseen = sorted(expected() - set(tally.seen))
    must = sum(tally.schedules.values()) >= LONG_RUN and set(families) == set(FAMILIES)
    for kind, phase in unseen:
        print(f"never seen: {kind}, {phase}")
    total = sum(tally.schedules.values())
    for family, number in tally.schedules.items():
        rate = number / max(tally.seconds.get(family, 0.0), 1e-9)
        done, failed, left = (tally.ended[family, code] for code in (EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED))
        ends = f"{done} done, {failed} end with why" + (f", {left} interrupted" if left else "")
        print(f"{family:12} {number:8} schedules, {rate:5.0f} per second of a core; {ends}")
    print(f"{total} schedules in {wall_s:.0f} s, {total / wall_s:.0f} per second; {sum(tally.failed.values())} failed")
    print_failed(tally)
    return must and bool(unseen)


def print_failed(tally: Tally) -> None:
    """Print a replay command for each failed schedule, and a shrunk plan for each kind of failure."""
    for how, number in tally.failed.most_common():
        print(f"\nFAILED {number} x {how}")
        for schedule in tally.examples[how]:
            print(f"  python -m tests.simulation replay {schedule}")
        print(f"  the first one, made small:\n  {shrunk(tally.examples[how][0].plan)}")
