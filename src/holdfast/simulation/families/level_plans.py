"""Fault plans of jobs whose collectives go level by level: ranks are struck between two levels as well."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from holdfast.simulation.faults.plans import (
    Fault,
    FaultKind,
    FaultPlan,
    baseline_plan,
    lively_plan,
    random_plan,
    slow_plan,
    wide_plan,
)

#: what strikes a rank between two levels
_KINDS = (
    FaultKind.KILL_NODE,
    FaultKind.KILL_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.STOP_WORKER,
    FaultKind.CUT,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.LAG_LISTENER,
    FaultKind.PARTITION,
    FaultKind.GLITCH,
    FaultKind.HANG,
)
_LATER = ("voted", "climbing", "passed", "applying", "applied", "stopped", "begun", "entered")


def level_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with up to three levels or more: one fault or several while a rank is between two."""
    rng = Random(seed * 61 + 19)
    plan = rng.choice((random_plan, random_plan, wide_plan, lively_plan, slow_plan, baseline_plan))(seed)
    nodes = max(plan.nodes, rng.choice((2, 3, 3, 4, 5, 6, 7, 9)))
    struck = [
        Fault(
            kind=rng.choice(_KINDS),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5, 4.0)),
            boundary=boundary,
            step=rng.randint(0, plan.steps) if boundary != "stopped" else 0,
        )
        for boundary in ("climbing", *rng.choices(_LATER, k=rng.choice((0, 0, 1, 1, 2))))
    ]
    return replace(
        plan,
        nodes=nodes,
        start_nodes=max(plan.start_nodes, rng.randint(1, nodes)),
        workers_per_node=plan.workers_per_node if plan.ep_size else rng.choice((1, 2, 2, 3)),
        micro_batches=max(plan.micro_batches, rng.randint(1, 10)),
        faults=(*plan.faults[: rng.choice((0, 0, 1, 3))], *struck),
        fan_out=rng.choice((2, 2, 3)),
    )
