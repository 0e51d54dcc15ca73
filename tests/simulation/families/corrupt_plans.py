"""Fault plans with one wrong gradient in one worker's sums.

The step is refused, and the job does not end, even if other faults strike.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.families.level_plans import level_plan
from tests.simulation.families.witness_plans import witness_plan
from tests.simulation.faults.plans import (
    Fault,
    FaultKind,
    FaultPlan,
    baseline_plan,
    interrupted_plan,
    power_plan,
    random_plan,
    slow_plan,
    wide_plan,
)

_BASES = (
    random_plan,
    random_plan,
    wide_plan,
    level_plan,
    power_plan,
    slow_plan,
    witness_plan,
    baseline_plan,
    interrupted_plan,
)
#: boundaries while gradients are held, or reduced
_STRUCK = ("computing", "computing", "reducing", "reducing", "reduced", "voted", "stopped", "entered", "applied")
#: boundaries while the refusal is reported, decided or handled
_LATER = ("refused", "refused", "refused", "stopped", "stopped", "begun", "built", "entered", "reducing", "voted")
_BESIDE = (
    FaultKind.KILL_NODE,
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_WORKER,
    FaultKind.CUT,
    FaultKind.LAG_LISTENER,
    FaultKind.LAG_UP,
    FaultKind.LAG_DOWN,
    FaultKind.PARTITION,
    FaultKind.PARTITION_FOR_GOOD,
    FaultKind.HANG,
    FaultKind.RAISE_APPLY,
    FaultKind.SLOW_DISK,
    FaultKind.FULL_DISK,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.POWER_CUT,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
)


def corrupt_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with one corruption.

    Earlier faults make workers keep gradients. Other faults may strike after the corruption.
    """
    rng = Random(seed * 67 + 23)
    plan = rng.choice(_BASES)(seed)
    step = rng.randint(1, plan.steps)
    boundary = rng.choice(_STRUCK) if rng.random() < 0.8 else ""
    wrong = Fault(
        kind=FaultKind.CORRUPT_SUM,
        time=rng.uniform(0.0, 0.15 * plan.steps + 0.3),
        target=rng.randrange(64),
        boundary=boundary,
        step=step if rng.random() < 0.7 else 0,
    )
    beside = [
        Fault(
            kind=rng.choice(_BESIDE),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 0.7, 1.5, 4.0)),
            boundary=place,
            step=step if place == "voted" else 0,
        )
        for place in rng.choices(_LATER, k=rng.choice((0, 1, 1, 2, 3)))
    ]
    if plan.restart or plan.ep_size:  # the job may need the node that is permanently cut off
        beside = [fault for fault in beside if fault.kind is not FaultKind.PARTITION_FOR_GOOD]
    return replace(plan, faults=(*plan.faults[: rng.choice((0, 0, 1, 2, 4))], wrong, *beside))
