"""Decides when to divide a pool's nodes again, and whether to look the division up or to solve it.

A policy that uses throughput is asked only if nodes or jobs come or go, or if a measurement differs much from the
numbers of the current plan. Between these events the shares stay. Every other policy is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.coordination.pool.inputs import NextPlansSolved
from holdfast.coordination.pool.plans.paces import Paces
from holdfast.coordination.pool.plans.reserving import estimate_stop_times, find_best_reserve, observed_repair_s
from holdfast.coordination.pool.plans.triggers import MEASURED, RESERVE, Outline, find_trigger, outline_demand
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Policy, Shares, Worth
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion, Situation, list_futures, situation_of
from holdfast.coordination.pool.state import PoolState
from holdfast.planning.waf.durations import observed_rate
from holdfast.protocol.pool.sharing import JobCosts

#: Failures of a node per second, until enough were observed. 400 servers that trained language models had 4.18 faults
#: of all kinds in 1000 node-days (StepFun, 349 days). This prior counts as much as one observed failure.
KNOWN_RATE = 4.18 / (1000 * 86400)


@dataclass(slots=True)
class CurrentPlan:
    """The current plan, and the plans prepared for the possible next situations."""

    state: PoolState
    paces: Paces
    #: the event that led to the plan
    trigger: str = ""
    #: "table" if the plan was looked up, else "solved"
    source: str = "solved"
    #: failures of a node per second, as the plan assumes
    failure_rate: float = KNOWN_RATE
    #: why this many nodes are reserved, if the pool chooses the number
    reserve_reason: str = ""
    #: A plan was looked up: after it is carried out, check whether another reserve is better.
    _check_reserve: bool = False
    _last_outline: Outline | None = None
    _plan: Division | None = None
    _number: int = 0
    _question: NextPlansQuestion | None = None
    _next_plans: dict[Situation, Division] = field(default_factory=dict[Situation, Division])

    def divide(self, demanded: Callable[[], Demand]) -> tuple[Demand, Division]:
        """Return the current demand, and how to divide its nodes.

        If nothing has changed, the shares of the last plan stay. After a change, the prepared plan is looked up; if
        there is none, or measurements or the reserve have changed, a new one is computed. Policies without throughput
        always compute.

        Args:
            demanded: Returns the demand as the pool is now; the reserve may change between calls.
        """
        demand, policy = demanded(), self.state.config.policy
        seen = outline_demand(demand)
        why, self._last_outline = find_trigger(self._last_outline, seen), seen
        self.trigger = why or self.trigger
        if not policy.uses_throughput:
            return demand, divide(policy, demand)
        if why and (found := self._next_plans.get(situation_of(demand))) is not None:
            # The next plans will be prepared with the measurements of now.
            self.paces.refresh(force=True)
            self.failure_rate = self.observed_failure_rate()
            self._check_reserve = True
            return demand, self._set_plan(found, "table")
        calm = not why
        if self.paces.refresh(force=bool(why)):
            self.trigger = why = why or MEASURED
        if not why and self._check_reserve and self._update_reserve(demand):
            self.trigger = why = RESERVE
            calm = False
            self._last_outline = outline_demand(demanded())
        if not why and self._plan is not None:
            kept = divide(_FixedShares(policy, self._plan), demand)
            begun = [name for name, nodes in kept.nodes.items() if nodes and not self._plan.nodes.get(name)]
            if not begun:
                return demand, kept
            self.trigger = f"job {begun[0]} can begin"
        self.failure_rate = self.observed_failure_rate()
        if why != RESERVE and self._update_reserve(demanded()):
            self._last_outline = outline_demand(demanded())
        demand = replace(demanded(), calm=calm)
        return demand, self._set_plan(divide(policy, demand), "solved")

    def next_question(self, demand: Demand) -> NextPlansQuestion | None:
        """Return the question for the plans after each possible next event, or None if it was asked already or there is
        no plan.

        Earlier answers are forgotten.
        """
        demand = replace(demand, now=0.0)  # No prepared plan depends on the time.
        if self._plan is None or (self._question is not None and self._question.demand == demand):
            return None
        self._number += 1
        self._next_plans.clear()
        self._question = NextPlansQuestion(
            number=self._number, demand=demand, starves=self.state.config.policy.allows_starvation
        )
        return self._question

    def on_next_plans(self, answer: NextPlansSolved) -> None:
        """Keep the plans for the possible next situations.

        Ignore answers to earlier questions, or of the wrong length.
        """
        if self._question is None or answer.number != self._question.number:
            return
        expected = list_futures(self._question.demand)
        if len(expected) == len(answer.divisions):
            self._next_plans = dict(zip(map(situation_of, expected), answer.divisions, strict=True))

    def _update_reserve(self, demand: Demand) -> bool:
        """Choose the best size of the reserve, and note the reason; return whether it changed.

        False if the size is a setting.
        """
        state = self.state
        self._check_reserve = False
        if not state.config.auto_reserve:
            return False
        nodes = sum(not node.drained for node in state.nodes.values())
        stops = {
            bid.name: estimate_stop_times(state.costs.get(bid.name, JobCosts()), bid.change_s) for bid in demand.bids
        }
        repair_s = observed_repair_s(state.repairs)
        found = find_best_reserve(demand.bids, nodes, self.failure_rate, repair_s, stops, state.reserve)
        self.reserve_reason = found.why
        return state.set_reserve(found.nodes)

    def _set_plan(self, plan: Division, source: str) -> Division:
        """Remember the current plan, and return it."""
        self._plan, self.source = plan, source
        return plan

    def observed_failure_rate(self) -> float:
        """Return the failures of a node per second, as observed so far, with one failure at `KNOWN_RATE` as a prior."""
        state = self.state
        seen_s = max(0.0, state.now - state.began_at) * len(state.nodes)
        return observed_rate(state.failures, seen_s, known_rate=KNOWN_RATE, known_s=1 / KNOWN_RATE)


class _FixedShares:
    """A policy with the shares of an existing plan."""

    uses_throughput = False

    def __init__(self, policy: Policy, plan: Division) -> None:
        self._policy, self._plan = policy, plan
        self.name, self.allows_starvation = policy.name, policy.allows_starvation

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        return self._policy.order(bids)

    def nodes_to_start(self, bid: Bid) -> int:
        return self._policy.nodes_to_start(bid)

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Give each job its nodes of the fixed plan, in the order of `bids` while `free` ones last; none loses any.

        Args:
            nodes: nodes that each job has so far
            bids: the jobs
            free: nodes to add to them
            failure_rate: not used
        """
        sizes = dict(nodes)
        for bid in bids:
            more = max(0, min(self._plan.nodes.get(bid.name, 0) - sizes[bid.name], free))
            sizes[bid.name] += more
            free -= more
        return Shares(sizes, self._worth)

    @property
    def _worth(self) -> Worth | None:
        return self._plan.worth
