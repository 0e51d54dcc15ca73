"""The plan for the present state and for each possible next event (Unicron, section 5.2; Figure 7, triggers 3 to 6).

For one number of nodes, tables of the first and of the last jobs together answer each event in O(n): a job loses a
node, a job ends, a job starts (errata 1). `G` depends on the job that is hit, and on the number of nodes through
D_running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray
from holdfast.planning.waf.dividing import Split, best_splits, build_division_table, combine_groups, single_job_values
from holdfast.planning.waf.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class WafPlan:
    """How many nodes each job should have."""

    #: Nodes by job.
    sizes: Mapping[str, int]
    #: Weighted FLOP until the next failure (Eq. 3's first term).
    gain: float
    #: Weighted FLOP lost to the changes (its second term).
    cost: float
    #: Weighted achieved FLOP/s after the plan is carried out.
    waf: float
    #: The best other division; empty without one.
    next_best: Mapping[str, int] = field(default_factory=dict[str, int])
    #: How much less its value is, in weighted FLOP.
    given_up: float = 0.0

    @property
    def value(self) -> float:
        """The value that Eq. 3 maximises."""
        return self.gain - self.cost


class Planner:
    """All plans for one number of nodes, from tables that are made once, in O(m n^2)."""

    def __init__(self, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
        """Make the tables.

        Args:
            tasks: The jobs to plan.
            nodes: The nodes to share out.
            running_s: Seconds until the next failure (D_running).

        Raises:
            BadInputError: Two jobs have one name, or there are too few nodes for all floors.
        """
        check_tasks(tasks, nodes)
        self._tasks = list(tasks)
        self._nodes, self._running_s = nodes, running_s
        self._rewards = [task.reward(nodes, running_s) for task in tasks]
        had = [task.had for task in tasks]
        self._first = build_division_table(self._rewards, nodes, had, idle=False)
        self._last = build_division_table(self._rewards[::-1], nodes, had[::-1], idle=True)
        self._others: dict[int, FloatArray] = {}

    def plan(self) -> WafPlan:
        """Return the best plan for the tasks as they are, with the next best division as the alternative."""
        jobs = len(self._tasks)
        rows = [row for row in (0, 1) if self._last.best[jobs, row, self._nodes] > -np.inf]
        ways = [self._last.trace(jobs, self._nodes, row)[::-1] for row in rows]
        return _make_plan(self._tasks, ways, self._nodes, self._running_s)

    def plan_after_failure(self, name: str) -> WafPlan:
        """Return the best plan after the failure of one node of the job `name`.

        The planner's number of nodes does not change: make the planner with the nodes that remain after the failure.

        Raises:
            KeyError: There is no job of this name.
        """
        at = self._index(name)
        task = replace(self._tasks[at], hit=True)
        ways = self._best_ways(at, single_job_values(task.reward(self._nodes, self._running_s)))
        return _make_plan([*self._tasks[:at], task, *self._tasks[at + 1 :]], ways, self._nodes, self._running_s)

    def plan_after_end(self, name: str) -> WafPlan:
        """Return the best plan for the other jobs, with all nodes, after the end of the job `name`.

        Raises:
            KeyError: There is no job of this name.
        """
        at = self._index(name)
        nothing = np.full((2, self._nodes + 1), -np.inf)
        nothing[0, 0] = 0.0
        ways = [way[:at] + way[at + 1 :] for way in self._best_ways(at, nothing)]
        return _make_plan(self._tasks[:at] + self._tasks[at + 1 :], ways, self._nodes, self._running_s)

    def plan_with_job(self, task: Task) -> WafPlan:
        """Return the best plan with one more job, which gets at least its floor.

        Raises:
            BadInputError: Its name is in use, or there are too few nodes for all floors.
        """
        tasks = [*self._tasks, task]
        check_tasks(tasks, self._nodes)
        jobs = len(self._tasks)
        last = single_job_values(task.reward(self._nodes, self._running_s))
        found = best_splits(self._last.best[jobs], last, self._nodes, task.had)
        ways = [
            [*self._last.trace(jobs, self._nodes - pick.nodes, pick.rest)[::-1], pick.nodes]
            for pick in found
            if pick.value > -np.inf
        ]
        return _make_plan(tasks, ways, self._nodes, self._running_s)

    def _best_ways(self, at: int, of_it: FloatArray) -> list[list[int]]:
        """Return the two best divisions, best first, if job `at` has the values `of_it` `(2, n + 1)` instead of its
        own.

        A division has the nodes of each job, including job `at`. There are fewer than two if no other is possible.
        """
        if at not in self._others:
            self._others[at] = combine_groups(self._first.best[at], self._last.best[len(self._tasks) - at - 1])
        found = best_splits(self._others[at], of_it, self._nodes, self._tasks[at].had)
        return [self._complete_division(at, pick) for pick in found if pick.value > -np.inf]

    def _complete_division(self, at: int, pick: Split) -> list[int]:
        """Return the nodes of each job if job `at` has `pick.nodes` and the others share the rest.

        `pick.rest` selects the best (0) or the next best (1) division among the others.
        """
        left, after = self._nodes - pick.nodes, len(self._tasks) - at - 1
        split = best_splits(self._first.best[at], self._last.best[after], left)[pick.rest]
        before = self._first.trace(at, left - split.nodes, split.rest)
        return [*before, pick.nodes, *self._last.trace(after, split.nodes, split.last)[::-1]]

    def _index(self, name: str) -> int:
        """Return the index of the job of this name; raise `KeyError` if there is none."""
        for at, task in enumerate(self._tasks):
            if task.name == name:
                return at
        raise KeyError(name)


class BestDivisions:
    """The best division of any number of nodes up to a maximum, from tables that are made once."""

    def __init__(self, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
        """Make the tables; `nodes` is the maximum to share out, and the rest is as for `Planner`."""
        rewards, had = [task.reward(nodes, running_s) for task in tasks], [task.had for task in tasks]
        self._made = build_division_table(rewards, nodes, had, idle=True, next_best=False)
        self._jobs = len(tasks)
        #: `(nodes + 1,)` the value of the best division of that many nodes; -inf without a division.
        self.value: FloatArray = self._made.best[self._jobs, 0]

    def sizes(self, nodes: int) -> list[int]:
        """Return the nodes of each job in the best division of `nodes`, which must exist."""
        return self._made.trace(self._jobs, nodes, 0)


def best_plan(tasks: Sequence[Task], nodes: int, running_s: float, *, next_best: bool = True) -> WafPlan:
    """Return only the best plan, in far less time than the tables for all next events take.

    Args:
        tasks: The jobs to plan.
        nodes: The nodes to share out.
        running_s: Seconds until the next failure (D_running).
        next_best: Whether the plan includes the division that was given up.

    Raises:
        BadInputError: As for `Planner`.
    """
    check_tasks(tasks, nodes)
    if not next_best:
        return price_division(tasks, BestDivisions(tasks, nodes, running_s).sizes(nodes), nodes, running_s)
    rewards = [task.reward(nodes, running_s) for task in tasks]
    made = build_division_table(rewards, nodes, [task.had for task in tasks], idle=True)
    last = len(rewards)
    rows = [row for row in (0, 1) if made.best[last, row, nodes] > -np.inf]
    return _make_plan(tasks, [made.trace(last, nodes, row) for row in rows], nodes, running_s)


def _make_plan(tasks: Sequence[Task], ways: Sequence[Sequence[int]], nodes: int, running_s: float) -> WafPlan:
    """Return the plan for the first of `ways`, the divisions `(jobs,)` from best to worst.

    The alternative given up is the best of the other ways and of giving idle nodes to one job; it may be absent.
    """
    plan = price_division(tasks, ways[0], nodes, running_s)
    found = [*ways[1:], *_with_idle(tasks, ways[0], nodes, running_s)]
    others = [price_division(tasks, way, nodes, running_s) for way in found]
    other = max(others, key=lambda other: other.value, default=None)
    return plan if other is None else replace(plan, next_best=other.sizes, given_up=plan.value - other.value)


def _with_idle(tasks: Sequence[Task], sizes: Sequence[int], nodes: int, running_s: float) -> Iterator[list[int]]:
    """Yield the division `sizes` with some of its idle nodes added to the job that gains most, or loses least, by them.

    Yield nothing if no nodes are idle, or no job can run with more. Only such a division can contain a number of nodes
    that is not useful. With any other number, the job would be as well off with fewer nodes, and that division would be
    a better alternative.
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


def price_division(tasks: Sequence[Task], sizes: Sequence[int], nodes: int, running_s: float) -> WafPlan:
    """Return a division as a plan, with its gain, cost and WAF.

    Args:
        tasks: The jobs.
        sizes: The nodes of each job.
        nodes: The nodes that exist.
        running_s: Seconds until the next failure (D_running).
    """
    waf = sum(float(task.waf(nodes)[size]) for task, size in zip(tasks, sizes, strict=True))
    return WafPlan(
        sizes={task.name: int(size) for task, size in zip(tasks, sizes, strict=True)},
        gain=waf * running_s,
        cost=sum(task.loss_with(size) for task, size in zip(tasks, sizes, strict=True)),
        waf=waf,
    )


def check_tasks(tasks: Sequence[Task], nodes: int) -> None:
    """Check that these jobs can be planned together.

    Raises:
        BadInputError: Two jobs have one name, or there are too few nodes for all floors.
    """
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInputError(f"two jobs have the name {twice[0]!r}: give one of them another")
    floors = sum(task.kept for task in tasks)
    if floors > nodes:
        raise BadInputError(
            f"{nodes} nodes are too few: together the jobs need at least {floors}; lower a floor or add nodes"
        )
