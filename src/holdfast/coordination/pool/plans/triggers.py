"""What has led to a plan (Unicron, Figure 7: a node is lost or comes, a job is submitted or ends), in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.coordination.pool.share.interface import Bid, Demand

MEASURED = "what was measured of a job"
RESERVE = "another reserve"


@dataclass(frozen=True, slots=True)
class Outline:
    """What of a demand makes another plan of it. asks: of each job, whatever it asks for."""

    nodes: int
    kept_back: int
    asks: Mapping[str, tuple[Any, ...]]


def outline(demand: Demand) -> Outline:
    """Return what of a demand counts."""
    return Outline(demand.nodes, demand.kept_back, {bid.name: _asks(bid) for bid in demand.bids})


def trigger(before: Outline | None, now: Outline) -> str:
    """Return what has changed, the first of what has; "" where nothing has."""
    if before is None:
        return "the pool's server began"
    come, gone = now.asks.keys() - before.asks.keys(), before.asks.keys() - now.asks.keys()
    if come:
        return f"{_named(come)} submitted"
    if gone:
        return f"{_named(gone)} over or suspended"
    if now.nodes != before.nodes:
        count = abs(now.nodes - before.nodes)
        return f"{count} {'node' if count == 1 else 'nodes'} {'lost' if now.nodes < before.nodes else 'more'}"
    changed = {name for name, asks in now.asks.items() if asks != before.asks[name]}
    if changed:
        return f"{_named(changed)} changed"
    return "" if now == before else RESERVE


def _asks(bid: Bid) -> tuple[Any, ...]:
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


def _named(names: set[str]) -> str:
    return f"{'job' if len(names) == 1 else 'jobs'} {', '.join(sorted(names))}"
