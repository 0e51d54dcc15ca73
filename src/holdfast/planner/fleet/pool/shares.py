"""Who has which nodes, as a simulation asks; and section 7.5's rule for systems that plan nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from holdfast.planner.fleet.pool.tasks import FleetTask


class NodeShares(Protocol):
    """Which node is whose. Every change returns the jobs whose nodes it has changed."""

    def owner(self, node: str) -> str | None:
        """Return the job that has a node, None where nobody does."""
        ...

    def size(self, job: str) -> int:
        """Return how many nodes a job trains on, or could."""
        ...

    def lose(self, node: str, now: float) -> frozenset[str]:
        """A node is seen to be lost."""
        ...

    def back(self, node: str, now: float) -> frozenset[str]:
        """A node is there (again)."""
        ...


class HitShares:
    """Section 7.5: only the job that is hit is changed, and a node that is back goes to the one that was hit first.

    Spares take the place of nodes that are lost; then a node that is back, and that nobody lacks, is one.
    """

    def __init__(self, tasks: Sequence[FleetTask], first: Mapping[str, str], spares: Sequence[str]) -> None:
        """Begin.

        Args:
            first: whose each node is.
        """
        self._owner = dict(first)
        self._sizes = {task.name: 0 for task in tasks}
        for job in first.values():
            self._sizes[job] += 1
        self._spares = list(spares)
        self._lacking: list[str] = []

    def owner(self, node: str) -> str | None:
        """Return the job that has a node."""
        return self._owner.get(node)

    def size(self, job: str) -> int:
        """Return how many nodes a job has."""
        return self._sizes[job]

    def lose(self, node: str, now: float) -> frozenset[str]:
        """A node is lost: a spare takes its place, or its job lacks one."""
        if node in self._spares:
            self._spares.remove(node)
        job = self._owner.pop(node, None)
        if job is None:
            return frozenset()
        self._sizes[job] -= 1
        if self._spares:
            self._give(self._spares.pop(0), job)
        else:
            self._lacking.append(job)
        return frozenset((job,))

    def back(self, node: str, now: float) -> frozenset[str]:
        """A node is there: whoever has lacked one longest has it."""
        if not self._lacking:
            self._spares.append(node)
            return frozenset()
        job = self._lacking.pop(0)
        self._give(node, job)
        return frozenset((job,))

    def _give(self, node: str, job: str) -> None:
        self._owner[node] = job
        self._sizes[job] += 1
