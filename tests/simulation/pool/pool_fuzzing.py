"""Runs many schedules of pools in parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.pool.pool_around import PoolParts
from tests.simulation.pool.pool_cluster import PoolCluster
from tests.simulation.pool.pool_plans import pool_plan


@dataclass(slots=True)
class PoolTally:
    """The results of several schedules; `failed` has the error by schedule number."""

    schedules: int = 0
    grants: int = 0
    moved: int = 0
    recalled: int = 0
    waited: int = 0
    failed: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, other: PoolTally) -> None:
        """Add another tally to this one."""
        self.schedules += other.schedules
        self.grants += other.grants
        self.moved += other.moved
        self.recalled += other.recalled
        self.waited += other.waited
        self.failed |= other.failed


def run_pools(numbers: Iterable[int], parts: PoolParts | None = None) -> PoolTally:
    """Run schedules one after another."""
    tally = PoolTally()
    for number in numbers:
        cluster = PoolCluster(pool_plan(number), parts)
        try:
            cluster.run()
        except Exception as error:  # noqa: BLE001 - any exception, such as a KeyError in a machine, is a failure
            tally.failed[number] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        checker = cluster.checker
        tally.schedules += 1
        tally.grants += checker.grants
        tally.moved += checker.moved
        tally.recalled += checker.recalled
        tally.waited += checker.waited
    return tally


def fuzz_pools(numbers: Sequence[int], processes: int) -> PoolTally:
    """Run schedules on several cores."""
    tally = PoolTally()
    with ProcessPoolExecutor(processes) as workers:
        for part in workers.map(run_pools, [numbers[place::processes] for place in range(processes)]):
            tally.add(part)
    return tally
