"""Allocates nodes: turns the division of the policy into grants and recalls after each change."""

from __future__ import annotations

from dataclasses import asdict
from math import inf

from holdfast.coordination.pool.inputs import NextPlansSolved
from holdfast.coordination.pool.jobs import PooledJobs
from holdfast.coordination.pool.node_selection.choosing import select_nodes, select_surplus
from holdfast.coordination.pool.node_selection.moving import MoveQueue
from holdfast.coordination.pool.plans.deciding import CurrentPlan
from holdfast.coordination.pool.plans.paces import Paces
from holdfast.coordination.pool.share.achieving import MAX_CHANGE_S
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Worth
from holdfast.coordination.pool.share.starving import find_starved
from holdfast.coordination.pool.state import PoolState
from holdfast.protocol.pool.events import JobResized, PlanDecided
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobCosts

#: number of nodes, nodes of each job, why the other jobs wait, size of the reserve
_Plan = tuple[int, dict[str, int], dict[str, str], int]
#: seconds that a change of its nodes costs a job, until it was measured
GUESSED_CHANGE_S = 1.0
#: A job runs at least this long, in seconds, before its nodes may go to jobs of more worth. Otherwise each event could
#: stop and start it.
MIN_RUN_S = 60.0
#: seconds that a job takes to start again after it has lost its last live copy
RESTART_S = 30.0
#: seconds between checkpoints, until the job has reported them
SAVED_S = 600.0
#: seconds of work that a job without checkpoints is assumed to lose
UNSAVED_S = 86400.0


