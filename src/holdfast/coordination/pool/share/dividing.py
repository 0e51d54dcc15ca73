"""Divides nodes: first the minimum of all running jobs, then the policy, standbys, and preemptible jobs."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.pool.share.admission import admit
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Policy, Shares, first_come
from holdfast.coordination.pool.share.policies import raise_shares
from holdfast.coordination.pool.share.standbys import assign_standbys
from holdfast.coordination.pool.share.starving import explain_starved


def divide(policy: Policy, demand: Demand) -> Division:
    """Return how many nodes and standbys each job should have, why jobs wait, and the worth if the policy computes it.

    No running job falls below its minimum for another job. Exceptions are preemptible jobs, which use leftover nodes,
    and jobs that the policy starves.
    """
    firm = [bid for bid in demand.bids if not bid.preemptible]
    loose = [bid for bid in demand.bids if bid.preemptible]
    shared = _divide_with_starvation if policy.allows_starvation else _divide_with_minimum
    grown, why = shared(policy, firm, max(0, demand.nodes - demand.kept_back), demand)
    nodes = grown.nodes
    rest = demand.nodes - sum(nodes.values())
    standbys = assign_standbys(
        [bid for bid in firm if _can_use_standby(bid, nodes[bid.name])], nodes, demand.kept_back, rest
    )
    left, waits = _divide_leftover(loose, rest - sum(standbys.values()))
    return Division({**nodes, **left}, {**why, **waits}, standbys, grown.worth)


def _can_use_standby(bid: Bid, nodes: int) -> bool:
    """Return whether a job has its minimum, and standbys help it."""
    return bid.may_wait and nodes >= bid.smallest


def _divide_with_minimum(
    policy: Policy, bids: Sequence[Bid], nodes: int, demand: Demand
) -> tuple[Shares, dict[str, str]]:
    """Divide nodes with a policy under which each running job keeps its minimum: first these, then new jobs from the
    queue start with theirs, then the policy distributes the rest.

    Return the shares, 0 for waiting jobs, and why those wait.
    """
    running = policy.order([bid for bid in bids if bid.admitted])
    queue = policy.order([bid for bid in bids if not bid.admitted])
    floors = _compute_floors(running, nodes)
    held = sum(floors.values())
    # Running jobs get the rest of their minimum before a new job starts.
    fresh = admit(queue, running, nodes, policy.nodes_to_start, demand.now)
    begun = [bid for bid in queue if bid.name in fresh.names]
    sizes = {**floors, **{bid.name: policy.nodes_to_start(bid) for bid in begun}}
    free = nodes - held - sum(policy.nodes_to_start(bid) for bid in begun)
    grown = Shares(sizes)
    if free > 0:
        grown = policy.distribute(sizes, _at_minimum(running, sizes) + begun, free, demand.failure_rate)
    return Shares({**dict.fromkeys((bid.name for bid in queue), 0), **grown.nodes}, grown.worth), fresh.why


def _divide_with_starvation(
    policy: Policy, bids: Sequence[Bid], nodes: int, demand: Demand
) -> tuple[Shares, dict[str, str]]:
    """Divide nodes with a policy that may leave jobs without nodes; return the shares, and why jobs without nodes have
    none.

    That applies to jobs that save their state, and to jobs that have not started. If only a measurement has changed, no
    job is stopped or started: two jobs of about equal worth would exchange nodes again and again. A job below its
    minimum is not stopped either: it may have refused some nodes, and would start on them, and refuse them, again.
    """
    kept = [bid for bid in bids if bid.admitted and (demand.calm or not bid.may_starve or bid.has < bid.smallest)]
    floors = _compute_floors(kept, nodes)
    full = _at_minimum(kept, floors)
    open_to_all = [] if demand.calm else [bid for bid in bids if bid not in kept]
    sizes = {**dict.fromkeys((bid.name for bid in bids), 0), **floors}
    free = nodes - sum(floors.values())
    mine = {bid.name: sizes[bid.name] for bid in (*full, *open_to_all)}
    grown = policy.distribute(mine, [*full, *open_to_all], free, demand.failure_rate) if free > 0 else Shares(mine)
    sizes |= grown.nodes
    for bid in bids:
        if not bid.admitted and sizes[bid.name] < bid.smallest:
            sizes[bid.name] = 0  # A new job cannot start below its minimum.
    left = [bid.name for bid in bids if not sizes[bid.name]]
    why = explain_starved(bids, sizes, nodes, demand.failure_rate) if left else {}
    return Shares(sizes, grown.worth), why


def _compute_floors(running: Sequence[Bid], nodes: int) -> dict[str, int]:
    """Return the guaranteed nodes of each running job: the nodes that it has up to its minimum, then, in order while
    any of the `nodes` are left, the rest of its minimum.
    """
    floors = {bid.name: min(bid.has, bid.smallest) for bid in running}
    free = nodes - sum(floors.values())
    for bid in running:
        more = max(0, min(bid.smallest - floors[bid.name], free))
        floors[bid.name] += more
        free -= more
    return floors


def _at_minimum(running: Sequence[Bid], sizes: dict[str, int]) -> list[Bid]:
    """Return the jobs that have their minimum; the policy decides only about these."""
    return [bid for bid in running if sizes[bid.name] >= bid.smallest]


def _divide_leftover(bids: Sequence[Bid], nodes: int) -> tuple[dict[str, int], dict[str, str]]:
    """Divide the remaining nodes among preemptible jobs: running jobs first, then in order of submission; what is left
    then makes jobs larger, the smallest first.

    Return the shares, and why jobs without nodes wait.
    """
    sizes: dict[str, int] = {}
    why: dict[str, str] = {}
    begun: list[Bid] = []
    for bid in sorted(first_come(bids), key=lambda bid: not bid.admitted):
        if bid.smallest <= nodes:
            nodes -= bid.smallest
            sizes[bid.name] = bid.smallest
            begun.append(bid)
        else:
            sizes[bid.name] = 0
            left = "1 is" if nodes == 1 else f"{nodes} are" if nodes > 0 else "none is"
            why[bid.name] = f"it is preemptible and needs {bid.smallest}; {left} left over"
    return {**sizes, **raise_shares({bid.name: sizes[bid.name] for bid in begun}, begun, nodes, _rank_by_size)}, why


def _rank_by_size(_: Bid, size: int) -> int:
    """Rank jobs by their number of nodes."""
    return size
