"""Who is begun: first come, first served, and back-filling that never delays whoever is first in the queue.

That is EASY's rule: the first that does not fit has a reservation, the time at which enough nodes will be free by the
time limits of those that run. Who comes behind it may begin if it ends by then, or if it needs no node of those.
Where nobody can say when that is, as those that run have no limit, nobody is begun before the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from holdfast.coordination.pool.share.interface import Bid


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """When the first in the queue can begin at the latest, and how many nodes it then leaves over."""

    at: float
    spare: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """Who is begun now, and why the others wait."""

    names: tuple[str, ...]
    why: dict[str, str]


def reservation(head: int, free: int, running: Sequence[tuple[float, int]], now: float) -> Reservation:
    """Return when so many nodes are free at the latest.

    Args:
        head: nodes that the first in the queue needs. free: now. running: when each job ends at the latest, and how
            many nodes are free then.
    """
    at = inf
    for ends_by, nodes in sorted(running):
        if ends_by == inf:
            break
        if ends_by > at:  # (all that end at the same time count for its spare)
            break
        free += nodes
        if free >= head:
            at = max(ends_by, now)
    return Reservation(at=at, spare=free - head if at < inf else 0)


def admit(
    queue: Sequence[Bid], admitted: Sequence[Bid], nodes: int, needs: Callable[[Bid], int], now: float
) -> Admitted:
    """Decide who is begun.

    Args:
        queue: in their order. admitted: those that keep what they need. nodes: for all of these. needs: nodes.
    """
    free = nodes - sum(needs(bid) for bid in admitted)
    running = [(bid.ends_by, needs(bid)) for bid in admitted]
    begun: list[str] = []
    why: dict[str, str] = {}
    head: Bid | None = None
    kept = Reservation(at=inf, spare=0)
    for bid in queue:
        need = needs(bid)
        if head is None and need > free:
            head, kept = bid, reservation(need, free, running, now)
            why[bid.name] = f"it needs {_nodes(need)}, and {free if free > 0 else 'none'} can be given"
            continue
        ends_by = now + bid.limit_s
        if head is not None:
            in_time = ends_by <= kept.at < inf
            if need > free or not (in_time or need <= kept.spare):
                why[bid.name] = _behind(bid, head, need, free)
                continue
            if not in_time:
                kept = Reservation(at=kept.at, spare=kept.spare - need)
        free -= need
        running.append((ends_by, need))
        begun.append(bid.name)
    return Admitted(tuple(begun), why)


def _behind(bid: Bid, head: Bid, need: int, free: int) -> str:
    if need > free:
        return f"it needs {_nodes(need)}, and {free if free > 0 else 'none'} can be given; {head.name} is before it"
    over = "it has no time_limit" if bid.limit_s == inf else "it may still run when that can begin"
    return f"{head.name} is before it: {over}"


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
