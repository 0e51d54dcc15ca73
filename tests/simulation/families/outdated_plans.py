"""Fault plans that restore the store from a backup while the job trains in newer generations."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan

#: faults that lead to further generations before the backup is restored
_KINDS = (FaultKind.KILL_NODE, FaultKind.KILL_WORKER, FaultKind.JOIN, FaultKind.RETURN, FaultKind.CRASH_COORDINATOR)
_OLD_S = (0.3, 0.8, 1.5, 4.0)


def outdated_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed: several generations, then a backup of the store, then the newest store again."""
    rng = Random(seed * 83 + 41)
    plan = replace(random_plan(seed), steps=rng.randint(8, 24), crashes=(), crashes_after_strike=())
    faults = [
        Fault(kind=rng.choice(_KINDS), time=rng.uniform(0.2, 1.5), target=rng.randrange(64), duration=0.1)
        for _ in range(rng.randint(1, 3))
    ]
    old_s = rng.choice(_OLD_S)
    faults.append(Fault(kind=FaultKind.OLD_STORE, time=rng.uniform(0.8, 3.0), target=rng.randrange(64), duration=old_s))
    return replace(plan, faults=tuple(faults))
