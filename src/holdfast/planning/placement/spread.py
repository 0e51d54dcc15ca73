"""The baselines of Lazarus, 6.3: each expert's replicas on as many nodes as possible, or on as few as possible."""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, put_rows, take_rows
from holdfast.planning.placement.fill import deal_replicas, pack_nodes
from holdfast.planning.placement.guarantee import enforce_guarantee
from holdfast.planning.placement.strategy import PlacementProblem


class Spread:
    """Deals expert after expert over the nodes. If all nodes have the same slots, this guarantees f.

    In every layer, the experts with the fewest replicas come first. So their hosts are the same in all layers, which
    makes this baseline as strong as possible. GPT-S survives 4 of 10 lost nodes with probability 0.38; with experts
    ordered by number it is 0.12.
    """

    name = "spread"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`; deal the experts over the nodes round by round, the rarest first, then enforce f."""
        layers, experts = problem.replicas.shape
        empty = np.zeros((layers, experts, problem.nodes), dtype=np.int64)
        order = problem.by_rank
        in_order = deal_replicas(empty, take_rows(problem.replicas, order), problem.slots)
        counts = np.empty_like(in_order)
        put_rows(counts, order, in_order)
        return enforce_guarantee(counts, problem.slots, problem.fault_threshold)


class Compact:
    """Fills one node after the other, expert by expert.

    It guarantees nothing; its plan reports the number of distinct nodes that it really has.
    """

    name = "compact"

    def place(self, problem: PlacementProblem) -> IntArray:
        """See `Strategy.place`."""
        return pack_nodes(problem.replicas, problem.slots)
