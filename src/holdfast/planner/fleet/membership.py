"""The nodes that are up, and how many of them train, in the same way for live recovery and restarts."""

from __future__ import annotations

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.failures import Change


class FleetNodes:
    """The nodes that are up. At most `case.nodes` of them train, the others are standbys."""

    def __init__(self, case: FleetCase, away: frozenset[int]) -> None:
        """Start with all nodes and standbys of the case up, except those in `away`."""
        self._case = case
        self._up = case.all_nodes - len(away)

    @property
    def members(self) -> int:
        """Number of nodes that train, or could train."""
        return min(self._up, self._case.nodes)

    @property
    def has_enough(self) -> bool:
        """Whether there are enough nodes for the job to continue."""
        return self.members >= self._case.min_nodes

    @property
    def speed(self) -> float:
        """Speed relative to the full job's."""
        return self._case.job.step_s / self._case.step_on(self.members) if self.members else 0.0

    def remove_failed(self, change: Change, training: int) -> int:
        """Remove failed nodes, and return how many of them were among the `training` nodes that trained before.

        All nodes that are up are equally likely to fail. The mean number is rounded up or down by the change's random
        mark.
        """
        share = min(training / self._up, 1.0) if self._up else 0.0
        self._up -= len(change.nodes)
        together, left = len(change.nodes) * share, int(len(change.nodes) * share)
        return left + (change.mark < together - left)

    def add_returned(self, change: Change) -> int:
        """Add returned nodes, and return by how much the number of training nodes grew."""
        before = self.members
        self._up += len(change.nodes)
        return self.members - before
