"""From a policy's division to grants and recalls: what a pool does as soon as anything has changed."""

from __future__ import annotations

from dataclasses import asdict
from math import inf

from holdfast.coordination.pool.inputs import Foreseen
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.places.choosing import choose, spare
from holdfast.coordination.pool.places.moving import Moving
from holdfast.coordination.pool.plans.deciding import PlanInForce
from holdfast.coordination.pool.plans.paces import Paces
from holdfast.coordination.pool.share.achieving import MOST_CHANGE_S
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Worth
from holdfast.coordination.pool.share.starving import would_starve
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool.events import JobResized, PlanDecided
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobCosts

#: nodes that there are, how many each job is to have, why the others wait, how many are kept back
_Plan = tuple[int, dict[str, int], dict[str, str], int]
#: until a job's own changes were measured, seconds
GUESSED_CHANGE_S = 1.0
#: a job that was begun is left with no node only so long after that, where weights may do so: or it would go to and fro
#: with whatever else happens meanwhile
STAYS_S = 60.0
#: a job whose last copy is lost begins again, which takes so long, from what it saved, so long ago at the most; one
#: that saves nothing begins anew
RESTART_S, SAVED_S, UNSAVED_S = 30.0, 600.0, 86400.0


class Granting:
    """Asks the policy, and brings about what it says: admissions, recalls, grants."""

    def __init__(self, state: PoolState, jobs: PooledJobs, moving: Moving) -> None:
        self._state = state
        self._jobs = jobs
        self._moving = moving
        self._paces = Paces(state)
        self._deciding = PlanInForce(state, self._paces)
        #: the newest plan as it was told
        self._told: _Plan | None = None

    def demand(self) -> Demand:
        """Return what there is to share out, and who wants it.

        A node that is a job's counts, connected or not: while its job has not lost it, it is there. One that is being
        given back counts as well, and so do those of jobs that are leaving theirs: they are about to be free. One that
        is drained does not: like one that is lost, it is made up for by the reserve.
        """
        state = self._state
        there = [node for node, grant in state.grants.items() if not (grant.replaced or state.nodes[node].drained)]
        nodes = len(there) + len(state.free())
        for_jobs = max(0, len(state.nodes) - state.reserve)
        bids = (self.bid(job, nodes) for job in state.jobs.values() if job.state in ("queued", "admitted"))
        return Demand(
            nodes=nodes,
            bids=tuple(bids),
            kept_back=max(0, nodes - for_jobs),
            now=state.now,
            failure_rate=self._deciding.failure_rate,
        )

    def bid(self, job: PooledJob, nodes: int) -> Bid:
        """Return a job as a policy sees it, which has so many nodes to share out."""
        state, spec = self._state, job.spec
        change_s = min(state.move_s.get(job.name, GUESSED_CHANGE_S), MOST_CHANGE_S)
        hit_s = min(state.costs.get(job.name, JobCosts()).hit_s, MOST_CHANGE_S) or change_s
        reckons = state.config.policy.reckons
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
            may_wait=spec.recovery.uses_standbys,
            standbys=spec.recovery.standbys,
            waiting=len(state.standbys(job.name)),
            had=job.share if job.state == "admitted" else 0,
            achieves=self._paces.achieved(job, nodes) if reckons else (),
            in_flop=self._paces.in_flop(job),
            change_s=change_s,
            hit_s=hit_s,
            lost_share=self._lost_share(job, nodes, change_s) if reckons else (),
            may_starve=state.config.policy.starves and self._may_starve(job),
        )

    def _may_starve(self, job: PooledJob) -> bool:
        return bool(job.spec.checkpoint.dir) and self._state.now >= job.admitted_at + STAYS_S

    def _lost_share(self, job: PooledJob, nodes: int, change_s: float) -> tuple[float, ...]:
        """Return the share of a job's time that going back takes, with 0.. nodes."""
        costs = self._state.costs.get(job.name, JobCosts())
        saved_s = (costs.saves_every_s or SAVED_S) if job.spec.checkpoint.dir else UNSAVED_S
        lost_s = min(costs.rolled_back_s, UNSAVED_S) or RESTART_S + saved_s / 2
        return self._paces.lost_share(job, nodes, (self._deciding.failure_rate, change_s, lost_s))

    @property
    def reserve_why(self) -> str:
        """Why so many nodes are kept back, "" where a person has said how many."""
        return self._deciding.reserve_why

    def next_at(self) -> float:
        """Return when a job has snoozed long enough, or a node is no more awaited, unix seconds; inf where none is."""
        state = self._state
        ends = [job.grew_at + job.spec.snooze for job in state.jobs.values() if job.state == "admitted"]
        if state.config.policy.starves:
            ends += [job.admitted_at + STAYS_S for job in state.jobs.values() if job.state == "admitted"]
        if any(state.refused.values()):
            ends += [since + state.config.back_s for since in state.away.values()]
        return min((end for end in ends if end > state.now), default=inf)

    def carry_out(self) -> None:
        """Decide who is to have how many nodes, and do of that what can be done now."""
        self._moving.give_up()
        self._state.tell_rate(self._deciding.observed())
        demand, division = self._deciding.divide(self.demand)
        if self._call(demand, division):
            demand, division = self._deciding.divide(self.demand)
        self._tell(demand, division)
        for bid in demand.bids:
            self._resize(bid, division.nodes[bid.name], division.why.get(bid.name, ""))
        self._clear(demand, division)
        self._moving.go_on()
        self._grant(demand, division)
        self._strand(demand)
        if self._state.config.policy.reckons and (question := self._deciding.question(self.demand())) is not None:
            self._state.foresee(question)

    def foreseen(self, answer: Foreseen) -> None:
        """Plans for what can happen next are there."""
        self._deciding.foreseen(answer)

    def _call(self, demand: Demand, division: Division) -> bool:
        """Have standbys of their own join those that are to have more nodes; return whether there were any.

        A job that has lost a node, and had one that was warm, has done so by itself.
        """
        state, called = self._state, False
        for bid in demand.bids:
            short = division.nodes[bid.name] - bid.has
            waiting = state.standbys(bid.name) if bid.admitted else []
            for node in sorted(waiting, key=lambda name: name not in state.here)[: max(0, short)]:
                state.call(node)
                called = True
        return called

    def _tell(self, demand: Demand, division: Division) -> None:
        plan = (demand.nodes, dict(division.nodes), dict(division.why), self._state.reserve)
        if plan[1:] != (self._told[1:] if self._told else ({}, {}, self._state.reserve)):
            self._emit(plan, self._told[1] if self._told else {}, division.worth, self._starved(demand, division))
        self._told = plan

    def _starved(self, demand: Demand, division: Division) -> dict[str, str]:
        """Return whom the plan would leave with nothing if nobody had a least to keep, and why."""
        policy = self._state.config.policy
        if not policy.reckons or policy.starves:
            return {}
        mine = [bid for bid in demand.bids if division.nodes[bid.name]]
        return would_starve(mine, max(0, demand.nodes - demand.kept_back), demand.failure_rate)

    def _emit(self, plan: _Plan, before: dict[str, int], worth: Worth | None, starved: dict[str, str]) -> None:
        nodes, shares, waiting, reserve = plan
        told = asdict(worth) if worth is not None else {}
        told.pop("waf", None)
        self._state.emit(
            PlanDecided,
            nodes=nodes,
            shares=shares,
            waiting=waiting,
            trigger=self._deciding.trigger,
            before=before,
            source=self._deciding.source,
            starved=starved,
            reserve=reserve,
            reserve_why=self._deciding.reserve_why,
            **told,
        )

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
        if not size and bid.may_starve and state.config.policy.starves and bid.has:
            self._jobs.starve(job, why)
            return
        if size != job.share:
            self._resized(job, size, lost=max(0, job.share - bid.has))
        if size < bid.has:
            for node in spare(state.nodes, state.own(job.name), state.here, bid.has - size):
                state.recall(node)

    def _resized(self, job: PooledJob, size: int, lost: int) -> None:
        state = self._state
        why = "nodes are there for it" if size > job.share else "others are to have them"
        if size < job.share and lost:
            why = "no other node is there for those that it has lost"
        state.emit(JobResized, job=job.name, from_nodes=job.share, to_nodes=size, lost=lost, why=why)
        state.put_job(job, share=size, grew_at=state.now if size > job.share else job.grew_at)

    def _clear(self, demand: Demand, division: Division) -> None:
        """Have jobs leave nodes that are drained, or replaced, once those train that they have in their place.

        Nobody is taken below its least; who waits there goes at once.
        """
        state, least = self._state, {bid.name: bid.smallest for bid in demand.bids}
        for grant in list(state.grants.values()):
            if grant.recalled or not (grant.replaced or state.nodes[grant.node].drained):
                continue
            job = state.jobs[grant.job]
            if grant.standby:
                state.recall(grant.node)
            elif job.state == "admitted":
                mine, trains = state.own(job.name), state.trains.get(job.name, frozenset())
                here = sum(state.grants[node].number in trains for node in mine)
                if here >= max(least[job.name], min(division.nodes.get(job.name, 0), len(mine))):
                    state.recall(grant.node)

    def _grant(self, demand: Demand, division: Division) -> None:
        """Give free nodes to those that are to have more: whoever is below its least first, then as they came.

        What is left over waits in jobs, which are to have so many standbys.
        """
        state = self._state
        free = set(state.free())
        short = [bid for bid in demand.bids if state.has(bid.name) < division.nodes[bid.name]]
        for bid in sorted(short, key=lambda one: (one.preemptible, one.has >= one.least, one.order)):
            mine = [grant.node for grant in state.grants_of(bid.name)]
            fit = free - state.refused.get(bid.name, frozenset())
            for node in choose(state.nodes, mine, fit, division.nodes[bid.name] - state.has(bid.name)):
                free.discard(node)
                state.give(node, bid.name)
        for bid in short:
            if free and state.has(bid.name) < division.nodes[bid.name]:
                self._moving.exchange(bid.name, free)
        for bid in demand.bids:
            self._stand_by(bid, division.standbys.get(bid.name, 0), free)

    def _strand(self, demand: Demand) -> None:
        """Say which jobs cannot be begun, or go on, because too few nodes would do for them."""
        state = self._state
        mine = (bid for bid in demand.bids if state.refused.get(bid.name))
        state.strand(frozenset(bid.name for bid in mine if state.usable(bid.name) < bid.smallest))

    def _stand_by(self, bid: Bid, count: int, free: set[str]) -> None:
        state, waiting = self._state, self._state.standbys(bid.name)
        if count < len(waiting):
            for node in spare(state.nodes, waiting, state.here, len(waiting) - count):
                state.recall(node)
            return
        mine = [grant.node for grant in state.grants_of(bid.name)]
        fit = free - state.refused.get(bid.name, frozenset())
        for node in choose(state.nodes, mine, fit, count - len(waiting)):
            free.discard(node)
            state.give(node, bid.name, standby=True)
