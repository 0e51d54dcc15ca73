"""How far each worker is, and how many of a plan's members are beyond a step: counted, not looked up one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Standings:
    """The newest step of which each worker is known to hold the state.

    To note one takes the same time, however many members there are.
    """

    def __init__(self, step: int) -> None:
        """Ask who is beyond `step`."""
        self._step = step
        self._of: dict[str, int] = {}
        self._members: frozenset[str] = frozenset()
        #: how many members are at each step; those who were not heard of are at none
        self._at: Counter[int] = Counter()
        #: how many members are not beyond `step`
        self._behind = 0

    @property
    def all_beyond(self) -> bool:
        """True where every member holds the state of a later step."""
        return bool(self._members) and not self._behind

    @property
    def all_there(self) -> bool:
        """True where every member holds the state of this step, and none that of a later one."""
        return self._at[self._step] == len(self._members)

    def of(self, worker: str) -> int | None:
        """Return a worker's step, None where it was not heard of."""
        return self._of.get(worker)

    def slowest(self, workers: Iterable[str]) -> int:
        """Return the least of some workers' steps; 0 where one was not heard of, or there is none."""
        return min((self._of.get(worker, 0) for worker in workers), default=0)

    def follow(self, members: Iterable[str]) -> None:
        """Count these from now on."""
        self._members = frozenset(members)
        self._count()

    def note(self, workers: Iterable[str], step: int) -> None:
        """These workers hold the state of `step`, or of a later one that was noted before."""
        of, members = self._of, self._members  # (all workers of a job come by here at every step)
        before, count = None, 0  # (a node's workers mostly come from one step: they are counted at once)
        for worker in workers:
            known = of.get(worker)
            if known is not None and known >= step:
                continue
            of[worker] = step
            if worker in members:
                if count and known != before:
                    self._move(before, step, count)
                    count = 0
                before, count = known, count + 1
        if count:
            self._move(before, step, count)

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        known = self._of.pop(worker, None)
        if known is not None and worker in self._members:
            self._at[known] -= 1
            self._behind += known > self._step

    def ask_next(self) -> None:
        """Ask who is beyond the step after this one."""
        self._step += 1
        self._behind += self._at[self._step]

    def go_back(self, step: int) -> None:
        """What was beyond `step` is void: whoever was there has no state that counts, until that of `step` has come."""
        self._of = {worker: known for worker, known in self._of.items() if known <= step}
        self._count()

    def reset(self, step: int) -> None:
        """Nobody holds anything that counts; ask who is beyond `step`."""
        self._step = step
        self._of.clear()
        self._count()

    def _move(self, known: int | None, step: int, count: int) -> None:
        """So many members have gone from one step to a later one; from None: they were not heard of."""
        was_behind = known is None or known <= self._step
        self._behind += count * ((step <= self._step) - was_behind)
        self._at[step] += count
        if known is not None:
            self._at[known] -= count
            if not self._at[known]:
                del self._at[known]

    def _count(self) -> None:
        self._at = Counter(step for worker in self._members if (step := self._of.get(worker)) is not None)
        self._behind = len(self._members) - sum(count for step, count in self._at.items() if step > self._step)
