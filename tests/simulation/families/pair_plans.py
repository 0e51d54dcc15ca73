"""Fault plans for all possible pairs of a fault and a phase, including pairs that no other family draws."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.families.level_plans import level_plan
from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.families.work_plans import straggler_plan
from tests.simulation.faults.coverage import COORDINATOR_PHASES, WORKER_PHASES, expected
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan, wide_plan

#: phases at which these plans cannot strike: before a worker attaches, in replica groups, without a coordinator
_NOT_STRUCK = ("starting", "adopting", "away")
#: the boundary that a worker reaches while the coordinator is in a phase
_BOUNDARY_DURING = {
    "waiting": "attach",
    "running": "computing",
    "swapping": "entering",
    "recovering": "stopped",
    "ended": "",
}
_PAIRS = sorted(
    (FaultKind(kind), phase)
    for kind, phase in expected()
    if kind in set(FaultKind) and phase in {*WORKER_PHASES, *COORDINATOR_PHASES} - {*_NOT_STRUCK}
)
_LAG_S = 6.0
_BASES = {
    FaultKind.FLIP: (memory_plan,),
    FaultKind.FULL_MEMORY: (memory_plan,),
    FaultKind.SLOW_NODE: (straggler_plan, random_plan, random_plan),
}


def _leads_to(phase: str, rng: Random, steps: int) -> tuple[Fault, ...]:
    """Return the fault that brings a job into a phase in which it is rarely otherwise."""
    target = rng.randrange(64)
    match phase:
        case "refused":
            boundary, step = "reducing", rng.randint(1, steps)
            return (Fault(kind=FaultKind.CORRUPT_SUM, target=target, boundary=boundary, step=step),)
        case "recovering":
            return (Fault(kind=FaultKind.KILL_WORKER, target=target, boundary="computing", step=rng.randint(1, steps)),)
        case "ended":  # A node that learns late of the end prolongs this phase.
            return (Fault(kind=FaultKind.LAG_DOWN, target=target, boundary="finishing", duration=_LAG_S),)
        case _:
            return ()


def pair_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with one kind of fault in one phase, and perhaps another fault."""
    rng = Random(seed * 157 + 89)
    kind, phase = rng.choice(_PAIRS)
    bases = (level_plan,) if phase == "climbing" else _BASES.get(kind, (random_plan, random_plan, wide_plan))
    plan = rng.choice(bases)(seed)
    struck = Fault(
        kind=kind,
        time=rng.uniform(0.15 * plan.steps, 0.15 * plan.steps + _LAG_S),
        target=rng.randrange(64),
        duration=rng.choice((0.02, 0.3, 1.5, 6.0)),
        boundary=_BOUNDARY_DURING.get(phase, phase),
    )
    others = plan.faults[: rng.choice((0, 0, 1))] + _leads_to(phase, rng, plan.steps)
    if phase == "moving" and not plan.experts:
        plan = replace(plan, experts=rng.randint(2, 5), rebalance_every=1)
    if plan.restart and kind is FaultKind.PARTITION_FOR_GOOD:  # such a job would wait for the node that is cut off
        plan = replace(plan, restart=False)
    return replace(plan, faults=(*others, struck))
