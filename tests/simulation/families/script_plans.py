"""Fault plans with faulty scripts: one raises now and then, or all raise at the same work.

In other plans a script asks the job to stop before its last step, or gradients are not finite.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults.plans import (
    OTHER_BOUNDARIES,
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    Raises,
    lively_plan,
    random_plan,
    wide_plan,
)


def beginning_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which the script raises before its first step on all nodes, however slow they are.

    This ends the job. No node is blamed unless another fault strikes it.
    """
    plan, rng = raising_plan(seed), Random(seed * 79 + 37)
    return replace(
        plan,
        raises=Raises.BEFORE,
        raises_at=(0, 0),
        faults=plan.faults if rng.random() < 0.5 else (),
        crashes=plan.crashes if rng.random() < 0.5 else (),
        start_spread=rng.choice((0.0, 0.05, 1.0, 5.0)),
        max_restarts=rng.choice((0, 1, 3, 5)),
        hold=rng.random() < 0.3,
    )


def raising_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which scripts raise, alone or with a few other faults.

    A script that cannot compute a sample or a step ends the job. Other scripts start again.
    """
    plan, rng = random_plan(seed), Random(seed * 67 + 23)
    span = 0.15 * plan.steps + 0.3
    once = tuple(
        Fault(
            kind=FaultKind.RAISE,
            time=rng.uniform(0.0, span),
            target=rng.randrange(64),
            boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES)) if rng.random() < 0.5 else "",
        )
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    )
    return replace(
        plan,
        checkpoint_every=rng.choice((0, 1, 2, 3)),
        faults=(*plan.faults[: rng.choice((0, 0, 0, 1, 2))], *once),
        restart=rng.random() < 0.1,
        crashes=plan.crashes if rng.random() < 0.5 else (),
        raises=rng.choice((Raises.NOTHING, Raises.SAMPLE, Raises.SAMPLE, Raises.STEP, Raises.APPLY)),
        raises_at=(rng.randint(1, plan.steps), rng.randrange(plan.micro_batches)),
    )


def stopping_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which a script asks all workers to stop after a step, while other faults strike."""
    rng = Random(seed * 71 + 3)
    plan = rng.choice((random_plan, random_plan, wide_plan, lively_plan))(seed)
    return replace(plan, stops_at=rng.randint(1, plan.steps), checkpoint_every=rng.choice((0, 1, 3)), leaves=False)


def skipping_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which all gradients are NaN from some step on, among other faults.

    The job fails after a number of such steps. Its newest checkpoint is that of the last good step.
    """
    rng = Random(seed * 83 + 41)
    plan = rng.choice((random_plan, random_plan, wide_plan, lively_plan))(seed)
    kept = rng.choice((0, 0, 1, 2, len(plan.faults)))
    return replace(
        plan,
        faults=plan.faults[:kept],
        crashes=plan.crashes if rng.random() < 0.5 else (),
        skips_from=rng.randint(1, plan.steps),
        max_skipped=rng.choice((0, 1, 2, 3)),
        checkpoint_every=rng.choice((0, 1, 2, 3)),
    )
