"""Prepares plans for every possible next event (Unicron, section 5.2), so that they only need to be looked up.

A question is solved in the background, in another process, so it contains all inputs. It covers: each job hit, or a
standby of it lost; a node that returns, or a new one; the end of each job; and queued jobs that start as a consequence.
An answer counts only if jobs and nodes are exactly as predicted. New measurements wait for the plan after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from holdfast.coordination.pool.share.achieving import Waf, build_tasks, mean_flops_per_node
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division
from holdfast.planning.waf.plan import Planner, WafPlan, best_plan

#: the parts of a demand that an answer depends on, without measurements
Situation = tuple[Any, ...]
#: seconds after which an answer comes too late to be useful
WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlansQuestion:
    """The question: which plan follows each possible next event?"""

    #: number of the question, which the answer repeats
    number: int
    #: the demand after the current plan
    demand: Demand
    #: as in `Policy`
    starves: bool = False

    def solve(self) -> list[Division]:
        """Return the plan for each of `list_futures`, in that order. Computed tables are shared between them."""
        policy = _CachedWaf(starves=self.starves)
        divide(policy, self.demand)
        return [divide(policy, future) for future in list_futures(self.demand)]


def situation_of(demand: Demand) -> Situation:
    """Return the parts of a demand that an answer depends on, without measurements."""
    return (demand.nodes, demand.kept_back, *sorted(map(_bid_situation, demand.bids)))


def _bid_situation(bid: Bid) -> tuple[Any, ...]:
    """Return the parts of a job that an answer depends on, without measurements."""
    asks = (bid.least, bid.most, bid.sizes, bid.weight, bid.preemptible, bid.may_wait, bid.standbys)
    return bid.order, bid.name, bid.has, bid.had, bid.waiting, bid.admitted, *asks


def is_time_independent(demand: Demand) -> bool:
    """Return whether a division does not depend on the time: no job waits, or no running job has a time limit."""
    waits = any(not (bid.admitted or bid.preemptible) for bid in demand.bids)
    return not waits or all(bid.ends_by == inf for bid in demand.bids if bid.admitted)


def list_futures(demand: Demand) -> list[Demand]:
    """Return the demands after each possible next event.

    Returns [] if a division depends on the time, as while a job waits for the time limit of another.
    """
    if not is_time_independent(demand):
        return []
    return list(_generate_futures(demand))


def _generate_futures(demand: Demand) -> Iterator[Demand]:
    """Yield the demand after each possible next event: a job loses a node or a standby, a node joins the jobs or the
    reserve, or a job ends.
    """
    fewer = replace(demand, nodes=demand.nodes - 1, kept_back=max(0, demand.kept_back - 1))
    for bid in demand.bids:
        if bid.admitted and bid.has:
            yield _change_bid(fewer, bid, has=bid.has - 1)
        if bid.admitted and bid.waiting:
            yield _change_bid(fewer, bid, waiting=bid.waiting - 1)
    yield replace(demand, nodes=demand.nodes + 1)
    yield replace(demand, nodes=demand.nodes + 1, kept_back=demand.kept_back + 1)
    for bid in demand.bids:
        yield replace(demand, bids=tuple(other for other in demand.bids if other is not bid))


def _change_bid(demand: Demand, bid: Bid, **changes: int) -> Demand:
    """Return the demand with a changed job."""
    return replace(demand, bids=tuple(replace(bid, **changes) if other is bid else other for other in demand.bids))


class _CachedWaf(Waf):
    """The same policy with shared tables: tables for one future serve all that differ from it in one job."""

    def __init__(self, *, starves: bool) -> None:
        super().__init__(starves=starves)
        self._planners: list[_PlannerTables] = []

    def _best(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> WafPlan:
        """Return the best plan for `bids`, none below its floor.

        Looked up in cached tables of the same nodes and time if they hold it; else tables are computed and kept, unless
        a job is new.

        Args:
            bids: the jobs
            floors: nodes that each job gets at least
            nodes: nodes to divide, the floors included
            running_s: seconds until the next failure, for which the plan is made
        """
        for made in self._planners:
            if (
                made.nodes == nodes
                and made.running_s == running_s
                and (plan := made.find_plan(bids, floors)) is not None
            ):
                return plan
        if any(not bid.admitted for bid in bids):  # Tables with jobs that have just started serve no other future.
            return best_plan(build_tasks(bids, floors, nodes), nodes, running_s)
        unhit = [replace(bid, has=max(bid.has, bid.had)) for bid in bids]
        made = _PlannerTables(unhit, dict(floors), nodes, running_s)
        self._planners.append(made)
        plan = made.find_plan(bids, floors)
        return plan if plan is not None else best_plan(build_tasks(bids, floors, nodes), nodes, running_s)


class _PlannerTables:
    """Tables for some jobs, none of which is hit."""

    def __init__(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> None:
        self.nodes = nodes
        self.running_s = running_s
        self._bids = {bid.name: bid for bid in bids}
        self._floors = floors
        self._mean_flops = mean_flops_per_node(bids)
        self._planner = Planner(build_tasks(bids, floors, nodes), nodes, running_s)

    def find_plan(self, bids: Sequence[Bid], floors: Mapping[str, int]) -> WafPlan | None:
        """Look up the plan of these jobs.

        The tables hold it if at most one job has started, ended or lost a node since they were made. Return None after
        any other change of a bid, a floor or the mean FLOPS per node.
        """
        fresh = [bid for bid in bids if bid.name not in self._bids]
        if any(not self._is_same_bid(bid, floors) for bid in bids if bid not in fresh):
            return None
        if mean_flops_per_node(bids) != self._mean_flops:  # Jobs without measurements depend on the mean.
            return None
        missing = self._bids.keys() - {bid.name for bid in bids}
        hit = [bid.name for bid in bids if bid.has < bid.had]
        if len(missing) + len(hit) + len(fresh) > 1:
            return None
        if fresh:
            (begun,) = (task for task in build_tasks(bids, floors, self.nodes) if task.name == fresh[0].name)
            return self._planner.plan_with_job(begun)
        if hit:
            return self._planner.plan_after_failure(hit[0])
        return self._planner.plan_after_end(next(iter(missing))) if missing else self._planner.plan()

    def _is_same_bid(self, bid: Bid, floors: Mapping[str, int]) -> bool:
        """Return whether a job asks for the same as in the tables."""
        known = self._bids[bid.name]
        return floors[bid.name] == self._floors[bid.name] and bid == replace(
            known, has=bid.has, waiting=bid.waiting, standbys=bid.standbys
        )
