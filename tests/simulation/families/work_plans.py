"""Fault plans with slow work: one micro-batch is slow on every node, or all micro-batches are slow on one node."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan

#: One worker is late after three times 0.02 s and the floor of 0.2 s, several at once after three times that.
_SLOW_S = (0.2, 0.5, 1.0, 2.0)
#: by this step, agents know how long a micro-batch takes: they measure twice a second
_LEARNT = 18


def work_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with slow work, usually without other faults. No node is removed because of it."""
    plan, rng = random_plan(seed), Random(seed * 83 + 41)
    steps, nodes = rng.randint(24, 40), max(2, min(plan.nodes, 5))
    beside, slow = rng.random() < 0.3, rng.sample(range(_LEARNT, steps), rng.choice((1, 1, 2, 3)))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=nodes,
        steps=steps,
        start_spread=0.05,
        slow_work=tuple((step, rng.randrange(plan.micro_batches)) for step in slow),
        slow_work_s=rng.choice(_SLOW_S),
        hold=rng.random() < 0.3,
        faults=plan.faults[:2] if beside else (),
        crashes=plan.crashes if beside else (),
        max_restarts=plan.max_restarts if beside else rng.choice((0, plan.max_restarts)),
    )


#: A node reports its times every five seconds. Steps take a second or more, and each job has enough of them.
_WORK_S, _STEPS = 0.5, (40, 90)
#: other faults in the same plan
_BESIDE = (
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_NODE,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.CUT,
    FaultKind.JOIN,
    FaultKind.DRAIN,
    FaultKind.MOVE,
)


def straggler_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which nodes become slow, temporarily or permanently.

    Most plans have standbys for them.
    """
    plan, rng = random_plan(seed), Random(seed * 107 + 67)
    nodes, steps = rng.randint(2, 5), rng.randint(*_STEPS)
    span = 2.0 * _WORK_S * steps
    slow = [
        Fault(
            kind=FaultKind.SLOW_NODE,
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            duration=rng.choice((5.0, 30.0, 200.0)),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    beside = [
        Fault(
            kind=rng.choice(_BESIDE),
            time=rng.choice(slow).time + rng.choice((0.0, 1.0, 5.0, 6.0, 8.0, 12.0)) + rng.random(),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5)),
        )
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]
    return replace(
        plan,
        nodes=nodes,
        start_nodes=nodes,
        workers_per_node=1,
        steps=steps,
        micro_batches=2 * nodes,
        work_s=_WORK_S,
        stragglers=rng.choice(("move", "move", "move", "ask", "off")),
        standbys=rng.choice((0, 1, 1, 2)),
        cold_warm_ups=rng.choice((0, 0, 1)),
        faults=(*slow, *beside),
        crashes=tuple(sorted(rng.randint(1, 400) for _ in range(rng.choice((0, 0, 1, 2))))),
    )
