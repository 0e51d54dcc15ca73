"""The policies: equal, weighted, by priority, sized; by what is achieved (`achieving`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.interface import Bid, Grown, Policy, first_come


class Weighted:
    """Nodes in proportion to the jobs' weights, as near as whole nodes come to it."""

    name = "weighted"
    reckons = False
    starves = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs as they came."""
        return first_come(bids)

    def begins_with(self, bid: Bid) -> int:
        """Return the least."""
        return bid.smallest

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        """Give what is left over to whoever has least for its weight, again and again."""
        return Grown(rise(nodes, bids, free, lambda bid, size: (2 * size + 1) / self._weight(bid)))

    def _weight(self, bid: Bid) -> float:
        return bid.weight


class Equal(Weighted):
    """As many nodes for each job as for each other."""

    name = "equal"

    def _weight(self, bid: Bid) -> float:
        return 1.0


class ByPriority:
    """All that the first can use, then the next; of one priority equally."""

    name = "priority"
    reckons = False
    starves = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return the greatest priority first, those of one as they came."""
        return sorted(bids, key=lambda bid: (-bid.priority, bid.order))

    def begins_with(self, bid: Bid) -> int:
        """Return the least."""
        return bid.smallest

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        """Give what is left over to the greatest priority, of these to whoever has least."""
        return Grown(rise(nodes, bids, free, lambda bid, size: (-bid.priority, size)))


class Sized:
    """Each job has the size that it asks for (max_nodes), or waits: first come, first served, with back-filling."""

    name = "sized"
    reckons = False
    starves = False

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs as they came."""
        return first_come(bids)

    def begins_with(self, bid: Bid) -> int:
        """Return its size."""
        return bid.largest

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        """Take nothing from anybody; then make up for what those have lost that came first."""
        return Grown(rise(nodes, bids, free, lambda bid, size: (size >= bid.has, bid.order)))


#: by their names
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Equal(), Weighted(), ByPriority(), Sized(), Waf())}


def rise(nodes: Mapping[str, int], bids: Sequence[Bid], free: int, rank: Callable[[Bid, int], Any]) -> dict[str, int]:
    """Raise jobs, one step of their sizes at a time, the lowest rank first; of equals those that need not give any.

    Args:
        rank: of a job with so many nodes.
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
        size = bid.above(sizes[bid.name])
        if size is None or size - sizes[bid.name] > free:
            heappop(turns)
            continue
        free -= size - sizes[bid.name]
        sizes[bid.name] = size
        heapreplace(turns, turn(bid))
    return sizes
