"""The jobs that Eq. 3 as printed leaves without nodes because of their weights (errata 4).

For each, it reports which jobs have its nodes and how much it falls short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.planning.waf.plan import best_plan
from holdfast.planning.waf.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """How much weight a job without nodes lacks to get some, and which jobs get its nodes instead."""

    #: The jobs that have more nodes because of this, and how many more.
    to: Mapping[str, int]
    #: Weighted FLOP until the next failure that the plan would lose if the job had its least.
    short: float
    #: The factor on its weight that would be enough; 0 if none is, since the job achieves nothing with any possible
    #: number of nodes.
    times: float


def find_shortfalls(tasks: Sequence[Task], nodes: int, running_s: float) -> dict[str, Shortfall]:
    """Return a shortfall for each job that the best plan leaves without nodes, by the job's name.

    It compares the best plan with the one in which the job has its least number of nodes. Jobs are left out if the
    nodes that floors leave would not suffice for it.

    Raises:
        BadInputError: As for `best_plan`.
    """
    plan = best_plan(tasks, nodes, running_s, next_best=False)
    kept = sum(task.kept for task in tasks)
    found: dict[str, Shortfall] = {}
    for at, task in enumerate(tasks):
        fed = replace(task, floor=max(task.least, 1))
        if plan.sizes[task.name] or kept + fed.kept > nodes or not task.fits(nodes - kept).any():
            continue
        other = best_plan([*tasks[:at], fed, *tasks[at + 1 :]], nodes, running_s, next_best=False)
        reward = task.reward(nodes, running_s)
        short, own = plan.value - other.value, float(reward[other.sizes[task.name]] - reward[0])
        more = {name: size - other.sizes[name] for name, size in plan.sizes.items() if size > other.sizes[name]}
        found[task.name] = Shortfall(to=more, short=short, times=1.0 + short / own if own > 0 else 0.0)
    return found
