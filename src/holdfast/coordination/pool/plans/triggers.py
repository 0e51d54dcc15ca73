"""Names the event that led to a plan (Unicron, Figure 7: a node is lost or comes, a job is submitted or ends)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.coordination.pool.share.interface import Bid, Demand

MEASURED = "a job's measurement"
RESERVE = "another reserve"


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a demand that lead to another plan when they change."""

    nodes: int
    kept_back: int
    #: the demands of each job
    asks: Mapping[str, tuple[Any, ...]]


def outline_demand(demand: Demand) -> Outline:
    """Return the outline of a demand."""
    return Outline(demand.nodes, demand.kept_back, {bid.name: _asks_of(bid) for bid in demand.bids})


def find_trigger(before: Outline | None, now: Outline) -> str:
    """Return the first difference between two outlines in words, or "" if they are equal: the server's start, jobs
    submitted or over, nodes lost or more, a job changed, or the reserve (`RESERVE`).
    """
    if before is None:
        return "the pool's server began"
    added = now.asks.keys() - before.asks.keys()
    removed = before.asks.keys() - now.asks.keys()
    if added:
        return f"{_format_jobs(added)} submitted"
    if removed:
        return f"{_format_jobs(removed)} over or suspended"
    if now.nodes != before.nodes:
        count = abs(now.nodes - before.nodes)
        return f"{count} {'node' if count == 1 else 'nodes'} {'lost' if now.nodes < before.nodes else 'more'}"
    changed = {name for name, asks in now.asks.items() if asks != before.asks[name]}
    if changed:
        return f"{_format_jobs(changed)} changed"
    return "" if now == before else RESERVE


def _asks_of(bid: Bid) -> tuple[Any, ...]:
    """Return the demands of a job."""
    return (
        bid.order,
        bid.least,
        bid.most,
        bid.sizes,
        bid.weight,
        bid.priority,
        bid.preemptible,
        bid.standbys,
        bid.may_starve,
    )


def _format_jobs(names: set[str]) -> str:
    """Return job names as text."""
    return f"{'job' if len(names) == 1 else 'jobs'} {', '.join(sorted(names))}"
