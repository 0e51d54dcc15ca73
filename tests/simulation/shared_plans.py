"""Shares plans between simulated agents, so that 1,000 agents in one process do not build the same plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast.coordination.agent.known_plans import PlanBuilder
from holdfast.coordination.generations.plan_delta import Assignment
from holdfast.protocol.messages.plans import PlanChange, Shares
from holdfast.protocol.plan import GenerationPlan

#: The number of cached plans, because agents may be at different plans.
_KEPT = 32


class SharedPlans(PlanBuilder):
    """Builds a plan once for each pair of change and base plan, identified by the objects that are sent."""

    def __init__(self) -> None:
        #: The results by the ids of their inputs; the inputs are kept so that their ids stay valid.
        self._made: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Any]] = OrderedDict()

    def build_plan(self, change: PlanChange, base: GenerationPlan | None) -> GenerationPlan:
        return self._once(super().build_plan, change, base)

    def build_shares(
        self, shares: Shares | None, change: PlanChange, plan: GenerationPlan, base: GenerationPlan | None
    ) -> Assignment:
        return self._once(super().build_shares, shares, change, plan, base)

    def _once(self, make: Callable[..., Any], *parts: object) -> Any:
        key = tuple(map(id, parts))
        if key not in self._made:
            self._made[key] = parts, make(*parts)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return self._made[key][1]
