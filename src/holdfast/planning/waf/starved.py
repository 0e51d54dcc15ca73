"""Whom the weights leave with nothing, as Eq. 3 is printed (errata 4): for whose sake, and how much it falls short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.planning.waf.plan import best
from holdfast.planning.waf.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """What a job would need not to be left with nothing.

    to: who has more nodes for that, and how many more. short: weighted FLOP until the next failure that the plan would
    be worth less if the job had its least. times: its weight times that would do; 0 where none would, as it achieves
    nothing with any number of nodes that there is.
    """

    to: Mapping[str, int]
    short: float
    times: float


def starved(tasks: Sequence[Task], nodes: int, running_s: float) -> dict[str, Shortfall]:
    """Return those without a floor that the best plan gives nothing, though there are nodes enough for their least.

    Raises:
        BadInputError: as of `plan.best`.
    """
    plan = best(tasks, nodes, running_s, next_best=False)
    kept = sum(task.kept for task in tasks)
    found: dict[str, Shortfall] = {}
    for at, task in enumerate(tasks):
        fed = replace(task, floor=max(task.least, 1))
        if plan.sizes[task.name] or kept + fed.kept > nodes or not task.fits(nodes - kept).any():
            continue
        other = best([*tasks[:at], fed, *tasks[at + 1 :]], nodes, running_s, next_best=False)
        reward = task.reward(nodes, running_s)
        short, own = plan.value - other.value, float(reward[other.sizes[task.name]] - reward[0])
        more = {name: size - other.sizes[name] for name, size in plan.sizes.items() if size > other.sizes[name]}
        found[task.name] = Shortfall(to=more, short=short, times=1.0 + short / own if own > 0 else 0.0)
    return found
