"""What would let a job begin that waits: more nodes, fewer for it, or the end of others."""

from __future__ import annotations

from dataclasses import replace

from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Policy

#: whoever needs more than so many further nodes is not told how many: it is looked for by sharing them all out
MOST_MORE = 4096


def what_would_do(policy: Policy, demand: Demand, name: str) -> list[str]:
    """Return what would each let a job begin at once that waits, in words; found by asking the policy.

    Nothing where it waits for none of these, or does not wait.
    """
    if name not in (bid.name for bid in demand.bids) or _begins(policy, demand, name):
        return []
    found = (_more_nodes(policy, demand, name), _fewer(policy, demand, name), _ends(policy, demand, name))
    return [said for said in found if said]


def _begins(policy: Policy, demand: Demand, name: str) -> bool:
    return divide(policy, demand).nodes[name] > 0


def _more_nodes(policy: Policy, demand: Demand, name: str) -> str:
    """Look for the fewest nodes that would do; all jobs together need no more than their sum."""
    most = sum(max(policy.begins_with(bid), bid.smallest) for bid in demand.bids) + demand.kept_back
    low, high = 0, max(1, min(most, MOST_MORE))
    if not _begins(policy, replace(demand, nodes=demand.nodes + high), name):
        return ""
    while high - low > 1:  # (with more nodes nobody is begun later)
        middle = (low + high) // 2
        if _begins(policy, replace(demand, nodes=demand.nodes + middle), name):
            high = middle
        else:
            low = middle
    return f"{high} more node" if high == 1 else f"{high} more nodes"


def _fewer(policy: Policy, demand: Demand, name: str) -> str:
    """Look for the most nodes that it could ask for and begin."""
    mine = next(bid for bid in demand.bids if bid.name == name)
    for least in range(min(policy.begins_with(mine) - 1, demand.nodes), 0, -1):
        smaller = replace(mine, least=min(least, mine.least), most=least, sizes=())
        if _begins(policy, _with(demand, smaller), name):
            return f"if it asked for {least} {'node' if least == 1 else 'nodes'}"
    return ""


def _ends(policy: Policy, demand: Demand, name: str) -> str:
    """Look for one job without which it would begin: of those that run, the smallest."""
    running = [bid for bid in demand.bids if bid.admitted and bid.name != name]
    for other in sorted(running, key=lambda bid: (bid.has, bid.order)):
        rest = tuple(bid for bid in demand.bids if bid is not other)
        if _begins(policy, replace(demand, bids=rest), name):
            return f"the end of {other.name}"
    return ""


def _with(demand: Demand, changed: Bid) -> Demand:
    return replace(demand, bids=tuple(changed if bid.name == changed.name else bid for bid in demand.bids))
