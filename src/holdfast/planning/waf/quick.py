"""Eq. 5's best division alone, without the next best: the same one as `plan.best` says, in a fraction of its time.

A number of nodes with which a job gains no more than with fewer is left out: with the fewer it is as well off, and
those left over are worth something to others, or nothing. What a job had is always among its numbers, so that it keeps
it where all else is equal; of equals it has the fewest, as in `dividing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.waf.plan import WafPlan, check_tasks, price
from holdfast.planning.waf.task import Task


class QuickPlans:
    """The best division of any number of nodes up to some, by tables that are made once."""

    def __init__(self, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
        """Make the tables."""
        value = np.zeros(nodes + 1)
        self._took: list[IntArray] = []
        for task in tasks:
            reward = task.reward(nodes, running_s)
            value, taken = _with(value, reward, worth_having(reward, task.had))
            self._took.append(taken)
        #: `(nodes + 1,)`: what the best division of so many is worth, -inf where there is none
        self.value = value

    def sizes(self, nodes: int) -> list[int]:
        """Return what each job has of so many nodes, of which there is a division."""
        sizes: list[int] = []
        for taken in reversed(self._took):
            sizes.append(int(taken[nodes]))
            nodes -= sizes[-1]
        return sizes[::-1]


def quick_best(tasks: Sequence[Task], nodes: int, running_s: float) -> WafPlan:
    """Return the plan that `plan.best` makes, without its next best.

    Raises:
        BadInputError: as of `plan.best`.
    """
    check_tasks(tasks, nodes)
    return price(tasks, QuickPlans(tasks, nodes, running_s).sizes(nodes), nodes, running_s)


def worth_having(reward: FloatArray, had: int) -> IntArray:
    """Return the numbers of nodes that are worth more than every smaller one, ascending; first of all what it had."""
    before = np.concatenate([[-np.inf], np.maximum.accumulate(reward)[:-1]])
    more = np.flatnonzero(reward > before)
    if had < reward.size and reward[had] > -np.inf:
        more = np.concatenate([[had], more[more != had]])
    return more


def _with(before: FloatArray, reward: FloatArray, numbers: IntArray) -> tuple[FloatArray, IntArray]:
    """Add a job to those before it: the best value by the number of nodes, and how many of them it then has."""
    value = np.full(before.size, -np.inf)
    taken = np.zeros(before.size, dtype=np.int64)
    for number in numbers.tolist():
        offered = before[: before.size - number] + reward[number]
        here, at = value[number:], taken[number:]
        better = offered > here
        np.copyto(here, offered, where=better)
        at[better] = number
    return value, taken
