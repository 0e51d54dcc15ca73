"""The policies: equal, weighted, by priority, sized; and by achieved FLOP/s (`achieving`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.interface import Bid, Policy, Shares, first_come


class Weighted:
    """Nodes in proportion to the jobs' weights, as near as whole nodes allow."""

    name = "weighted"
    uses_throughput = False
    allows_starvation = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in order of submission."""
        return first_come(bids)

    def nodes_to_start(self, bid: Bid) -> int:
        """Return the minimum."""
        return bid.smallest

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Give each remaining node to the job with the fewest nodes for its weight."""
        return Shares(raise_shares(nodes, bids, free, lambda bid, size: (2 * size + 1) / self._weight(bid)))

    def _weight(self, bid: Bid) -> float:
        return bid.weight


class Equal(Weighted):
    """The same number of nodes for each job."""

    name = "equal"

    def _weight(self, bid: Bid) -> float:
        return 1.0


class ByPriority:
    """All nodes that the job of the highest priority can use, then the next; equal shares within a priority."""

    name = "priority"
    uses_throughput = False
    allows_starvation = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return the highest priority first, then in order of submission."""
        return sorted(bids, key=lambda bid: (-bid.priority, bid.order))

    def nodes_to_start(self, bid: Bid) -> int:
        """Return the minimum."""
        return bid.smallest

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Give each remaining node to the highest priority, then to the job with the fewest nodes."""
        return Shares(raise_shares(nodes, bids, free, lambda bid, size: (-bid.priority, size)))


class Sized:
    """Each job has the size that it asks for (max_nodes), or waits: first come, first served, with back-filling."""

    name = "sized"
    uses_throughput = False
    allows_starvation = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in order of submission."""
        return first_come(bids)

    def nodes_to_start(self, bid: Bid) -> int:
        """Return its size."""
        return bid.largest

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Take no node from a job; replace lost nodes in order of submission."""
        return Shares(raise_shares(nodes, bids, free, lambda bid, size: (size >= bid.has, bid.order)))


#: the policies by name
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Equal(), Weighted(), ByPriority(), Sized(), Waf())}


def raise_shares(
    nodes: Mapping[str, int], bids: Sequence[Bid], free: int, rank: Callable[[Bid, int], Any]
) -> dict[str, int]:
    """Return the nodes of each job after the free ones are given: one step of a job's sizes at a time, to the job with
    the lowest rank.

    Of equals, jobs that already have the nodes come first, so that fewer nodes move. A job whose next size needs more
    than the free nodes gets no more.

    Args:
        nodes: the nodes to start from
        bids: the jobs
        free: nodes to give
        rank: returns the rank of a job with this many nodes
    """
    sizes = dict(nodes)

    def turn(bid: Bid) -> tuple[Any, bool, int]:
        size = sizes[bid.name]
        return rank(bid, size), bid.has <= size, bid.order

    by_order = {bid.order: bid for bid in bids}
    turns = [turn(bid) for bid in bids]
    heapify(turns)
    while turns:
        bid = by_order[turns[0][2]]
        size = bid.next_size(sizes[bid.name])
        if size is None or size - sizes[bid.name] > free:
            heappop(turns)
            continue
        free -= size - sizes[bid.name]
        sizes[bid.name] = size
        heapreplace(turns, turn(bid))
    return sizes
