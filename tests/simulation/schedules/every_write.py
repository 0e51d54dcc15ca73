"""The coordinator dies before each of its writes in turn, alone or in a power cut: the future must be the same."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

from holdfast.errors import EXIT_DONE
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FAMILIES, FIRST_SEED, FIRSTS, SECONDS, WRITES, Schedule, family_of
from tests.simulation.schedules.fuzzing import Tally, print_failed
from tests.simulation.world import Parts

#: whose schedules come after those of one failure, in turns
_RANDOM = ("random", "wide", "lively", "baseline")
#: schedules after which a run of many minutes says how far it is
_SAID_EVERY = 20


def one_failure(number: int) -> Schedule:
    """Return the schedule of one failure that `number` names; some survive it."""
    return Schedule(number=FIRST_SEED + number % len(FIRSTS) * len(SECONDS) * (WRITES + 1))


def chosen(count: int, seed: int) -> Iterator[Schedule]:
    """Yield schedules: all those of one failure, then random ones that follow from `seed`."""
    rng = Random(seed)
    for place in range(count):
        if place < len(FIRSTS):
            yield one_failure(place)
        else:
            yield Schedule(number=rng.choice(FAMILIES[_RANDOM[place % len(_RANDOM)]]))


def killed_at_every_write(schedule: Schedule, *, power_cut: bool, parts: Parts | None = None) -> Iterator[Schedule]:
    """Yield the schedule with a crash before its first write, its second, ...: as many as it makes undisturbed."""
    undisturbed = SimCluster(schedule.plan, parts)
    undisturbed.run()
    for write in range(1, undisturbed.writes + 1):
        yield replace(schedule, write=write, power_cut=power_cut)


def disturb(schedule: Schedule, parts: Parts | None = None) -> Tally:
    """Run a schedule undisturbed, then with a death and with a power cut before each write: what one process does.

    One failure loses nothing, so that job must be done each time; whether another may end is for the invariants to say.
    """
    tally, must_end = Tally(), EXIT_DONE if family_of(schedule.number) == "enumerated" else None
    tally.run(schedule, parts, must_end=must_end)
    if not tally.failed:
        for power_cut in (False, True):
            for disturbed in killed_at_every_write(schedule, power_cut=power_cut, parts=parts):
                tally.run(disturbed, parts, must_end=must_end)
    return tally


def writes(count: int, seed: int | None = None, processes: int = 0, parts: Parts | None = None) -> bool:
    """Run `count` schedules with the coordinator killed at every write; print what came of them, True if all is well.

    `seed`: whence the random ones follow; None: fresh ones.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    since, tally = time.monotonic(), Tally()
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        for place, part in enumerate(pool.map(partial(disturb, parts=parts), chosen(count, seed)), start=1):
            tally.add(part)
            if place % _SAID_EVERY == 0:
                print(f"{place} of {count} schedules, {tally.failed.total()} runs failed", file=sys.stderr, flush=True)
    wall_s, runs = time.monotonic() - since, tally.schedules.total()
    print(f"{count} schedules (--seed {seed}), the coordinator killed, and its power cut, at every write:")
    print(f"{runs} runs in {wall_s:.0f} s, {runs / wall_s:.0f} per second; {tally.failed.total()} failed")
    print_failed(tally)
    return not tally.failed
