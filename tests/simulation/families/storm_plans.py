"""Fault plans with many faults at once: storms, a flapping node, faults during recoveries, clock jumps.

Other plans strike while only some workers have reduced a step: a worker that finishes the step may die before others
have its state.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.coverage import AT_WORKERS
from tests.simulation.faults.plans import OTHER_BOUNDARIES, STEP_BOUNDARIES, Fault, FaultKind, FaultPlan, random_plan

_KINDS = (
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_WORKER,
    FaultKind.RAISE,
    FaultKind.RAISE_APPLY,
    FaultKind.CUT,
    FaultKind.GLITCH,
    FaultKind.HANG,
    FaultKind.PARTITION,
    FaultKind.LAG_LISTENER,
    FaultKind.LAG_UP,
    FaultKind.LAG_DOWN,
    FaultKind.SLOW_DISK,
    FaultKind.FULL_DISK,
    FaultKind.SLOW_STORE,
    FaultKind.DAMAGE,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.POWER_CUT,
    FaultKind.PAUSE_COORDINATOR,
    FaultKind.SUPERSEDE,
    FaultKind.JOIN,
    FaultKind.RETURN,
)
#: boundaries during a recovery
_RECOVERING = ("stopped", "begun", "built", "entering", "entered", "receiving", "sending")

#: boundaries at which some workers are READY and others are not
_FIRST = ("reducing", "reduced", "reduced", "voted", "climbing")
_FIRST_KINDS = (FaultKind.KILL_NODE, FaultKind.KILL_WORKER, FaultKind.SILENT_NODE, FaultKind.GLITCH, FaultKind.HANG)
#: boundaries while the step is finished
_LATER = ("stopped", "begun", "built", "applying", "applied", "sending", "receiving", "adopting", "adopting", "entered")
_LATER_KINDS = (
    FaultKind.KILL_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_NODE,
    FaultKind.STOP_WORKER,
    FaultKind.RAISE_APPLY,
    FaultKind.CUT,
    FaultKind.PARTITION,
    FaultKind.LAG_LISTENER,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.JOIN,
)
_ANY = tuple(sorted(AT_WORKERS))


def storm_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with a storm, and perhaps a flapping node, faults during recoveries, or clock jumps."""
    plan, rng = random_plan(seed), Random(seed * 73 + 31)
    nodes, span = max(3, plan.nodes), 0.15 * plan.steps + 0.3
    faults = _storm(rng, span)
    if rng.random() < 0.5:
        target, since, apart = rng.randrange(64), rng.uniform(0.0, span), rng.choice((0.02, 0.1, 0.4))
        faults += (
            Fault(kind=FaultKind.CUT, time=since + number * apart, target=target) for number in range(rng.randint(2, 8))
        )
    for _ in range(rng.choice((0, 1, 2))):
        faults.append(replace(_fault(rng, 0.0), boundary=rng.choice(_RECOVERING)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.uniform(0.0, span)
        ends = rng.choice((FaultKind.CRASH_COORDINATOR, FaultKind.SUPERSEDE, FaultKind.POWER_CUT))
        faults.append(Fault(kind=FaultKind.CLOCK_JUMP, time=at, target=rng.randrange(64)))
        faults.append(Fault(kind=ends, time=at + 0.01, duration=rng.choice((0.02, 0.3, 1.5))))
    return replace(
        plan,
        nodes=nodes,
        start_nodes=rng.randint(2, nodes),
        faults=(*plan.faults[: rng.choice((0, 0, 1))], *faults),
        crashes=(),
        hold=rng.random() < 0.3,
    )


def _storm(rng: Random, span: float) -> list[Fault]:
    """Return faults that all strike within half a second, or at boundaries."""
    at = rng.uniform(0.0, span)
    return [_fault(rng, at + rng.uniform(0.0, 0.5)) for _ in range(rng.choice((2, 3, 4, 6)))]


def _fault(rng: Random, at: float) -> Fault:
    boundary = rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.3 else ""
    return Fault(
        kind=rng.choice(_KINDS),
        time=at,
        target=rng.randrange(64),
        duration=rng.choice((0.02, 0.3, 0.7, 1.5, 4.0)),
        boundary=boundary,
    )


def ready_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with a fault during the reduction of a step, and others while the step is finished."""
    rng = Random(seed * 83 + 41)
    plan = random_plan(seed)
    nodes, step = rng.randint(3, 5), rng.randint(1, plan.steps)
    first = Fault(
        kind=rng.choice(_FIRST_KINDS),
        target=rng.randrange(64),
        duration=rng.choice((0.3, 1.5)),
        boundary=rng.choice(_FIRST),
        step=step,
    )
    later = [
        Fault(
            kind=rng.choice(_LATER_KINDS if rng.random() < 0.7 else _ANY),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 1.5, 4.0)),
            boundary=boundary,
        )
        for boundary in rng.choices(_LATER, k=rng.choice((1, 1, 2, 3)))
    ]
    return replace(
        plan,
        nodes=nodes,
        start_nodes=nodes,
        fan_out=rng.choice((0, 0, 0, 2)),
        logs=rng.random() < 0.3,
        faults=(first, *later, *plan.faults[: rng.choice((0, 0, 1))]),
    )
