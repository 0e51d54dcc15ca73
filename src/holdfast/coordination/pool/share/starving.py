"""Jobs that the weights leave with no node, in words: because of whom, and how much they fall short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.coordination.pool.share.achieving import LONGEST_S, tasks
from holdfast.coordination.pool.share.interface import Bid
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.starved import Shortfall, starved


def would_starve(bids: Sequence[Bid], nodes: int, failure_rate: float) -> dict[str, str]:
    """Return whom of these jobs the plan would have left with no node, had they no least to keep, and why.

    Args:
        bids: of jobs that share these nodes.
    """
    firm = [bid for bid in bids if not bid.preemptible]
    found = _found(firm, dict.fromkeys((bid.name for bid in firm), 0), nodes, failure_rate)
    return {name: in_words(short) for name, short in found.items()}


def why_starved(bids: Sequence[Bid], sizes: Mapping[str, int], nodes: int, failure_rate: float) -> dict[str, str]:
    """Return why each of these jobs that has no node has none.

    Args:
        sizes: nodes of each by the plan.
    """
    floors = {bid.name: min(sizes[bid.name], bid.smallest) if _keeps(bid) else 0 for bid in bids}
    whole = [bid for bid in bids if not floors[bid.name] or floors[bid.name] >= bid.smallest]
    there = nodes - sum(floors[bid.name] for bid in bids if bid not in whole)
    known = _found(whole, floors, there, failure_rate)
    why: dict[str, str] = {}
    for bid in bids:
        if sizes[bid.name]:
            continue
        if bid.name in known:
            why[bid.name] = in_words(known[bid.name])
        else:
            why[bid.name] = f"it needs {bid.smallest} of {nodes} nodes, and others are to have these"
    return why


def in_words(short: Shortfall) -> str:
    """Say why a job is left with no node."""
    whom = " and ".join(f"{name} ({nodes})" for name, nodes in sorted(short.to.items())) or "nobody else"
    would = f"{short.times:.3g} times its weight would do" if short.times else "no weight would do: it achieves nothing"
    return (
        f"by the weights its nodes are worth more to {whom}: with its least the plan is worth {short.short:.3g} "
        f"weighted FLOP less until the next failure; {would}"
    )


def _keeps(bid: Bid) -> bool:
    return bid.admitted and not bid.may_starve


def _found(bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, failure_rate: float) -> dict[str, Shortfall]:
    if not bids or nodes < max(1, sum(floors[bid.name] for bid in bids)):
        return {}
    return starved(tasks(bids, floors, nodes), nodes, running_s(nodes, failure_rate, LONGEST_S))
