"""What a pool's next plan would be if a node were lost, some came, or a job were handed in; nothing is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.coordination.pool.plans.paces import declared
from holdfast.coordination.pool.requests import check_fits, check_sharing
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Policy, Worth
from holdfast.coordination.pool.share.starving import would_starve
from holdfast.coordination.pool.state import PoolState
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.record import OVER, PooledJob


@dataclass(frozen=True, slots=True)
class Lose:
    """This node is lost."""

    node: str


@dataclass(frozen=True, slots=True)
class Add:
    """So many nodes come that the pool does not have."""

    nodes: int


@dataclass(frozen=True, slots=True)
class HandIn:
    """This job is submitted."""

    spec: JobSpec


Change = Lose | Add | HandIn


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The plan as it is and as it would be: nodes that there are, and each job's.

    waiting: who would wait, and why. worth: None where the policy reckons with none. starved: whom it would leave with
    no node if nobody had a least to keep, and why.
    """

    nodes_now: int
    nodes: int
    shares_now: Mapping[str, int]
    shares: Mapping[str, int]
    waiting: Mapping[str, str]
    worth: Worth | None = None
    starved: Mapping[str, str] = field(default_factory=dict[str, str])


def what_if(policy: Policy, now: Demand, then: Demand) -> WhatIf:
    """Return the plan that would follow once things stand otherwise."""
    division = divide(policy, then)
    mine = [bid for bid in then.bids if division.nodes[bid.name]]
    there = max(0, then.nodes - then.kept_back)
    return WhatIf(
        nodes_now=now.nodes,
        nodes=then.nodes,
        shares_now={bid.name: bid.had for bid in now.bids},
        shares=division.nodes,
        waiting=division.why,
        worth=division.worth,
        starved=would_starve(mine, there, then.failure_rate) if policy.reckons and not policy.starves else {},
    )


def changed(state: PoolState, demand: Demand, bid_of: Callable[[PooledJob, int], Bid], change: Change) -> Demand:
    """Return how things would stand after a change.

    Args:
        demand: as they stand now. bid_of: a job as a policy sees it, and for how many nodes.

    Raises:
        BadInputError: no such thing can happen; UnreachableError: there is no such node.
    """
    match change:
        case Lose(node):
            return _without(state, demand, node)
        case Add(nodes):
            if nodes < 1:
                raise BadInputError(f"{nodes} nodes cannot come: give 1 or more")
            known, most = len(state.nodes), state.config.most_nodes
            if known + nodes > most:  # (what plans take grows with the square of that)
                raise BadInputError(f"{nodes} nodes cannot come: a pool has {most} at the most, and this one {known}")
            return replace(demand, nodes=demand.nodes + nodes)
        case HandIn(spec):
            return _with_job(state, demand, bid_of, spec)


def _without(state: PoolState, demand: Demand, node: str) -> Demand:
    """Return what there is to share out without a node; one that is drained, or away, is not among it now."""
    if node not in state.nodes:
        known = ", ".join(sorted(state.nodes)) or "none"
        raise UnreachableError(f"there is no node {node!r}: the nodes are {known}")
    grant = state.grants.get(node)
    if node not in state.free() and (grant is None or grant.replaced or state.nodes[node].drained):
        raise BadInputError(f"node {node} is not there to be lost: it is drained, or away; the plan goes without it")
    bids = demand.bids
    if grant is not None and not grant.recalled:
        waits = int(grant.standby)
        bids = tuple(
            replace(bid, has=bid.has - 1 + waits, waiting=bid.waiting - waits) if bid.name == grant.job else bid
            for bid in bids
        )
    return replace(demand, nodes=demand.nodes - 1, kept_back=max(0, demand.kept_back - 1), bids=bids)


def _with_job(state: PoolState, demand: Demand, bid_of: Callable[[PooledJob, int], Bid], spec: JobSpec) -> Demand:
    known = state.jobs.get(spec.name)
    if known is not None and known.state not in OVER:
        raise BadInputError(f"name is {spec.name!r}: a job of this name is {known.state}; give another (--name)")
    check_sharing(spec)
    check_fits(state, spec)
    last = max((job.submission for job in state.jobs.values()), default=0)
    job = PooledJob(name=spec.name, submission=last + 1, spec=spec, submitted_at=state.now, pace=declared(spec))
    return replace(demand, bids=(*demand.bids, bid_of(job, demand.nodes)))
