"""Fault plans whose work takes its time: a micro-batch of a step is slow wherever it is computed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from holdfast.simulation.faults.plans import FaultPlan, random_plan

#: a worker is late after three times 0.02 s and the floor of 0.2 s, several at once after three times that
_SLOW_S = (0.2, 0.5, 1.0, 2.0)
#: by this step agents know what a micro-batch takes: they look twice a second
_LEARNT = 18


def work_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with slow work, mostly nothing else: nobody is taken out for it."""
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
        max_restarts=plan.max_restarts if beside else rng.choice((len(slow), plan.max_restarts)),
    )
