"""Fault plans of jobs with hierarchical collectives, or with replicas that span several workers of a node.

In both, workers need each other in the middle of a step.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.families.membership_plans import move_plan, standby_plan
from tests.simulation.faults.plans import (
    Fault,
    FaultKind,
    FaultPlan,
    Raises,
    baseline_plan,
    lively_plan,
    power_plan,
    random_plan,
    slow_plan,
    wide_plan,
)

#: faults that strike a rank between two levels
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
    """Return the plan of a seed with several levels, and faults while a rank is between two levels."""
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


#: faults that strike replica groups, mostly at the boundaries of `_AROUND_UNITS`
_IN_UNITS = (
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_NODE,
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.STOP_WORKER,
    FaultKind.RAISE_APPLY,
    FaultKind.RAISE,
    FaultKind.CUT,
    FaultKind.GLITCH,
    FaultKind.HANG,
    FaultKind.LAG_LISTENER,
    FaultKind.LAG_DOWN,
    FaultKind.PARTITION,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
    FaultKind.RETURN,
)
_UNIT_BOUNDARIES = ("proposing", "proposing", "computing", "computing", "reduced", "voted", "passed", "applying")
#: the share of the plans with replica groups that have a model with experts
_WITH_EXPERTS = 0.25
_AROUND_UNITS = (*_UNIT_BOUNDARIES, "stopped", "begun", "entered", "built", "receiving", "sending", "attach")


def layout_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which replicas span two or four workers of a node. A node has one or two of them."""
    rng = Random(seed * 131 + 71)
    plan = rng.choice((random_plan, random_plan, wide_plan, lively_plan, power_plan, standby_plan, move_plan))(seed)
    return place_in_replica_groups(plan, rng)


def place_in_replica_groups(
    plan: FaultPlan, rng: Random, *, faults: tuple[Fault, ...] | None = None, snapshot_every: int = 0
) -> FaultPlan:
    """Return a plan in which replicas span several workers of a node, with faults that strike these groups.

    Args:
        faults: The faults of `plan` to keep; None for some of its first ones.
        snapshot_every: The snapshot interval, in steps; 0 to draw it.
    """
    nodes, span = min(max(plan.nodes, rng.choice((1, 2, 2, 3, 4))), 6), 0.15 * plan.steps + 0.3
    places = rng.choice((2, 2, 2, 4))
    struck = [
        Fault(
            kind=rng.choice(_IN_UNITS),
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5, 4.0)),
            boundary=rng.choice(_AROUND_UNITS) if rng.random() < 0.7 else "",
            step=rng.choice((0, 0, 1, 2, 3)),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    plan = replace(
        plan,
        nodes=nodes,
        start_nodes=rng.randint(1, nodes),
        places=places,
        workers_per_node=places * rng.choice((1, 1, 2)) if places == 2 else places,
        experts=0,
        slots=0,
        rebalance_every=0,
        ep_size=0,
        logs=False,
        micro_batches=max(plan.micro_batches, rng.randint(1, 10)),
        faults=(*(plan.faults[: rng.choice((0, 1, 2, 4))] if faults is None else faults), *struck),
        snapshot_every=snapshot_every or rng.choice((0, 0, 0, 1, 2)),
        fan_out=rng.choice((0, 0, 0, 2)),
    )
    seed = plan.seed
    return _with_layouts(_with_experts(plan, Random(seed * 137 + 73)), Random(seed * 139 + 79))


#: the share of the plans in which the layout may change
_WITH_LAYOUTS = 0.4
#: the share of these in which all scripts fail under the layout with which the job does not start
_FAILS = 0.25
#: faults that change the number of nodes, and faults that strike while the layout changes
_OTHER_NODES = (FaultKind.KILL_NODE, FaultKind.KILL_NODE, FaultKind.JOIN, FaultKind.JOIN, FaultKind.RETURN)
_WHILE_PUTTING = (
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_WORKER,
    FaultKind.CUT,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.SUPERSEDE,
    FaultKind.LAG_UP,
    FaultKind.HANG,
)


def _with_layouts(plan: FaultPlan, rng: Random) -> FaultPlan:
    """Return a plan that has two layouts in two of five cases, with faults while the layout changes.

    Nodes then have two or four workers. Some faults strike while the state is stashed, or while it is read again.
    """
    if rng.random() >= _WITH_LAYOUTS or plan.pooled or plan.restart:
        return plan
    workers = rng.choice((2, 2, 4))
    sizes = [size for size in (1, 2, 4) if size <= workers]
    first, second = rng.sample(sizes, 2)
    steps = max(plan.steps, rng.randint(8, 16))
    nodes, least = max(2, plan.nodes, plan.nodes_for_experts), max(1, plan.nodes_for_experts)
    several = tuple(
        Fault(kind=rng.choice(_OTHER_NODES), time=rng.uniform(0.1, 0.12 * steps), target=rng.randrange(64))
        for _ in range(rng.choice((2, 2, 3, 4)))
    )
    struck = tuple(
        Fault(
            kind=rng.choice(_WHILE_PUTTING),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5, 4.0)),
            boundary=rng.choice(("putting", "putting", "attach", "begun", "entered", "computing")),
        )
        for _ in range(rng.choice((0, 1, 1, 2)))
    )
    start_nodes, most = rng.randint(max(least, nodes - 1), nodes), rng.randint(max(2, nodes - 1), nodes)
    told = rng.random() < 0.8
    fails = rng.random() < _FAILS
    begun = second if told and start_nodes >= most else first
    return replace(
        plan,
        nodes=nodes,
        start_nodes=start_nodes,
        workers_per_node=workers,
        steps=steps,
        places=1,
        layouts=((1, first), (most, second)),
        told=told,
        faults=(*plan.faults[:3], *several, *struck),
        raises=Raises.UNDER if fails else plan.raises,
        raises_at=(first if begun == second else second, rng.randrange(3)) if fails else plan.raises_at,
    )


def _with_experts(plan: FaultPlan, rng: Random) -> FaultPlan:
    """Return a plan that has experts in one of four cases, some with just enough room for them."""
    if rng.random() >= _WITH_EXPERTS:
        return plan
    experts = rng.randint(2, 5)
    slots = rng.choice((0, 0, experts, -(-experts // min(2, plan.start_nodes))))
    return replace(plan, experts=experts, slots=slots, rebalance_every=rng.randint(1, 3))
