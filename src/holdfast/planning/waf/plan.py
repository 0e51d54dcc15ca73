"""The plan for what has happened, and for all that can happen next (Unicron, section 5.2 and Figure 7's triggers 3-6).

For a number of nodes, tables of the jobs' first and last ones together answer who-is-hit, who-has-ended and
who-has-come at O(n) each (errata 1): `G` depends on who is hit, and through D_running on the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray
from holdfast.planning.waf.dividing import Pick, alone, both, chain, picks
from holdfast.planning.waf.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class WafPlan:
    """How many nodes each job is to have.

    sizes: by job. gain: weighted FLOP until the next failure (Eq. 3's first term); cost: weighted FLOP that the changes
    keep from being done (its second). waf: weighted achieved FLOP/s once it is carried out. next_best: the best other
    division, {} where there is none; given_up: how much less it is worth, weighted FLOP.
    """

    sizes: Mapping[str, int]
    gain: float
    cost: float
    waf: float
    next_best: Mapping[str, int] = field(default_factory=dict[str, int])
    given_up: float = 0.0

    @property
    def value(self) -> float:
        """What Eq. 3 maximises."""
        return self.gain - self.cost


class Planner:
    """All plans for one number of nodes, from tables that are made once, in O(m n^2)."""

    def __init__(self, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
        """Make the tables.

        Args:
            tasks: those that are to have nodes. nodes: to share out. running_s: until the next failure (D_running).

        Raises:
            BadInputError: two jobs have one name, or there are too few nodes for all floors.
        """
        check_tasks(tasks, nodes)
        self._tasks = list(tasks)
        self._nodes, self._running_s = nodes, running_s
        self._rewards = [task.reward(nodes, running_s) for task in tasks]
        had = [task.had for task in tasks]
        self._first = chain(self._rewards, nodes, had, idle=False)
        self._last = chain(self._rewards[::-1], nodes, had[::-1], idle=True)
        self._others: dict[int, FloatArray] = {}

    def plan(self) -> WafPlan:
        """Return the best plan where all are as they were told."""
        jobs = len(self._tasks)
        rows = [row for row in (0, 1) if self._last.best[jobs, row, self._nodes] > -np.inf]
        ways = [self._last.trace(jobs, self._nodes, row)[::-1] for row in rows]
        return _told(self._tasks, ways, self._nodes, self._running_s)

    def hit(self, name: str) -> WafPlan:
        """Return the best plan where one node of this job has failed: `nodes` are those that are left."""
        at = self._index(name)
        task = replace(self._tasks[at], hit=True)
        ways = self._ways(at, alone(task.reward(self._nodes, self._running_s)))
        return _told([*self._tasks[:at], task, *self._tasks[at + 1 :]], ways, self._nodes, self._running_s)

    def ended(self, name: str) -> WafPlan:
        """Return the best plan once this job is over."""
        at = self._index(name)
        nothing = np.full((2, self._nodes + 1), -np.inf)
        nothing[0, 0] = 0.0
        ways = [way[:at] + way[at + 1 :] for way in self._ways(at, nothing)]
        return _told(self._tasks[:at] + self._tasks[at + 1 :], ways, self._nodes, self._running_s)

    def begun(self, task: Task) -> WafPlan:
        """Return the best plan with one job more, which has its floor at the least.

        Raises:
            BadInputError: its name is in use, or there are too few nodes for all floors.
        """
        tasks = [*self._tasks, task]
        check_tasks(tasks, self._nodes)
        jobs = len(self._tasks)
        last = alone(task.reward(self._nodes, self._running_s))
        found = picks(self._last.best[jobs], last, self._nodes, task.had)
        ways = [
            [*self._last.trace(jobs, self._nodes - pick.nodes, pick.rest)[::-1], pick.nodes]
            for pick in found
            if pick.value > -np.inf
        ]
        return _told(tasks, ways, self._nodes, self._running_s)

    def _ways(self, at: int, of_it: FloatArray) -> list[list[int]]:
        """Return the two best divisions where job `at` is worth `of_it` `(2, n + 1)`."""
        if at not in self._others:
            self._others[at] = both(self._first.best[at], self._last.best[len(self._tasks) - at - 1])
        found = picks(self._others[at], of_it, self._nodes, self._tasks[at].had)
        return [self._around(at, pick) for pick in found if pick.value > -np.inf]

    def _around(self, at: int, pick: Pick) -> list[int]:
        """Return everyone's nodes where job `at` has the pick's, and the others share what is left in that way."""
        left, after = self._nodes - pick.nodes, len(self._tasks) - at - 1
        split = picks(self._first.best[at], self._last.best[after], left)[pick.rest]
        before = self._first.trace(at, left - split.nodes, split.rest)
        return [*before, pick.nodes, *self._last.trace(after, split.nodes, split.last)[::-1]]

    def _index(self, name: str) -> int:
        for at, task in enumerate(self._tasks):
            if task.name == name:
                return at
        raise KeyError(name)


class AnyNumber:
    """The best division of any number of nodes up to some, by tables that are made once."""

    def __init__(self, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
        """Make the tables; the arguments are those of `Planner`, with the most nodes that are to be shared out."""
        rewards, had = [task.reward(nodes, running_s) for task in tasks], [task.had for task in tasks]
        self._made = chain(rewards, nodes, had, idle=True, next_best=False)
        self._jobs = len(tasks)
        #: `(nodes + 1,)`: what the best division of so many is worth, -inf where there is none
        self.value: FloatArray = self._made.best[self._jobs, 0]

    def sizes(self, nodes: int) -> list[int]:
        """Return what each job has of so many nodes, of which there is a division."""
        return self._made.trace(self._jobs, nodes, 0)


def best(tasks: Sequence[Task], nodes: int, running_s: float, *, next_best: bool = True) -> WafPlan:
    """Return the best plan alone, in far less time than tables for all that can happen next take.

    Args:
        next_best: what was given up for it is wanted, too.

    Raises:
        BadInputError: as of `Planner`.
    """
    check_tasks(tasks, nodes)
    if not next_best:
        return price(tasks, AnyNumber(tasks, nodes, running_s).sizes(nodes), nodes, running_s)
    rewards = [task.reward(nodes, running_s) for task in tasks]
    made = chain(rewards, nodes, [task.had for task in tasks], idle=True)
    last = len(rewards)
    rows = [row for row in (0, 1) if made.best[last, row, nodes] > -np.inf]
    return _told(tasks, [made.trace(last, nodes, row) for row in rows], nodes, running_s)


def _told(tasks: Sequence[Task], ways: Sequence[Sequence[int]], nodes: int, running_s: float) -> WafPlan:
    """Return the first of two ways to share the nodes out, with the best other one as what was given up for it."""
    plan = price(tasks, ways[0], nodes, running_s)
    found = [*ways[1:], *_with_idle(tasks, ways[0], nodes, running_s)]
    others = [price(tasks, way, nodes, running_s) for way in found]
    other = max(others, key=lambda other: other.value, default=None)
    return plan if other is None else replace(plan, next_best=other.sizes, given_up=plan.value - other.value)


def _with_idle(tasks: Sequence[Task], sizes: Sequence[int], nodes: int, running_s: float) -> Iterator[list[int]]:
    """Return the best way in which one job has some of the idle nodes as well, though it gains nothing by them.

    Only so a number that is not worth having can be in the next best division: with any other the job would be as well
    off with fewer, and that were a division that is neither the best.
    """
    idle = nodes - sum(sizes)
    if idle <= 0:
        return
    best, found = -np.inf, None
    for at, (task, size) in enumerate(zip(tasks, sizes, strict=True)):
        reward = task.reward(nodes, running_s)
        more = reward[size + 1 : size + 1 + idle]
        if more.size and (gained := float(more.max() - reward[size])) > best:
            best, found = gained, (at, size + 1 + int(more.argmax()))
    if found is not None:
        yield [found[1] if at == found[0] else size for at, size in enumerate(sizes)]


def price(tasks: Sequence[Task], sizes: Sequence[int], nodes: int, running_s: float) -> WafPlan:
    """Return what a division is worth, whoever made it.

    Args:
        sizes: of each job. nodes: that there are. running_s: until the next failure.
    """
    waf = sum(float(task.waf(nodes)[size]) for task, size in zip(tasks, sizes, strict=True))
    return WafPlan(
        sizes={task.name: int(size) for task, size in zip(tasks, sizes, strict=True)},
        gain=waf * running_s,
        cost=sum(task.loss_with(size) for task, size in zip(tasks, sizes, strict=True)),
        waf=waf,
    )


def check_tasks(tasks: Sequence[Task], nodes: int) -> None:
    """Refuse jobs that cannot be planned together.

    Raises:
        BadInputError: two have one name, or there are too few nodes for all floors.
    """
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInputError(f"two jobs have the name {twice[0]!r}: give one of them another")
    floors = sum(task.kept for task in tasks)
    if floors > nodes:
        raise BadInputError(f"{nodes} nodes are too few: together the jobs keep {floors} at the least")
