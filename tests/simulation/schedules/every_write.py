"""Crashes the coordinator before each of its writes, alone or in a power cut; the job must continue correctly."""

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

#: The families that follow the single-failure schedules, in rotation.
_RANDOM = ("random", "wide", "lively", "baseline")
#: The number of schedules between two progress messages.
_SAID_EVERY = 20


def one_failure(number: int) -> Schedule:
    """Return the single-failure schedule with this number; some nodes survive the failure."""
    return Schedule(number=FIRST_SEED + number % len(FIRSTS) * len(SECONDS) * (WRITES + 1))


def chosen(count: int, seed: int) -> Iterator[Schedule]:
    """Yield all single-failure schedules, then random schedules derived from `seed`."""
    rng = Random(seed)
    for place in range(count):
        if place < len(FIRSTS):
            yield one_failure(place)
        else:
            yield Schedule(number=rng.choice(FAMILIES[_RANDOM[place % len(_RANDOM)]]))


def killed_at_every_write(schedule: Schedule, *, power_cut: bool, parts: Parts | None = None) -> Iterator[Schedule]:
    """Yield the schedule once for each write of its undisturbed run, with a crash before that write."""
    undisturbed = SimCluster(schedule.plan, parts)
    undisturbed.run()
    for write in range(1, undisturbed.writes + 1):
        yield replace(schedule, write=write, power_cut=power_cut)


def disturb(schedule: Schedule, parts: Parts | None = None) -> Tally:
    """Run a schedule undisturbed, then with a crash and with a power cut before each write, in this process.

    A single failure loses nothing, so that job must always finish. For other schedules the invariants decide.
    """
    tally, must_end = Tally(), EXIT_DONE if family_of(schedule.number) == "enumerated" else None
    tally.run(schedule, parts, must_end=must_end)
    if not tally.failed:
        for power_cut in (False, True):
            for disturbed in killed_at_every_write(schedule, power_cut=power_cut, parts=parts):
                tally.run(disturbed, parts, must_end=must_end)
    return tally


def writes(count: int, seed: int | None = None, processes: int = 0, parts: Parts | None = None) -> bool:
    """Run `count` schedules with the coordinator killed at every write, print the results, and return success.

    The random schedules are derived from `seed`, or from a random seed if it is None.
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
