"""Plans as simulated agents make them: a thousand agents in one process need not each make the same one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast.coordination.agent.known_plans import PlanMaker
from holdfast.coordination.generations.plan_change import Assignment
from holdfast.protocol.messages.plans import PlanChange, Shares
from holdfast.protocol.plan import GenerationPlan

#: as many as agents may be behind each other
_KEPT = 32


class SharedPlans(PlanMaker):
    """Makes a plan once of the same change of the same plan: of the very objects that one coordinator sends to all."""

    def __init__(self) -> None:
        #: by the identities of what a thing is made of, with what that is, so that they stay theirs
        self._made: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Any]] = OrderedDict()

    def plan(self, change: PlanChange, base: GenerationPlan | None) -> GenerationPlan:
        return self._once(super().plan, change, base)

    def shares(
        self, shares: Shares | None, change: PlanChange, plan: GenerationPlan, base: GenerationPlan | None
    ) -> Assignment:
        return self._once(super().shares, shares, change, plan, base)

    def _once(self, make: Callable[..., Any], *parts: object) -> Any:
        key = tuple(map(id, parts))
        if key not in self._made:
            self._made[key] = parts, make(*parts)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return self._made[key][1]
