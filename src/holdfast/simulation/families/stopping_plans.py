"""Fault plans of jobs whose scripts ask for the end, one of them at a time, before all steps are used up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from holdfast.simulation.faults.plans import FaultPlan, lively_plan, random_plan, wide_plan


def stopping_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed where a script asks all to stop after a step, whatever goes wrong around it."""
    rng = Random(seed * 71 + 3)
    plan = rng.choice((random_plan, random_plan, wide_plan, lively_plan))(seed)
    return replace(plan, stops_at=rng.randint(1, plan.steps), checkpoint_every=rng.choice((0, 1, 3)), leaves=False)
