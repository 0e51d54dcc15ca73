"""When a pool's nodes are divided anew, and from where the division comes: looked up, or solved.

A policy that reckons is asked when nodes or jobs come and go, or what was measured of a job is far from what the plan
in force was made with; between these its shares stand, whatever of them is carried out by now. Any other is asked each
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.coordination.pool.inputs import Foreseen
from holdfast.coordination.pool.plans.paces import Paces
from holdfast.coordination.pool.plans.reserving import best_reserve, observed_repair_s, stops_of
from holdfast.coordination.pool.plans.triggers import MEASURED, RESERVE, Outline, outline, trigger
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division, Grown, Policy, Worth
from holdfast.coordination.pool.share.next_plans import Foresight, Situation, futures, situation
from holdfast.coordination.pool.state import PoolState
from holdfast.planning.waf.durations import observed_rate
from holdfast.protocol.pool.sharing import JobCosts

#: how often a node fails, per second, until enough was seen: 400 servers that trained language models had 4.18 faults
#: of all kinds in 1000 node-days (StepFun, 349 days); it counts as much as one failure that was seen
KNOWN_RATE = 4.18 / (1000 * 86400)


@dataclass(slots=True)
class PlanInForce:
    """The plan in force, and what was foreseen from it.

    trigger: what has led to it. source: table, where it was looked up; else solved. failure_rate: of a node, per
    second, with which it was made.
    """

    state: PoolState
    paces: Paces
    trigger: str = ""
    source: str = "solved"
    failure_rate: float = KNOWN_RATE
    #: why so many nodes are kept back, where the pool decides that itself
    reserve_why: str = ""
    #: a plan was looked up: whether another reserve is better now is looked at once that is carried out
    _look_at_reserve: bool = False
    _seen: Outline | None = None
    _plan: Division | None = None
    _number: int = 0
    _asked: Foresight | None = None
    _foreseen: dict[Situation, Division] = field(default_factory=dict[Situation, Division])

    def divide(self, demanded: Callable[[], Demand]) -> tuple[Demand, Division]:
        """Return how nodes are to be shared out now, and of what."""
        demand, policy = demanded(), self.state.config.policy
        seen = outline(demand)
        why, self._seen = trigger(self._seen, seen), seen
        self.trigger = why or self.trigger
        if not policy.reckons:
            return demand, divide(policy, demand)
        if why and (found := self._foreseen.get(situation(demand))) is not None:
            # (what follows it is foreseen by what is known now)
            self.paces.look(anew=True)
            self.failure_rate = self.observed()
            self._look_at_reserve = True
            return demand, self._decided(found, "table")
        calm = not why
        if self.paces.look(anew=bool(why)):
            self.trigger = why = why or MEASURED
        if not why and self._look_at_reserve and self._keep_back(demand):
            self.trigger = why = RESERVE
            calm, self._seen = False, outline(demanded())
        if not why and self._plan is not None:
            kept = divide(_Kept(policy, self._plan), demand)
            begun = [name for name, nodes in kept.nodes.items() if nodes and not self._plan.nodes.get(name)]
            if not begun:
                return demand, kept
            self.trigger = f"job {begun[0]} can begin"
        self.failure_rate = self.observed()
        if why != RESERVE and self._keep_back(demanded()):
            self._seen = outline(demanded())
        demand = replace(demanded(), calm=calm)
        return demand, self._decided(divide(policy, demand), "solved")

    def question(self, demand: Demand) -> Foresight | None:
        """Return what is to be foreseen once a plan is carried out, None where that was asked already."""
        demand = replace(demand, now=0.0)  # (nothing that is foreseen depends on it)
        if self._plan is None or (self._asked is not None and self._asked.demand == demand):
            return None
        self._number += 1
        self._foreseen.clear()
        self._asked = Foresight(number=self._number, demand=demand, starves=self.state.config.policy.starves)
        return self._asked

    def foreseen(self, answer: Foreseen) -> None:
        """Plans for what can happen next are there."""
        if self._asked is None or answer.number != self._asked.number:
            return
        expected = futures(self._asked.demand)
        if len(expected) == len(answer.divisions):
            self._foreseen = dict(zip(map(situation, expected), answer.divisions, strict=True))

    def _keep_back(self, demand: Demand) -> bool:
        """Decide anew how many nodes are kept back, where that is the pool's to say; return whether it is another."""
        state = self.state
        self._look_at_reserve = False
        if not state.config.auto_reserve:
            return False
        there = sum(not node.drained for node in state.nodes.values())
        stops = {bid.name: stops_of(state.costs.get(bid.name, JobCosts()), bid.change_s) for bid in demand.bids}
        repair_s = observed_repair_s(state.repairs)
        found = best_reserve(demand.bids, there, self.failure_rate, repair_s, stops, state.reserve)
        self.reserve_why = found.why
        return state.keep_back(found.nodes)

    def _decided(self, plan: Division, source: str) -> Division:
        self._plan, self.source = plan, source
        return plan

    def observed(self) -> float:
        """Return how often a node fails, per second, by what was seen so far."""
        state = self.state
        seen_s = max(0.0, state.now - state.began_at) * len(state.nodes)
        return observed_rate(state.failures, seen_s, known_rate=KNOWN_RATE, known_s=1 / KNOWN_RATE)


class _Kept:
    """A policy whose shares were decided."""

    reckons = False

    def __init__(self, policy: Policy, plan: Division) -> None:
        self._policy, self._plan = policy, plan
        self.name, self.starves = policy.name, policy.starves

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        return self._policy.order(bids)

    def begins_with(self, bid: Bid) -> int:
        return self._policy.begins_with(bid)

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        sizes = dict(nodes)
        for bid in bids:
            more = max(0, min(self._plan.nodes.get(bid.name, 0) - sizes[bid.name], free))
            sizes[bid.name] += more
            free -= more
        return Grown(sizes, self._worth)

    @property
    def _worth(self) -> Worth | None:
        return self._plan.worth
