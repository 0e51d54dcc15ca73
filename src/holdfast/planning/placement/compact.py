"""Compact: each expert's replicas on as few nodes as possible (a baseline of Lazarus, 6.3).

It keeps no guarantee: the plan made with it reports the number of distinct nodes that it really gives.
"""

from __future__ import annotations

from holdfast.planning.arrays import IntArray
from holdfast.planning.placement.fill import pack
from holdfast.planning.placement.strategy import PlacementProblem


class Compact:
    """Fill node after node, expert by expert."""

    name = "compact"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`."""
        return pack(problem.replicas, problem.slots)
