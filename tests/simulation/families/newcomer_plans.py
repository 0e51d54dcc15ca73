"""Fault plans with newcomers that no node can connect to, links that work in one direction, and bad senders."""

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
    wide_plan,
)

#: faults that make connections fail in one direction, and nothing else
_ONE_WAY = (FaultKind.JOIN_UNREACHABLE, FaultKind.JOIN_UNREACHABLE, FaultKind.BAD_SENDER, FaultKind.ONE_WAY)
#: faults that lead to state transfers
_JOINS = (FaultKind.JOIN, FaultKind.JOIN, FaultKind.KILL_WORKER, FaultKind.KILL_NODE, FaultKind.RETURN)
_DURATIONS_S = (0.3, 1.5, 6.0, 30.0)


def newcomer_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which connections fail in one direction, alone or with other faults."""
    rng = Random(seed * 113 + 61)
    plan = rng.choice((random_plan, random_plan, wide_plan))(seed)
    nodes, span = max(2, plan.nodes), 0.15 * plan.steps + 0.3
    faults = [_fault(rng, kind, span) for kind in rng.choices(_ONE_WAY, k=rng.choice((1, 1, 2, 3)))]
    faults += [_fault(rng, kind, span) for kind in rng.choices(_JOINS, k=rng.choice((0, 1, 2, 3)))]
    # Half of the plans have no other faults. The checker then knows which nodes may be expelled (`faults/one_way.py`).
    calm = rng.random() < 0.5
    kept = () if calm else plan.faults[: rng.choice((1, 2))]
    probes = rng.random() < 0.5
    # In some of the plans with probes, connections fail from the start; in half of these nothing else fails.
    apart = Random(seed * 127 + 71)
    blocked = _blocked(apart, nodes) if probes and apart.random() < 0.4 else ()
    if blocked and apart.random() < 0.5:
        calm, kept, faults = True, (), []
    return replace(
        plan,
        nodes=nodes,
        start_nodes=plan.start_nodes if plan.experts else rng.randint(1, nodes),
        steps=max(plan.steps, 5),
        faults=(*kept, *faults),
        crashes=() if calm else plan.crashes,
        max_restarts=rng.choice((1, 3, 100)),
        probes=probes,
        blocked=blocked,
    )


def _blocked(rng: Random, nodes: int) -> tuple[tuple[int, int], ...]:
    """Return the connections that fail from the start: of one or two nodes in one direction, or one link."""
    one, other = rng.sample(range(nodes), 2)
    return rng.choice((((-1, one),), ((one, -1),), ((one, other),), ((-1, one), (other, -1))))


def _fault(rng: Random, kind: FaultKind, span: float) -> Fault:
    joins = kind in (FaultKind.JOIN, FaultKind.JOIN_UNREACHABLE, FaultKind.RETURN)
    return Fault(
        kind=kind,
        time=rng.uniform(0.0, span),
        target=rng.randrange(64),
        duration=rng.choice(_DURATIONS_S) if kind in (FaultKind.BAD_SENDER, FaultKind.ONE_WAY) else 0.0,
        boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if not joins and rng.random() < 0.5 else "",
    )
