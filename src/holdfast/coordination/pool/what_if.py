"""Computes the pool's next plan if a node were lost, nodes were added, or a job submitted; the pool does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.coordination.pool.plans.paces import declared_pace
from holdfast.coordination.pool.requests import check_fits, check_sharing
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Policy, Worth
from holdfast.coordination.pool.share.starving import find_starved
from holdfast.coordination.pool.state import PoolState
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.pool.record import OVER, PooledJob


@dataclass(frozen=True, slots=True)
class LoseNode:
    """This node fails."""

    node: str


@dataclass(frozen=True, slots=True)
class AddNodes:
    """This many new nodes join the pool."""

    nodes: int


@dataclass(frozen=True, slots=True)
class AddJob:
    """This job is submitted."""

    spec: JobSpec


Change = LoseNode | AddNodes | AddJob


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The current plan, and the plan after the change."""

    #: nodes to divide now
    nodes_now: int
    #: nodes to divide after the change
    nodes: int
    #: nodes of each job now
    shares_now: Mapping[str, int]
    #: nodes of each job after the change
    shares: Mapping[str, int]
    #: reasons of the jobs that would wait
    waiting: Mapping[str, str]
    #: None if the policy does not compute it
    worth: Worth | None = None
    #: jobs that would get no nodes if no job kept a minimum, and why
    starved: Mapping[str, str] = field(default_factory=dict[str, str])


def compute_what_if(policy: Policy, now: Demand, then: Demand) -> WhatIf:
    """Return the plan for a changed demand next to the present shares, with the jobs that it would starve if none kept
    a minimum.

    Those are empty if the policy ignores throughput or starves jobs anyway.

    Args:
        policy: divides the nodes
        now: the present demand
        then: the changed demand
    """
    division = divide(policy, then)
    mine = [bid for bid in then.bids if division.nodes[bid.name]]
    nodes = max(0, then.nodes - then.kept_back)
    return WhatIf(
        nodes_now=now.nodes,
        nodes=then.nodes,
        shares_now={bid.name: bid.had for bid in now.bids},
        shares=division.nodes,
        waiting=division.why,
        worth=division.worth,
        starved=find_starved(mine, nodes, then.failure_rate)
        if policy.uses_throughput and not policy.allows_starvation
        else {},
    )


def demand_after(state: PoolState, demand: Demand, bid_of: Callable[[PooledJob, int], Bid], change: Change) -> Demand:
    """Return the demand after a node was lost, nodes were added, or a job was submitted. The pool does not change.

    Args:
        state: the pool
        demand: the current demand
        bid_of: returns a job as a policy sees it, given a number of nodes
        change: the change

    Raises:
        BadInputError: The change is impossible.
        UnreachableError: The pool has no such node.
    """
    match change:
        case LoseNode(node):
            return _without_node(state, demand, node)
        case AddNodes(nodes):
            if nodes < 1:
                raise BadInputError(f"{nodes} nodes cannot come: give 1 or more")
            known, most = len(state.nodes), state.config.most_nodes
            if known + nodes > most:  # The time of a plan grows with the square of this number.
                raise BadInputError(f"{nodes} nodes cannot come: a pool has at most {most}, and this one has {known}")
            return replace(demand, nodes=demand.nodes + nodes)
        case AddJob(spec):
            return _with_job(state, demand, bid_of, spec)


def _without_node(state: PoolState, demand: Demand, node: str) -> Demand:
    """Return the demand without a node. If a job has the node, it counts as lost by that job.

    Raises:
        UnreachableError: The pool has no such node.
        BadInputError: It is drained or absent, so it is not part of the demand.
    """
    if node not in state.nodes:
        known = ", ".join(sorted(state.nodes)) or "none"
        raise UnreachableError(f"there is no node {node!r}: the nodes are {known}")
    grant = state.grants.get(node)
    if node not in state.free_nodes() and (grant is None or grant.replaced or state.nodes[node].drained):
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
    """Return the demand with one more job.

    Args:
        bid_of: returns a job as a policy sees it, given a number of nodes

    Raises:
        BadInputError: A live job has this name, its settings are contradictory, or it is too large.
    """
    known = state.jobs.get(spec.name)
    if known is not None and known.state not in OVER:
        raise BadInputError(f"name is {spec.name!r}: a job of this name is {known.state}; give another (--name)")
    check_sharing(spec)
    check_fits(state, spec)
    last = max((job.submission for job in state.jobs.values()), default=0)
    job = PooledJob(name=spec.name, submission=last + 1, spec=spec, submitted_at=state.now, pace=declared_pace(spec))
    return replace(demand, bids=(*demand.bids, bid_of(job, demand.nodes)))
