"""From a policy's division to grants and recalls: what a pool does as soon as anything has changed."""

from __future__ import annotations

from math import inf

from holdfast.coordination.pool.choosing import choose, spare
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool.events import JobResized, PlanDecided
from holdfast.protocol.pool.record import PooledJob


class Granting:
    """Asks the policy, and brings about what it says: admissions, recalls, grants."""

    def __init__(self, state: PoolState, jobs: PooledJobs) -> None:
        self._state = state
        self._jobs = jobs
        #: the newest plan as it was told
        self._told: tuple[int, dict[str, int], dict[str, str]] | None = None

    def demand(self) -> Demand:
        """Return what there is to share out, and who wants it.

        A node that is a job's counts, connected or not: while its job has not lost it, it is there. One that is being
        given back counts as well, and so do those of jobs that are leaving theirs: they are about to be free.
        """
        state = self._state
        nodes = len(state.grants) + len(state.free())
        for_jobs = max(0, len(state.nodes) - state.config.reserve)
        bids = (self.bid(job) for job in state.jobs.values() if job.state in ("queued", "admitted"))
        return Demand(nodes=nodes, bids=tuple(bids), kept_back=max(0, nodes - for_jobs), now=state.now)

    def bid(self, job: PooledJob) -> Bid:
        """Return a job as a policy sees it."""
        state, spec = self._state, job.spec
        snoozes = job.state == "admitted" and state.now < job.grew_at + spec.snooze
        least = spec.nodes_to_begin
        limit_s = spec.time_limit or inf
        return Bid(
            name=job.name,
            order=job.submission,
            least=least,
            most=max(job.share, least) if snoozes else spec.max_nodes,
            sizes=tuple(sorted(set(spec.sizes))),
            weight=spec.weight,
            priority=spec.priority,
            has=state.has(job.name),
            admitted=job.state == "admitted",
            limit_s=limit_s,
            ends_by=job.admitted_at + limit_s,
            preemptible=spec.preemptible,
        )

    def next_at(self) -> float:
        """Return when a job has snoozed long enough, unix seconds; inf where none does."""
        ends = (job.grew_at + job.spec.snooze for job in self._state.jobs.values() if job.state == "admitted")
        return min((end for end in ends if end > self._state.now), default=inf)

    def carry_out(self) -> None:
        """Decide who is to have how many nodes, and do of that what can be done now."""
        demand = self.demand()
        division = divide(self._state.config.policy, demand)
        self._tell(demand, division)
        for bid in demand.bids:
            self._resize(bid, division.nodes[bid.name], division.why.get(bid.name, ""))
        self._grant(demand, division)

    def _tell(self, demand: Demand, division: Division) -> None:
        plan = (demand.nodes, dict(division.nodes), dict(division.why))
        if plan[1:] != (self._told[1:] if self._told else ({}, {})):
            self._state.emit(PlanDecided, nodes=plan[0], shares=plan[1], waiting=plan[2])
        self._told = plan

    def _resize(self, bid: Bid, size: int, why: str) -> None:
        state, job = self._state, self._state.jobs[bid.name]
        if not bid.admitted:
            if size:
                self._jobs.admit(job, size)
            elif why != job.why:
                state.put_job(job, why=why)
            return
        if not size and bid.preemptible:
            self._jobs.preempt(job)
            return
        if size != job.share:
            self._resized(job, size, lost=max(0, job.share - bid.has))
        if size < bid.has:
            mine = [grant.node for grant in state.grants_of(job.name) if not grant.recalled]
            for node in spare(state.nodes, mine, state.here, bid.has - size):
                state.recall(node)

    def _resized(self, job: PooledJob, size: int, lost: int) -> None:
        state = self._state
        why = "nodes are there for it" if size > job.share else "others are to have them"
        if size < job.share and lost:
            why = "no other node is there for those that it has lost"
        state.emit(JobResized, job=job.name, from_nodes=job.share, to_nodes=size, lost=lost, why=why)
        state.put_job(job, share=size, grew_at=state.now if size > job.share else job.grew_at)

    def _grant(self, demand: Demand, division: Division) -> None:
        """Give free nodes to those that are to have more: whoever is below its least first, then as they came."""
        state = self._state
        free = set(state.free())
        short = [bid for bid in demand.bids if state.has(bid.name) < division.nodes[bid.name]]
        for bid in sorted(short, key=lambda one: (one.preemptible, one.has >= one.least, one.order)):
            mine = [grant.node for grant in state.grants_of(bid.name)]
            fit = free - state.refused.get(bid.name, frozenset())
            for node in choose(state.nodes, mine, fit, division.nodes[bid.name] - state.has(bid.name)):
                free.discard(node)
                state.give(node, bid.name)
