"""Fault plans that combine replicas over several workers of a node with the faults of every other family."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from holdfast.protocol.job_spec import MAX_RESTARTS
from tests.simulation.families.corrupt_plans import corrupt_plan
from tests.simulation.families.ladder_plans import ladder_plan
from tests.simulation.families.level_plans import place_in_replica_groups
from tests.simulation.families.link_plans import link_plan
from tests.simulation.families.membership_plans import (
    leaving_plan,
    move_plan,
    notice_plan,
    pooled_plan,
    reserve_plan,
    standby_plan,
    waiting_plan,
)
from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.families.script_plans import raising_plan, stopping_plan
from tests.simulation.families.storm_plans import ready_plan, storm_plan
from tests.simulation.families.witness_plans import witness_plan
from tests.simulation.families.work_plans import straggler_plan, work_plan
from tests.simulation.faults.plans import FaultKind, FaultPlan, Raises, interrupted_plan, power_plan, slow_plan

#: families with faults that `layout_plan` does not draw, or draws without the rest of the family's plan
_COMBINED = (
    corrupt_plan,
    interrupted_plan,
    ladder_plan,
    leaving_plan,
    link_plan,
    memory_plan,
    move_plan,
    notice_plan,
    pooled_plan,
    power_plan,
    raising_plan,
    ready_plan,
    reserve_plan,
    slow_plan,
    standby_plan,
    stopping_plan,
    storm_plan,
    waiting_plan,
    witness_plan,
)
#: One plan in this many has slow work or slow nodes. Such a schedule takes ten times as long as others.
_SLOW_WORK_EVERY = 20
#: the share of the plans with the faults of two families
_TWO_FAMILIES = 0.3


def combined_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed: the faults of one or two other families, in replica groups of two or four workers."""
    rng = Random(seed * 149 + 83)
    if rng.randrange(_SLOW_WORK_EVERY) == 0:
        plan = rng.choice((work_plan, straggler_plan))(seed)
    else:
        plan = rng.choice(_COMBINED)(seed)
        if rng.random() < _TWO_FAMILIES:
            plan = replace(plan, faults=(*plan.faults, *rng.choice(_COMBINED)(seed + 1).faults[:3]))
    if plan.restart:  # such a job needs all its nodes, and would wait for one that is cut off
        lasting = FaultKind.PARTITION_FOR_GOOD
        plan = replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind is not lasting))
    plan = place_in_replica_groups(plan, rng, faults=plan.faults, snapshot_every=plan.snapshot_every)
    # If no other node has the experts, each retry goes back to a checkpoint, and the same node gets the sample again.
    return replace(plan, max_restarts=min(plan.max_restarts, MAX_RESTARTS)) if plan.raises is Raises.SAMPLE else plan
