"""From a demand to a division: the least of all that are begun first, the policy, standbys, then preemptible jobs."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.pool.share.admission import admit
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Grown, Policy, first_come
from holdfast.coordination.pool.share.policies import rise
from holdfast.coordination.pool.share.starving import why_starved
from holdfast.coordination.pool.share.warm import keep_warm


def divide(policy: Policy, demand: Demand) -> Division:
    """Return how many nodes each job is to have.

    Nobody that is begun goes below its least for another, but preemptible jobs, which live on what is left over, and
    whom a policy starves.
    """
    firm = [bid for bid in demand.bids if not bid.preemptible]
    loose = [bid for bid in demand.bids if bid.preemptible]
    shared = _freely if policy.starves else _firm
    grown, why = shared(policy, firm, max(0, demand.nodes - demand.kept_back), demand)
    nodes = grown.nodes
    rest = demand.nodes - sum(nodes.values())
    standbys = keep_warm([bid for bid in firm if _served(bid, nodes[bid.name])], nodes, demand.kept_back, rest)
    left, waits = _loose(loose, rest - sum(standbys.values()))
    return Division({**nodes, **left}, {**why, **waits}, standbys, grown.worth)


def _served(bid: Bid, nodes: int) -> bool:
    """Tell whether a job runs, with its least, and standbys are of use to it."""
    return bid.may_wait and nodes >= bid.smallest


def _firm(policy: Policy, bids: Sequence[Bid], nodes: int, demand: Demand) -> tuple[Grown, dict[str, str]]:
    running = policy.order([bid for bid in bids if bid.admitted])
    queue = policy.order([bid for bid in bids if not bid.admitted])
    floors = _floors(running, nodes)
    held = sum(floors.values())
    # (who runs below its least is owed the rest of it before anybody is begun)
    fresh = admit(queue, running, nodes, policy.begins_with, demand.now)
    begun = [bid for bid in queue if bid.name in fresh.names]
    sizes = {**floors, **{bid.name: policy.begins_with(bid) for bid in begun}}
    free = nodes - held - sum(policy.begins_with(bid) for bid in begun)
    grown = Grown(sizes)
    if free > 0:
        grown = policy.grow(sizes, _full(running, sizes) + begun, free, demand.failure_rate)
    return Grown({**dict.fromkeys((bid.name for bid in queue), 0), **grown.nodes}, grown.worth), fresh.why


def _freely(policy: Policy, bids: Sequence[Bid], nodes: int, demand: Demand) -> tuple[Grown, dict[str, str]]:
    """Let the policy say who has none: of those that keep what they have done, and of those that are not begun.

    Where nothing has happened but that something was measured, nobody is left with none, and nobody begun for it: two
    jobs that are worth much the same would have each other's nodes in turn. Nor is whoever lacks of its least: it may
    have lost that because those nodes would not do for it, and would be begun on them again, and again.
    """
    kept = [bid for bid in bids if bid.admitted and (demand.calm or not bid.may_starve or bid.has < bid.smallest)]
    floors = _floors(kept, nodes)
    full = _full(kept, floors)
    open_to_all = [] if demand.calm else [bid for bid in bids if bid not in kept]
    sizes = {**dict.fromkeys((bid.name for bid in bids), 0), **floors}
    free = nodes - sum(floors.values())
    mine = {bid.name: sizes[bid.name] for bid in (*full, *open_to_all)}
    grown = policy.grow(mine, [*full, *open_to_all], free, demand.failure_rate) if free > 0 else Grown(mine)
    sizes |= grown.nodes
    for bid in bids:
        if not bid.admitted and sizes[bid.name] < bid.smallest:
            sizes[bid.name] = 0  # (whoever is not begun cannot run below its least)
    left = [bid.name for bid in bids if not sizes[bid.name]]
    why = why_starved(bids, sizes, nodes, demand.failure_rate) if left else {}
    return Grown(sizes, grown.worth), why


def _floors(running: Sequence[Bid], nodes: int) -> dict[str, int]:
    """Return what those that run have at the least: what they have of their least, then in turn the rest of it."""
    floors = {bid.name: min(bid.has, bid.smallest) for bid in running}
    free = nodes - sum(floors.values())
    for bid in running:
        more = max(0, min(bid.smallest - floors[bid.name], free))
        floors[bid.name] += more
        free -= more
    return floors


def _full(running: Sequence[Bid], sizes: dict[str, int]) -> list[Bid]:
    """Return those that have their least: the others take what there is and are in no policy's hands."""
    return [bid for bid in running if sizes[bid.name] >= bid.smallest]


def _loose(bids: Sequence[Bid], nodes: int) -> tuple[dict[str, int], dict[str, str]]:
    """Share out what is left over: who runs goes on first, of these who came first; nobody is owed anything."""
    sizes: dict[str, int] = {}
    why: dict[str, str] = {}
    begun: list[Bid] = []
    for bid in sorted(first_come(bids), key=lambda one: not one.admitted):
        if bid.smallest <= nodes:
            nodes -= bid.smallest
            sizes[bid.name] = bid.smallest
            begun.append(bid)
        else:
            sizes[bid.name] = 0
            left = "1 is" if nodes == 1 else f"{nodes} are" if nodes > 0 else "none is"
            why[bid.name] = f"it is preemptible and needs {bid.smallest}; {left} left over"
    return {**sizes, **rise({bid.name: sizes[bid.name] for bid in begun}, begun, nodes, _size)}, why


def _size(_: Bid, size: int) -> int:
    return size
