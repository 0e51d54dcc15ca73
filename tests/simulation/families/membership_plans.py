"""Fault plans with draining nodes and with standbys, while other faults strike."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.families.storm_plans import storm_plan
from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    power_plan,
    random_plan,
    wide_plan,
)

_BASES = (random_plan, random_plan, wide_plan, wide_plan, power_plan, memory_plan)
#: faults while a node drains
_KINDS = (
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_WORKER,
    FaultKind.RAISE,
    FaultKind.CUT,
    FaultKind.GLITCH,
    FaultKind.PARTITION,
    FaultKind.LAG_DOWN,
    FaultKind.LAG_UP,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
    FaultKind.RETURN,
)


def leaving_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which nodes are drained, one or more at a time, often with a fault soon after."""
    rng = Random(seed * 89 + 43)
    plan = rng.choice(_BASES)(seed)
    nodes, span = max(3, plan.nodes), 0.15 * plan.steps + 0.3
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.uniform(0.0, span)
        faults += (Fault(kind=FaultKind.DRAIN, time=at, target=rng.randrange(64)) for _ in range(rng.choice((1, 1, 2))))
        if rng.random() < 0.6:
            faults.append(_beside(rng, at))
        if rng.random() < 0.4:
            faults.append(Fault(kind=FaultKind.UNDRAIN, time=at + rng.choice((0.01, 0.1, 0.5, 1.5))))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=max(plan.start_nodes, rng.randint(2, nodes)),
        faults=(*plan.faults[: rng.choice((0, 0, 1))], *faults),
        crashes=plan.crashes if rng.random() < 0.6 else (),
    )


