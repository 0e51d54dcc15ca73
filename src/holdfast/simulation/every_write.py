"""One schedule, the coordinator killed before each of its writes in turn: the job must end as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.simulation.cluster import Cluster
from holdfast.simulation.enumeration import FIRST_SEED, FIRSTS, SECONDS, WRITES, plan_of
from holdfast.simulation.faults import FaultPlan


def one_failure(number: int) -> FaultPlan:
    """Return the schedule of one failure that `number` names; some survive it."""
    return plan_of(FIRST_SEED + number % len(FIRSTS) * len(SECONDS) * (WRITES + 1))


def killed_at_every_write(plan: FaultPlan, *, power_cuts: bool) -> Iterator[FaultPlan]:
    """Yield the plan with a crash before its first write, its second, ...: as many as it makes undisturbed."""
    undisturbed = Cluster(plan)
    undisturbed.run()
    for write in range(1, undisturbed.writes + 1):
        yield replace(plan, crashes=(write,), power_cuts=power_cuts)
