"""Tracks the step of each worker, and counts how many members of a plan have passed a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class WorkerProgress:
    """The newest step that each worker is known to have applied.

    `record_step` takes constant time per worker, however many members there are.
    """

    def __init__(self, step: int) -> None:
        """Start without workers, and count the members that are beyond `step`."""
        self._step = step
        self._of: dict[str, int] = {}
        self._members: frozenset[str] = frozenset()
        #: the number of members at each step; members without a known step are not counted
        self._at: Counter[int] = Counter()
        #: the number of members that are not beyond `step`
        self._behind = 0

    @property
    def all_beyond(self) -> bool:
        """Whether all members have the state of a later step."""
        return bool(self._members) and not self._behind

    @property
    def all_there(self) -> bool:
        """Whether all members have the state of exactly this step."""
        return self._at[self._step] == len(self._members)

    def of(self, worker: str) -> int | None:
        """Return a worker's step, or None if it is unknown."""
        return self._of.get(worker)

    def slowest(self, workers: Iterable[str]) -> int:
        """Return the smallest step of these workers, or 0 if one is unknown or the list is empty."""
        return min((self._of.get(worker, 0) for worker in workers), default=0)

    def follow(self, members: Iterable[str]) -> None:
        """Count these members from now on."""
        self._members = frozenset(members)
        self._count()

    def record_step(self, workers: Iterable[str], step: int) -> None:
        """Record that these workers have the state of `step`, unless they already have a later one."""
        # This runs for all workers of a job at every step. A node's workers are mostly at the same step, so they are
        # counted together.
        of, members = self._of, self._members
        before, count = None, 0
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
        """Remove a worker that is gone. A member without a known step counts as not beyond the step."""
        known = self._of.pop(worker, None)
        if known is not None and worker in self._members:
            self._at[known] -= 1
            self._behind += known > self._step

    def ask_next(self) -> None:
        """Count the members that are beyond the next step."""
        self._step += 1
        self._behind += self._at[self._step]

    def go_back(self, step: int) -> None:
        """Forget the workers that were beyond `step`: their state is void until they receive that of `step`."""
        self._of = {worker: known for worker, known in self._of.items() if known <= step}
        self._count()

    def reset(self, step: int) -> None:
        """Forget the steps of all workers. From now on, count the members that are beyond `step`: at first none."""
        self._step = step
        self._of.clear()
        self._count()

    def _move(self, known: int | None, step: int, count: int) -> None:
        """Move this many members from one step to a later one. `known` is None if their step was unknown."""
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
