"""Decides which jobs start: first come, first served, with back-filling that never delays the first job in the queue.

This is EASY's rule. The first job that does not fit has a reservation: the time at which enough nodes will be free, by
the time limits of the running jobs. A later job may start if it ends by then, or needs none of those nodes. If that
time is unknown because running jobs have no limit, no job starts before the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from holdfast.coordination.pool.share.interface import Bid


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """The time by which the first job in the queue can start."""

    #: the time, in unix seconds; inf if unknown
    at: float
    #: nodes that are free then beyond its need
    spare: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The jobs that start now, and why the others wait."""

    names: tuple[str, ...]
    why: dict[str, str]


def compute_reservation(head: int, free: int, running: Sequence[tuple[float, int]], now: float) -> Reservation:
    """Return when enough nodes will be free for the first job in the queue, and how many more are free then.

    Time inf and none to spare if running jobs without a time limit hold too many.

    Args:
        head: nodes that it needs
        free: nodes that are free now
        running: for each running job, when it ends at the latest, and how many nodes that frees
        now: the time, in unix seconds
    """
    at = inf
    for ends_by, nodes in sorted(running):
        if ends_by == inf:
            break
        if ends_by > at:  # Nodes of all jobs that end at the same time count as spare.
            break
        free += nodes
        if free >= head:
            at = max(ends_by, now)
    return Reservation(at=at, spare=free - head if at < inf else 0)


def admit(
    queue: Sequence[Bid], admitted: Sequence[Bid], nodes: int, needs: Callable[[Bid], int], now: float
) -> Admitted:
    """Decide which jobs start, in order of the queue, and why the others wait.

    A job behind one that does not fit starts only if it does not delay that one (backfilling): it ends in time, or uses
    spare nodes.

    Args:
        queue: waiting jobs, in order
        admitted: running jobs, which keep their nodes
        nodes: nodes for all of these jobs
        needs: returns the nodes that a job needs
        now: the time, in unix seconds
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
            head, kept = bid, compute_reservation(need, free, running, now)
            why[bid.name] = f"it needs {_format_nodes(need)}, and {free if free > 0 else 'none'} can be given"
            continue
        ends_by = now + bid.limit_s
        if head is not None:
            in_time = ends_by <= kept.at < inf
            if need > free or not (in_time or need <= kept.spare):
                why[bid.name] = _explain_wait(bid, head, need, free)
                continue
            if not in_time:
                kept = Reservation(at=kept.at, spare=kept.spare - need)
        free -= need
        running.append((ends_by, need))
        begun.append(bid.name)
    return Admitted(tuple(begun), why)


def _explain_wait(bid: Bid, head: Bid, need: int, free: int) -> str:
    """Return why a job behind the first waits: too few nodes, or it would delay `head`, the first.

    Args:
        need: nodes that it needs
        free: nodes that are free
    """
    if need > free:
        return (
            f"it needs {_format_nodes(need)}, and {free if free > 0 else 'none'} can be given; {head.name} is before it"
        )
    over = "it has no time_limit" if bid.limit_s == inf else "it may still run when that can begin"
    return f"{head.name} is before it: {over}"


def _format_nodes(count: int) -> str:
    """Return a number of nodes as text."""
    return f"{count} node" if count == 1 else f"{count} nodes"
