"""Fault plans with snapshots in the memory of nodes. All workers die together, or parts are corrupt or missing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    interrupted_plan,
    power_plan,
    random_plan,
    wide_plan,
)

_BASES = (random_plan, random_plan, wide_plan, power_plan, interrupted_plan)
_KINDS = (
    FaultKind.KILL_WORKERS,
    FaultKind.KILL_WORKERS,
    FaultKind.KILL_WORKERS,
    FaultKind.FLIP,
    FaultKind.FLIP,
    FaultKind.FULL_MEMORY,
    FaultKind.KILL_NODE,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.PARTITION,
    FaultKind.RETURN,
)


def memory_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with snapshots, often without checkpoints, in which all workers may die."""
    rng = Random(seed * 71 + 29)
    plan = rng.choice(_BASES)(seed)
    span = 0.15 * plan.steps + 0.3
    more = tuple(
        Fault(
            kind=rng.choice(_KINDS),
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5)),
            boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.4 else "",
        )
        for _ in range(rng.choice((1, 2, 2, 3, 5)))
    )
    return replace(
        plan,
        faults=(*plan.faults[: rng.choice((0, 0, 1, 2))], *more),
        snapshot_every=rng.choice((1, 1, 2, 3)),
        copies=rng.choice((1, 2, 2, 3)),
        checkpoint_every=rng.choice((0, 0, 2, 4)),
    )