def standby_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which nodes are lost, and standbys as well, some while they warm up."""
    rng = Random(seed * 97 + 53)
    plan = rng.choice((*_BASES, storm_plan))(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.5
    faults = [
        Fault(
            kind=rng.choice(_KINDS if rng.random() < 0.4 else (FaultKind.KILL_NODE, FaultKind.SILENT_NODE)),
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5)),
            boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.3 else "",
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    return replace(
        plan,
        nodes=nodes,
        start_nodes=min(nodes, plan.start_nodes),
        standbys=rng.choice((1, 1, 2, 3)),
        cold_warm_ups=rng.choice((0, 0, 0, 1, 4)),
        on_loss=rng.choice(("auto", "auto", "standby", "shrink")),
        restart=plan.restart and rng.random() < 0.2,
        faults=(*plan.faults[: rng.choice((0, 0, 1, 3))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def move_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which one or more nodes at a time give their ranks to standbys, among other faults.

    Some nodes get a second request later, when they are standbys themselves, or have ranks again.
    """
    rng = Random(seed * 101 + 59)
    plan = rng.choice(_BASES)(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.5
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        at = rng.uniform(0.0, span)
        kind = FaultKind.MOVE if rng.random() < 0.8 else FaultKind.DRAIN
        faults += (Fault(kind=kind, time=at, target=rng.randrange(64)) for _ in range(rng.choice((1, 1, 2, 3))))
        if rng.random() < 0.6:
            faults.append(_beside(rng, at))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=min(nodes, plan.start_nodes),
        standbys=rng.choice((1, 1, 2, 3)),
        cold_warm_ups=rng.choice((0, 0, 0, 1)),
        on_loss=rng.choice(("auto", "auto", "standby", "shrink")),
        restart=False,
        faults=(*plan.faults[: rng.choice((0, 0, 0, 1))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def pooled_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which a pool recalls nodes of the job and grants others while faults strike."""
    rng = Random(seed * 109 + 71)
    plan = rng.choice((*_BASES, storm_plan))(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.5
    faults = [_beside(rng, rng.uniform(0.0, span)) for _ in range(rng.choice((0, 1, 1, 2)))]
    return replace(
        plan,
        nodes=nodes,
        start_nodes=min(nodes, plan.start_nodes),
        pooled=True,
        recalls=tuple(rng.uniform(0.0, span) for _ in range(rng.choice((0, 1, 2, 4)))),
        standbys=0,
        on_loss=rng.choice(("auto", "shrink")),
        restart=False,
        faults=(*plan.faults[: rng.choice((0, 0, 1, 3))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def reserve_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which a pool has standbys for the job, and recalls them or calls them to join."""
    rng, plan = Random(seed * 113 + 79), pooled_plan(seed)
    span = 0.15 * plan.steps + 0.5
    return replace(
        plan,
        standbys=rng.choice((1, 1, 2)),
        calls=tuple(rng.uniform(0.0, span) for _ in range(rng.choice((0, 0, 1, 2)))),
        on_loss=rng.choice(("auto", "auto", "standby", "shrink")),
        cold_warm_ups=rng.choice((0, 0, 1)),
    )


def pooled_move_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which a pool calls and recalls nodes while others are moved or told to end."""
    rng, plan = Random(seed * 127 + 83), reserve_plan(seed)
    steps = max(plan.steps, 16)  # A standby warms up, joins and replaces a node, which takes several steps.
    span = 0.15 * steps
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        at, kind = rng.uniform(0.8, span), FaultKind.MOVE if rng.random() < 0.8 else FaultKind.NOTICE
        faults.append(Fault(kind=kind, time=at, target=rng.randrange(64), duration=rng.choice((0.1, 0.5, 3.0))))
        if rng.random() < 0.4:
            faults.append(_beside(rng, at))
    return replace(
        plan,
        steps=steps,
        recalls=plan.recalls if rng.random() < 0.5 else (),
        calls=(*plan.calls, *(fault.time + rng.uniform(0.0, 0.5) for fault in faults if rng.random() < 0.3)),
        faults=(*plan.faults[: rng.choice((0, 0, 0, 1))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def notice_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which agents are told to end within a grace period. Some nodes return later."""
    rng = Random(seed * 103 + 61)
    plan = rng.choice(_BASES)(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.5
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 3))):
        at, grace_s = rng.uniform(0.0, span), rng.choice((0.01, 0.1, 0.5, 3.0))
        faults += (
            Fault(kind=FaultKind.NOTICE, time=at, target=rng.randrange(64), duration=grace_s)
            for _ in range(rng.choice((1, 1, 2)))
        )
        if rng.random() < 0.4:
            faults.append(_beside(rng, at))
        if rng.random() < 0.5:
            faults.append(Fault(kind=FaultKind.RETURN, time=at + rng.uniform(0.1, 4.0), target=rng.randrange(64)))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=min(nodes, plan.start_nodes),
        standbys=rng.choice((0, 0, 1, 2)),
        cold_warm_ups=rng.choice((0, 0, 0, 1)),
        on_loss=rng.choice(("auto", "auto", "standby", "shrink")),
        restart=False,
        faults=(*plan.faults[: rng.choice((0, 0, 0, 1))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def waiting_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which the job waits for lost nodes: for standbys, their return, or other nodes."""
    rng = Random(seed * 107 + 67)
    plan = rng.choice((*_BASES, storm_plan))(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.5
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.uniform(0.0, span)
        kind = rng.choice((FaultKind.KILL_NODE, FaultKind.KILL_NODE, FaultKind.SILENT_NODE, FaultKind.DRAIN))
        faults.append(Fault(kind=kind, time=at, target=rng.randrange(64)))
        if rng.random() < 0.4:
            faults.append(_beside(rng, at))
        if rng.random() < 0.5:
            comes = rng.choice((FaultKind.RETURN, FaultKind.JOIN))
            faults.append(Fault(kind=comes, time=at + rng.uniform(0.05, 3.0), target=rng.randrange(64)))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=min(nodes, plan.start_nodes),
        standbys=rng.choice((0, 0, 1, 2)),
        cold_warm_ups=rng.choice((0, 0, 0, 1)),
        on_loss="wait",
        restart=False,
        faults=(*plan.faults[: rng.choice((0, 0, 0, 1))], *faults),
        crashes=plan.crashes if rng.random() < 0.5 else (),
    )


def _beside(rng: Random, at: float) -> Fault:
    """Return a fault soon after the time `at`, or at a boundary."""
    boundary = rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.4 else ""
    return Fault(
        kind=rng.choice(_KINDS),
        time=at + rng.choice((0.0, 0.005, 0.02, 0.05, 0.1)),
        target=rng.randrange(64),
        duration=rng.choice((0.02, 0.3, 1.5)),
        boundary=boundary,
    )
