"""Fault plans in which nodes fail repeatedly until they are quarantined, and in which ranks are held meanwhile."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    random_plan,
)

_KINDS = (
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER,
    FaultKind.RAISE,
    FaultKind.RAISE_APPLY,
    FaultKind.STOP_WORKER,
    FaultKind.GLITCH,
    FaultKind.HANG,
    FaultKind.CUT,
)


def ladder_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which nodes have few restarts and use them up."""
    plan, rng = random_plan(seed), Random(seed * 71 + 29)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.3
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 4))):
        target, kind = rng.randrange(64), rng.choice(_KINDS)
        for _ in range(rng.choice((1, 2, 3))):
            boundary = rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.5 else ""
            faults.append(
                Fault(
                    kind=kind,
                    time=rng.uniform(0.0, span),
                    target=target,
                    duration=rng.choice((0.02, 0.5, 1.5)),
                    boundary=boundary,
                )
            )
    if rng.random() < 0.6:
        later = (Fault(kind=FaultKind.UNDRAIN, time=rng.uniform(0.3, 2.0) * span) for _ in range(2))
        faults += later
    return replace(
        plan,
        nodes=nodes,
        start_nodes=rng.randint(1, nodes),
        faults=(*plan.faults[: rng.choice((0, 0, 1, 2))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
        hold=rng.random() < 0.5,
        max_restarts=rng.choice((0, 1, 2, 3)),
    )
