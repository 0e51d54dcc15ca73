"""Finds changes that would let a waiting job start: more nodes, a smaller demand, or the end of another job."""

from __future__ import annotations

from dataclasses import replace

from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Policy

#: Largest number of further nodes that is tried. Each try divides all nodes.
MAX_MORE_NODES = 4096


def find_remedies(policy: Policy, demand: Demand, name: str) -> list[str]:
    """Return changes that would each let a waiting job start at once, in words: more nodes, a smaller size, or the end
    of a running job. [] if none helps, or if the job is unknown or would start anyway.
    """
    if name not in (bid.name for bid in demand.bids) or _would_start(policy, demand, name):
        return []
    found = (
        _find_more_nodes(policy, demand, name),
        _find_smaller_size(policy, demand, name),
        _find_blocking_job(policy, demand, name),
    )
    return [remedy for remedy in found if remedy]


def _would_start(policy: Policy, demand: Demand, name: str) -> bool:
    """Return whether a job gets nodes."""
    return divide(policy, demand).nodes[name] > 0


def _find_more_nodes(policy: Policy, demand: Demand, name: str) -> str:
    """Return in words the fewest further nodes with which the job would start, or "" if `MAX_MORE_NODES` are not
    enough.
    """
    most = sum(max(policy.nodes_to_start(bid), bid.smallest) for bid in demand.bids) + demand.kept_back
    low, high = 0, max(1, min(most, MAX_MORE_NODES))
    if not _would_start(policy, replace(demand, nodes=demand.nodes + high), name):
        return ""
    while high - low > 1:  # More nodes never delay a job, so bisection works.
        middle = (low + high) // 2
        if _would_start(policy, replace(demand, nodes=demand.nodes + middle), name):
            high = middle
        else:
            low = middle
    return f"{high} more node" if high == 1 else f"{high} more nodes"


def _find_smaller_size(policy: Policy, demand: Demand, name: str) -> str:
    """Return in words the largest number of nodes, below its present minimum, with which the job would start, or ""."""
    mine = next(bid for bid in demand.bids if bid.name == name)
    for least in range(min(policy.nodes_to_start(mine) - 1, demand.nodes), 0, -1):
        smaller = replace(mine, least=min(least, mine.least), most=least, sizes=())
        if _would_start(policy, _replace_bid(demand, smaller), name):
            return f"if it asked for {least} {'node' if least == 1 else 'nodes'}"
    return ""


def _find_blocking_job(policy: Policy, demand: Demand, name: str) -> str:
    """Return in words the running job that ends for this one to start: the smallest, then the oldest, that suffices
    alone.

    "" if none does.
    """
    running = [bid for bid in demand.bids if bid.admitted and bid.name != name]
    for other in sorted(running, key=lambda bid: (bid.has, bid.order)):
        rest = tuple(bid for bid in demand.bids if bid is not other)
        if _would_start(policy, replace(demand, bids=rest), name):
            return f"the end of {other.name}"
    return ""


def _replace_bid(demand: Demand, changed: Bid) -> Demand:
    """Return the demand with one changed job."""
    return replace(demand, bids=tuple(changed if bid.name == changed.name else bid for bid in demand.bids))
