"""Which nodes are there, and how many of them train: the same for every way to recover."""

from __future__ import annotations

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change


class Nodes:
    """The nodes that are up; as many of them train as the job has, the others stand by."""

    def __init__(self, case: FleetCase, away: frozenset[int]) -> None:
        self._case = case
        self._up = case.all_nodes - len(away)

    @property
    def members(self) -> int:
        """How many train, or could."""
        return min(self._up, self._case.nodes)

    @property
    def enough(self) -> bool:
        """Whether the job can go on."""
        return self.members >= self._case.min_nodes

    @property
    def speed(self) -> float:
        """The share of the full job's speed."""
        return self._case.job.step_s / self._case.step_on(self.members) if self.members else 0.0

    def hit(self, change: Change, training: int) -> int:
        """Let nodes fail; return how many of them are among those that train, any being equally likely to."""
        share = min(training / self._up, 1.0) if self._up else 0.0
        self._up -= len(change.nodes)
        together, left = len(change.nodes) * share, int(len(change.nodes) * share)
        return left + (change.mark < together - left)

    def back(self, change: Change) -> int:
        """Let nodes come back; return by how many more train now."""
        before = self.members
        self._up += len(change.nodes)
        return self.members - before
