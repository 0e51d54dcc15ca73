"""The allocation of nodes to jobs, as a simulation queries it, and section 7.5's rule for systems that plan nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from holdfast.planner.fleet.pool.tasks import FleetTask


class NodeShares(Protocol):
    """The owner of each node. Each change returns the jobs with other nodes than before."""

    def owner_of(self, node: str) -> str | None:
        """Return the job that has a node, or None."""
        ...

    def size_of(self, job: str) -> int:
        """Return how many nodes a job trains on, or could train on."""
        ...

    def remove_node(self, node: str, now: float) -> frozenset[str]:
        """Remove a node that is seen to be lost. `now` is in seconds of the simulation."""
        ...

    def add_node(self, node: str, now: float) -> frozenset[str]:
        """Add a node that is up, perhaps again. `now` is in seconds of the simulation."""
        ...


class HitShares:
    """The allocation by section 7.5: a failure changes only the job that it hits.

    A returning node goes to the job that was hit first. Spares replace lost nodes. A returning node that no job lacks
    becomes a spare.
    """

    def __init__(self, tasks: Sequence[FleetTask], first: Mapping[str, str], spares: Sequence[str]) -> None:
        """Start with all nodes up.

        Args:
            first: the job of each node.
            spares: nodes that wait to replace lost ones.
        """
        self._owner = dict(first)
        self._sizes = {task.name: 0 for task in tasks}
        for job in first.values():
            self._sizes[job] += 1
        self._spares = list(spares)
        self._lacking: list[str] = []

    def owner_of(self, node: str) -> str | None:
        """Return the job that has a node, or None."""
        return self._owner.get(node)

    def size_of(self, job: str) -> int:
        """Return how many nodes a job has."""
        return self._sizes[job]

    def remove_node(self, node: str, now: float) -> frozenset[str]:
        """Remove a lost node. The first spare replaces it; without one, its job waits for a returning node.

        Return the job in a set, which is empty if the node was a spare or unknown.
        """
        if node in self._spares:
            self._spares.remove(node)
        job = self._owner.pop(node, None)
        if job is None:
            return frozenset()
        self._sizes[job] -= 1
        if self._spares:
            self._assign(self._spares.pop(0), job)
        else:
            self._lacking.append(job)
        return frozenset((job,))

    def add_node(self, node: str, now: float) -> frozenset[str]:
        """Give a returning node to the job that has lacked one for longest, and return that job in a set.

        If no job lacks one, the node becomes a spare, and the set is empty.
        """
        if not self._lacking:
            self._spares.append(node)
            return frozenset()
        job = self._lacking.pop(0)
        self._assign(node, job)
        return frozenset((job,))

    def _assign(self, node: str, job: str) -> None:
        """Set the node's job, and count the node to the job's size."""
        self._owner[node] = job
        self._sizes[job] += 1
