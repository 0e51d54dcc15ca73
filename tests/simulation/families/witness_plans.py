"""Fault plans in which all witnesses die between two heartbeats, in any phase. Witnesses report each passed step."""

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

#: all but the last are shorter than the heartbeat interval
_WITHIN_S = (0.0, 0.005, 0.05, 0.5)
_BESIDE = (
    FaultKind.CRASH_COORDINATOR,
    FaultKind.POWER_CUT,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
    FaultKind.LAG_UP,
    FaultKind.CUT,
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
)


def witness_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with few witnesses, which die once or twice, perhaps together with the coordinator."""
    plan, rng = random_plan(seed), Random(seed * 61 + 19)
    nodes = rng.randint(3, 8)
    span = 0.15 * plan.steps + 0.3
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2))):
        boundary = rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.8 else ""
        dies = Fault(
            kind=FaultKind.KILL_WITNESSES,
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            duration=rng.choice(_WITHIN_S),
            boundary=boundary,
            step=rng.randint(0, plan.steps) if boundary in STEP_BOUNDARIES else 0,
        )
        faults.append(dies)
        if rng.random() < 0.7:
            beside = replace(dies, kind=rng.choice(_BESIDE), target=rng.randrange(64), duration=rng.choice((0.02, 0.7)))
            faults.append(beside)
    return replace(
        plan,
        nodes=nodes,
        start_nodes=rng.randint(2, nodes),
        workers_per_node=rng.choice((1, 1, 2)),
        faults=(*plan.faults[: rng.choice((0, 0, 1))], *faults),
        witnesses=rng.choice((1, 1, 2, 3)),
    )
