"""Explains which jobs get no nodes by their weights, in favour of which jobs, and by how much they fall short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.coordination.pool.share.achieving import MAX_RUNNING_S, build_tasks
from holdfast.coordination.pool.share.interface import Bid
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.starved_jobs import Shortfall, find_shortfalls


def find_starved(bids: Sequence[Bid], nodes: int, failure_rate: float) -> dict[str, str]:
    """Return the jobs that get no nodes if no job keeps a minimum, although their least would fit, and why, in words.

    Preemptible jobs are ignored: they are neither returned nor counted as competitors.

    Args:
        bids: jobs that share the nodes
        nodes: their number
        failure_rate: failures of a node per second
    """
    firm = [bid for bid in bids if not bid.preemptible]
    found = _find_shortfalls(firm, dict.fromkeys((bid.name for bid in firm), 0), nodes, failure_rate)
    return {name: format_shortfall(short) for name, short in found.items()}


def explain_starved(bids: Sequence[Bid], sizes: Mapping[str, int], nodes: int, failure_rate: float) -> dict[str, str]:
    """Return in words, for each of these jobs that has no nodes, why: its nodes are worth more to other jobs, or the
    others need them.

    Args:
        bids: the jobs
        sizes: nodes of each job by the plan
        nodes: nodes to divide
        failure_rate: failures of a node per second
    """
    floors = {bid.name: min(sizes[bid.name], bid.smallest) if _keeps_minimum(bid) else 0 for bid in bids}
    eligible = [bid for bid in bids if not floors[bid.name] or floors[bid.name] >= bid.smallest]
    available = nodes - sum(floors[bid.name] for bid in bids if bid not in eligible)
    known = _find_shortfalls(eligible, floors, available, failure_rate)
    why: dict[str, str] = {}
    for bid in bids:
        if sizes[bid.name]:
            continue
        if bid.name in known:
            why[bid.name] = format_shortfall(known[bid.name])
        else:
            why[bid.name] = f"it needs {bid.smallest} of {nodes} nodes, and other jobs get these"
    return why


def format_shortfall(short: Shortfall) -> str:
    """Return in words why a job gets no nodes: which jobs get more instead, how much more that is worth, and the factor
    on its weight that would be enough.
    """
    others = " and ".join(f"{name} ({nodes})" for name, nodes in sorted(short.to.items())) or "no other job"
    would = f"{short.times:.3g} times its weight would do" if short.times else "no weight would do: it achieves nothing"
    return (
        f"by the weights its nodes are worth more to {others}: with its least the plan is worth {short.short:.3g} "
        f"weighted FLOP less until the next failure; {would}"
    )


def _keeps_minimum(bid: Bid) -> bool:
    """Return whether the policy must leave the job its minimum."""
    return bid.admitted and not bid.may_starve


def _find_shortfalls(
    bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, failure_rate: float
) -> dict[str, Shortfall]:
    """Return by how much the value of each job that gets no nodes falls short of the others', by the job's name.

    Jobs for which the nodes besides the floors would not suffice are left out.

    Args:
        floors: nodes that each job keeps in any case
        nodes: nodes to divide; if 0, or fewer than the floors, the result is empty
    """
    if not bids or nodes < max(1, sum(floors[bid.name] for bid in bids)):
        return {}
    return find_shortfalls(build_tasks(bids, floors, nodes), nodes, running_s(nodes, failure_rate, MAX_RUNNING_S))
