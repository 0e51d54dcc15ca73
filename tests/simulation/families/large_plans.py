"""Fault plans of large jobs.

They have more nodes than other plans, racks that fail, many nodes that join together, and a coordinator with a slow
processor.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import (
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    power_plan,
    random_plan,
    slow_plan,
    wide_plan,
)

#: The coordinator's processor time for one received message, and for one sent message, in seconds. Measured with
#: benchmarks/control_plane.py: the loss of one of 256 nodes means 5,700 messages in, 1,000 out, and 0.36 s.
HANDLE_S, SEND_S = 60e-6, 30e-6

LARGE_NODES = range(33, 129)
#: faults spread over a whole job: the kinds that leave enough nodes, and the kinds that bring nodes
_ALONG = (
    FaultKind.KILL_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.RETURN,
    FaultKind.SILENT_NODE,
    FaultKind.JOIN,
    FaultKind.STOP_NODE,
    FaultKind.KILL_NODE,
    FaultKind.CUT,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.RETURN,
)


def large_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with 33 to 128 nodes. Faults also strike whole racks, and many nodes join at once."""
    rng = Random(seed * 59 + 17)
    plan = rng.choice((random_plan, random_plan, wide_plan, slow_plan, power_plan))(seed)
    nodes = rng.choice(LARGE_NODES)
    span = 0.15 * plan.steps + 0.3
    faults = [replace(fault, target=rng.randrange(nodes)) for fault in plan.faults]
    for _ in range(rng.choice((0, 1, 1, 2))):
        faults += _many(rng, nodes, rng.uniform(0.0, span))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=rng.randint(nodes // 2, nodes),
        workers_per_node=1 if plan.ep_size else rng.choice((1, 1, 1, 2)),
        steps=min(plan.steps, 5),
        micro_batches=rng.choice((nodes // 2, nodes, 2 * nodes)),
        faults=tuple(faults),
        crashes=tuple(crash * nodes // max(1, plan.nodes) for crash in plan.crashes),
        handle_s=HANDLE_S,
        send_s=SEND_S,
    )


def _many(rng: Random, nodes: int, time: float) -> list[Fault]:
    """Return the same fault for many nodes: a rack fails or is stopped, or nodes join or return."""
    kinds = (FaultKind.KILL_NODE, FaultKind.SILENT_NODE, FaultKind.STOP_NODE, FaultKind.JOIN, FaultKind.RETURN)
    kind, first, duration = rng.choice(kinds), rng.randrange(nodes), rng.choice((0.2, 1.5))
    spread = rng.choice((0.0, 0.02))
    return [
        Fault(kind=kind, time=time + rng.uniform(0.0, spread), target=first + place, duration=duration)
        for place in range(rng.randint(2, nodes // 4))
    ]


def plan_of_size(seed: int, nodes: int, steps: int, faults: int) -> FaultPlan:
    """Return the plan of a job of any size, with single faults at equal distances along its steps."""
    rng = Random(seed)
    targets = rng.sample(range(nodes), k=min(faults, nodes))
    return FaultPlan(
        seed=seed,
        nodes=nodes,
        start_nodes=nodes,
        steps=steps,
        micro_batches=2 * nodes,
        faults=tuple(
            Fault(
                kind=_ALONG[place % len(_ALONG)],
                target=targets[place % len(targets)],
                duration=0.5,
                boundary=rng.choice(STEP_BOUNDARIES),
                step=1 + (place + 1) * steps // (faults + 1),
            )
            for place in range(faults)
        ),
        handle_s=HANDLE_S,
        send_s=SEND_S,
    )
