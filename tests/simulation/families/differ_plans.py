"""Fault plans in which one worker's script sets different options. The worker is replaced, or the job ends."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.families.level_plans import level_plan
from tests.simulation.families.membership_plans import standby_plan
from tests.simulation.families.witness_plans import witness_plan
from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    baseline_plan,
    power_plan,
    random_plan,
    wide_plan,
)

_BASES = (random_plan, random_plan, wide_plan, level_plan, power_plan, witness_plan, baseline_plan, standby_plan)
#: boundaries while the difference is reported, decided or handled
_LATER = ("refused", "refused", "stopped", "begun", "built", "entered", "reducing")
_BESIDE = (
    FaultKind.KILL_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_NODE,
    FaultKind.LAG_UP,
    FaultKind.LAG_DOWN,
    FaultKind.PARTITION,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
)


def differ_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with different options on one or two workers, and failures before and after that."""
    rng = Random(seed * 83 + 41)
    plan = rng.choice(_BASES)(seed)
    boundaries = (*STEP_BOUNDARIES, *OTHER_BOUNDARIES, "refused")
    odd = [
        Fault(
            kind=FaultKind.DIFFER,
            time=rng.uniform(0.0, 0.15 * plan.steps + 0.3),
            target=rng.randrange(64),
            boundary=rng.choice(boundaries) if rng.random() < 0.7 else "",
        )
        for _ in range(rng.choice((1, 1, 1, 2)))
    ]
    beside = [
        Fault(
            kind=rng.choice(_BESIDE),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5)),
            boundary=boundary,
        )
        for boundary in rng.choices(_LATER, k=rng.choice((0, 1, 1, 2)))
    ]
    return replace(plan, faults=(*plan.faults[: rng.choice((0, 0, 1, 2))], *odd, *beside))