class Allocator:
    """Asks the policy for a division, and carries it out: admissions, recalls, grants."""

    def __init__(self, state: PoolState, jobs: PooledJobs, moving: MoveQueue) -> None:
        self._state = state
        self._jobs = jobs
        self._moves = moving
        self._paces = Paces(state)
        self._plan = CurrentPlan(state, self._paces)
        #: the plan of the last event
        self._announced: _Plan | None = None

    def build_demand(self) -> Demand:
        """Return the nodes to divide, and the jobs that want some.

        A granted node counts, connected or not, until its job has lost it. Nodes that jobs are returning count too:
        they will soon be free. Drained nodes do not count: like lost nodes, they are replaced from the reserve.
        """
        state = self._state
        granted = [node for node, grant in state.grants.items() if not (grant.replaced or state.nodes[node].drained)]
        nodes = len(granted) + len(state.free_nodes())
        for_jobs = max(0, len(state.nodes) - state.reserve)
        bids = (self.build_bid(job, nodes) for job in state.jobs.values() if job.state in ("queued", "admitted"))
        return Demand(
            nodes=nodes,
            bids=tuple(bids),
            kept_back=max(0, nodes - for_jobs),
            now=state.now,
            failure_rate=self._plan.failure_rate,
        )

    def build_bid(self, job: PooledJob, nodes: int) -> Bid:
        """Return a job as a policy sees it, in a pool that divides this many nodes: its sizes, rights, nodes and
        measured costs.

        A job that grew lately may not grow further. Throughput and losses are left out if the policy does not use them.
        """
        state, spec = self._state, job.spec
        change_s = min(state.move_s.get(job.name, GUESSED_CHANGE_S), MAX_CHANGE_S)
        hit_s = min(state.costs.get(job.name, JobCosts()).hit_s, MAX_CHANGE_S) or change_s
        reckons = state.config.policy.uses_throughput
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
            has=state.own_count(job.name),
            admitted=job.state == "admitted",
            limit_s=limit_s,
            ends_by=job.admitted_at + limit_s,
            preemptible=spec.preemptible,
            may_wait=spec.recovery.uses_standbys,
            standbys=spec.recovery.standbys,
            waiting=len(state.standbys(job.name)),
            had=job.share if job.state == "admitted" else 0,
            achieves=self._paces.achieved_flops(job, nodes) if reckons else (),
            in_flop=self._paces.is_in_flop(job),
            change_s=change_s,
            hit_s=hit_s,
            lost_share=self._lost_share(job, nodes, change_s) if reckons else (),
            may_starve=state.config.policy.allows_starvation and self._can_starve(job),
        )

    def _can_starve(self, job: PooledJob) -> bool:
        """Return whether the policy may leave the job without nodes: it saves its state, and has run long enough."""
        return bool(job.spec.checkpoint.dir) and self._state.now >= job.admitted_at + MIN_RUN_S

    def _lost_share(self, job: PooledJob, nodes: int, change_s: float) -> tuple[float, ...]:
        """Return the share of a job's time that roll-backs cost, with 0, 1, ... nodes (entries go beyond `nodes`).

        Unmeasured costs are estimated from the saving period.

        Args:
            nodes: nodes that the pool divides
            change_s: seconds that a change of the job's nodes costs, in which a lost copy is not yet restored
        """
        costs = self._state.costs.get(job.name, JobCosts())
        saved_s = (costs.saves_every_s or SAVED_S) if job.spec.checkpoint.dir else UNSAVED_S
        lost_s = min(costs.rolled_back_s, UNSAVED_S) or RESTART_S + saved_s / 2
        return self._paces.lost_share(job, nodes, (self._plan.failure_rate, change_s, lost_s))

    @property
    def reserve_reason(self) -> str:
        """Why this many nodes are reserved, or "" if a user chose the number."""
        return self._plan.reserve_reason

    def next_due_at(self) -> float:
        """Return when to allocate again even if nothing happens, in unix seconds; inf if never.

        That is when a job may grow or starve again, or, if a job has refused nodes, when the pool stops waiting for a
        disconnected node.
        """
        state = self._state
        ends = [job.grew_at + job.spec.snooze for job in state.jobs.values() if job.state == "admitted"]
        if state.config.policy.allows_starvation:
            ends += [job.admitted_at + MIN_RUN_S for job in state.jobs.values() if job.state == "admitted"]
        if any(state.refused.values()):
            ends += [since + state.config.back_s for since in state.away.values()]
        return min((end for end in ends if end > state.now), default=inf)

    def allocate(self) -> None:
        """Plan how many nodes each job should have, emit the plan if it is new, and do the part that is possible now:
        promote standbys, admit and resize jobs, recall, move and grant nodes.

        Also update the failure rate and the stranded jobs, and if the policy uses throughput, request plans for the
        next events.
        """
        self._moves.cancel_hopeless()
        self._state.update_failure_rate(self._plan.observed_failure_rate())
        demand, division = self._plan.divide(self.build_demand)
        if self._promote_standbys(demand, division):
            demand, division = self._plan.divide(self.build_demand)
        self._announce_plan(demand, division)
        for bid in demand.bids:
            self._resize_job(bid, division.nodes[bid.name], division.why.get(bid.name, ""))
        self._recall_replaced(demand, division)
        self._moves.start_next()
        self._grant_free_nodes(demand, division)
        self._update_stranded(demand)
        if (
            self._state.config.policy.uses_throughput
            and (question := self._plan.next_question(self.build_demand())) is not None
        ):
            self._state.request_next_plans(question)

    def on_next_plans(self, answer: NextPlansSolved) -> None:
        """Handle the plans for the possible next situations."""
        self._plan.on_next_plans(answer)

    def _promote_standbys(self, demand: Demand, division: Division) -> bool:
        """Promote standbys of running jobs that should have more nodes, connected ones first; return whether any was
        promoted.

        A job that lost a node while it had a warm standby has promoted that one itself.
        """
        state = self._state
        promoted = False
        for bid in demand.bids:
            short = division.nodes[bid.name] - bid.has
            waiting = state.standbys(bid.name) if bid.admitted else []
            for node in sorted(waiting, key=lambda name: name not in state.connected)[: max(0, short)]:
                state.promote_standby(node)
                promoted = True
        return promoted

    def _announce_plan(self, demand: Demand, division: Division) -> None:
        """Emit the plan as an event if its shares, reasons or reserve differ from the last one; a first plan only if it
        has shares or reasons.
        """
        plan = (demand.nodes, dict(division.nodes), dict(division.why), self._state.reserve)
        if plan[1:] != (self._announced[1:] if self._announced else ({}, {}, self._state.reserve)):
            self._emit_plan(
                plan,
                self._announced[1] if self._announced else {},
                division.worth,
                self._find_starved(demand, division),
            )
        self._announced = plan

    def _find_starved(self, demand: Demand, division: Division) -> dict[str, str]:
        """Return the jobs with nodes in this plan that would get none if no job kept a minimum, and why.

        Empty if the policy ignores throughput or starves jobs anyway.
        """
        policy = self._state.config.policy
        if not policy.uses_throughput or policy.allows_starvation:
            return {}
        mine = [bid for bid in demand.bids if division.nodes[bid.name]]
        return find_starved(mine, max(0, demand.nodes - demand.kept_back), demand.failure_rate)

    def _emit_plan(self, plan: _Plan, before: dict[str, int], worth: Worth | None, starved: dict[str, str]) -> None:
        """Emit the event of a plan, with its trigger and its worth if the policy computes one.

        `before`: the shares of the last plan. `starved`: from `_find_starved`.
        """
        nodes, shares, waiting, reserve = plan
        worth_fields = asdict(worth) if worth is not None else {}
        worth_fields.pop("waf", None)
        self._state.emit(
            PlanDecided,
            nodes=nodes,
            shares=shares,
            waiting=waiting,
            trigger=self._plan.trigger,
            before=before,
            source=self._plan.source,
            starved=starved,
            reserve=reserve,
            reserve_why=self._plan.reserve_reason,
            **worth_fields,
        )

    def _resize_job(self, bid: Bid, size: int, why: str) -> None:
        """Admit, preempt, starve, grow or shrink a job to `size` nodes, as the plan says.

        With size 0, a waiting job stays in the queue with the reason `why`; a running one is preempted or starved if it
        permits that. Surplus nodes are recalled; new ones are granted later.
        """
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
        if not size and bid.may_starve and state.config.policy.allows_starvation and bid.has:
            self._jobs.starve(job, why)
            return
        if size != job.share:
            self._change_share(job, size, lost=max(0, job.share - bid.has))
        if size < bid.has:
            for node in select_surplus(state.nodes, state.own_nodes(job.name), state.connected, bid.has - size):
                state.recall_node(node)

    def _change_share(self, job: PooledJob, size: int, lost: int) -> None:
        """Record the new share of an admitted job, and emit the event with the reason.

        Args:
            lost: How many nodes it has lost without replacement; the event says so.
        """
        state = self._state
        why = "nodes are available for it" if size > job.share else "other jobs get them"
        if size < job.share and lost:
            why = "no other node replaces the ones that it has lost"
        state.emit(JobResized, job=job.name, from_nodes=job.share, to_nodes=size, lost=lost, why=why)
        state.put_job(job, share=size, grew_at=state.now if size > job.share else job.grew_at)

    def _recall_replaced(self, demand: Demand, division: Division) -> None:
        """Recall drained or replaced nodes, standbys at once, others only while enough other nodes of the job train:
        its share as far as it has the nodes, and never fewer than its minimum.
        """
        state, least = self._state, {bid.name: bid.smallest for bid in demand.bids}
        for grant in list(state.grants.values()):
            if grant.recalled or not (grant.replaced or state.nodes[grant.node].drained):
                continue
            job = state.jobs[grant.job]
            if grant.standby:
                state.recall_node(grant.node)
            elif job.state == "admitted":
                mine, trains = state.own_nodes(job.name), state.training_grants.get(job.name, frozenset())
                here = sum(state.grants[node].number in trains for node in mine)
                if here >= max(least[job.name], min(division.nodes.get(job.name, 0), len(mine))):
                    state.recall_node(grant.node)

    def _grant_free_nodes(self, demand: Demand, division: Division) -> None:
        """Grant free nodes that a job accepts to jobs that should have more: jobs that are not preemptible first, then
        jobs below their minimum, then in order of submission.

        If a job accepts none, another may exchange nodes with it. The remaining nodes become standbys of the jobs that
        should have some.
        """
        state = self._state
        free = set(state.free_nodes())
        short = [bid for bid in demand.bids if state.own_count(bid.name) < division.nodes[bid.name]]
        for bid in sorted(short, key=lambda bid: (bid.preemptible, bid.has >= bid.least, bid.order)):
            mine = [grant.node for grant in state.grants_of(bid.name)]
            fit = free - state.refused.get(bid.name, frozenset())
            for node in select_nodes(state.nodes, mine, fit, division.nodes[bid.name] - state.own_count(bid.name)):
                free.discard(node)
                state.grant_node(node, bid.name)
        for bid in short:
            if free and state.own_count(bid.name) < division.nodes[bid.name]:
                self._moves.free_usable_node(bid.name, free)
        for bid in demand.bids:
            self._adjust_standbys(bid, division.standbys.get(bid.name, 0), free)

    def _update_stranded(self, demand: Demand) -> None:
        """Record the jobs that cannot start or continue, because they have refused nodes.

        Their other usable nodes are fewer than their minimum. Jobs without refusals are not recorded.
        """
        state = self._state
        mine = (bid for bid in demand.bids if state.refused.get(bid.name))
        state.set_stranded(frozenset(bid.name for bid in mine if state.usable_count(bid.name) < bid.smallest))

    def _adjust_standbys(self, bid: Bid, count: int, free: set[str]) -> None:
        """Recall standbys until the job has `count`, or grant it more from `free`, as far as it accepts those nodes.

        Granted ones are removed from `free`.
        """
        state, waiting = self._state, self._state.standbys(bid.name)
        if count < len(waiting):
            for node in select_surplus(state.nodes, waiting, state.connected, len(waiting) - count):
                state.recall_node(node)
            return
        mine = [grant.node for grant in state.grants_of(bid.name)]
        fit = free - state.refused.get(bid.name, frozenset())
        for node in select_nodes(state.nodes, mine, fit, count - len(waiting)):
            free.discard(node)
            state.grant_node(node, bid.name, standby=True)
