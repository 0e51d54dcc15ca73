"""Fault plans with silent and flapping links, clock jumps and bit flips."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    baseline_plan,
    random_plan,
    wide_plan,
)

_DOWN_S = (0.02, 0.3, 0.8, 1.5, 3.0, 6.0, 30.0)
_BOUNDARIES = (*STEP_BOUNDARIES, *OTHER_BOUNDARIES, "moving")


def link_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with silent links, repeatedly on one node, or together with other faults."""
    rng = Random(seed * 79 + 37)
    plan = rng.choice((random_plan, random_plan, wide_plan, baseline_plan))(seed)
    span = 0.15 * plan.steps + 0.3
    faults = [_fault(rng, FaultKind.LINK_DOWN, span) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.4:
        target, since, apart = rng.randrange(64), rng.uniform(0.0, span), rng.choice((0.05, 0.3, 1.0))
        faults += (
            Fault(kind=FaultKind.LINK_DOWN, time=since + number * apart, target=target, duration=apart / 2)
            for number in range(rng.randint(2, 6))
        )
    if rng.random() < 0.5:
        faults.append(_fault(rng, FaultKind.CLOCK_JUMP, span))
    if rng.random() < 0.2:
        faults.append(_fault(rng, FaultKind.CORRUPT_STATE, span))
    return replace(plan, faults=(*plan.faults[: rng.choice((0, 0, 1, 2))], *faults))


def _fault(rng: Random, kind: FaultKind, span: float) -> Fault:
    return Fault(
        kind=kind,
        time=rng.uniform(0.0, span),
        target=rng.randrange(64),
        duration=rng.choice(_DOWN_S) if kind is FaultKind.LINK_DOWN else 0.0,
        boundary=rng.choice(_BOUNDARIES) if rng.random() < 0.5 else "",
    )
