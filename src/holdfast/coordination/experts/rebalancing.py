"""Every so many steps a new placement is computed for the loads of late, and adopted if that pays.

The first one is computed as soon as loads are known: until then all experts count as equally loaded.

The machine asks for the placement (PlanExperts) and goes on; the shell computes it beside everything else and feeds it
back (Planned). What happened meanwhile may have made it worthless: then it is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.loads import LoadBook
from holdfast.coordination.experts.placing import counts_by_node
from holdfast.coordination.generations.planner import placing
from holdfast.coordination.inputs import Planned
from holdfast.coordination.instructions import PlanExperts
from holdfast.coordination.progress.costs import MeasuredCosts
from holdfast.coordination.turn import Turn
from holdfast.planning import Migration, RebalanceDecision, Shortage, decide_rebalance, plan_transfers
from holdfast.planning.arrays import indices
from holdfast.protocol.events import RebalanceDecided
from holdfast.protocol.plan import ExpertPlan, ExpertShape, GenerationPlan


class Rebalancing:
    """Asks for a placement once loads are known and at multiples of `rebalance_every` steps; weighs what comes."""

    def __init__(self, turn: Turn, config: CoordinatorConfig, loads: LoadBook, step: int) -> None:
        """Begin at the committed `step`: the first look is due after a later one, once loads are known."""
        self._turn = turn
        self._config = config
        self._loads = loads
        self._asked_at = step
        self._looked = False
        self._waiting = False

    def ask(self, plan: GenerationPlan, committed: int) -> None:
        """Have a placement computed for the members of `plan`, if one is due after this step."""
        config, turn = self._config, self._turn
        every = 0 if config.spec.experiments.static_experts else config.spec.experts.rebalance_every
        self._asked_at = min(self._asked_at, committed)  # after a roll-back
        if not every or committed == self._asked_at:
            return
        if self._looked and committed // every == self._asked_at // every:
            return
        if self._waiting or self._loads.tokens is None or plan.expert_plan is None:
            return
        self._asked_at = committed
        self._looked = self._waiting = True
        held = dict(zip(plan.workers, plan.expert_plan.placement, strict=True))
        solve = placing(turn.record, turn.members, plan.workers, held, self._config, self._loads.tokens)
        assert solve is not None
        turn.compute(PlanExperts(plan.generation, solve))

    def weigh(self, planned: Planned, plan: GenerationPlan | None, costs: MeasuredCosts) -> ExpertPlan | None:
        """Return the placement that came if it is to be adopted; the reason goes into an event either way.

        Args:
            plan: in force; None where nothing can be adopted now.
        """
        self._waiting = False
        found, loads, shape = planned.experts, self._loads, self._turn.record.expert_shape
        if plan is None or plan.expert_plan is None or planned.generation != plan.generation or shape is None:
            return None
        if found is None or isinstance(found, Shortage) or loads.tokens is None:
            return None
        current = counts_by_node(plan.workers, plan.expert_plan.placement, shape)
        # A node's workers share its tokens.
        token_s = loads.token_s * current.shape[2] / len(plan.workers)
        decision = decide_rebalance(
            loads.tokens,
            current,
            _migration(plan.workers, found, shape),
            threshold=plan.expert_plan.asked,
            steps=self._steps_to_next_look(),
            model=costs.model(token_s=token_s, expert_bytes=loads.expert_bytes),
        )
        self._announce(decision, found)
        return found if decision.adopt else None

    def _steps_to_next_look(self) -> int:
        every = self._config.spec.experts.rebalance_every
        return every - self._asked_at % every

    def _announce(self, decision: RebalanceDecision, found: ExpertPlan) -> None:
        self._turn.emit(
            RebalanceDecided,
            step=self._asked_at,
            adopted=decision.adopt,
            gain_s=decision.gain_s,
            cost_s=decision.cost_s,
            moves=found.moves,
            why=decision.reason,
        )


def _migration(workers: Sequence[str], plan: ExpertPlan, shape: ExpertShape) -> Migration:
    """Return what a placement moves between nodes."""
    held = counts_by_node(workers, plan.held, shape)
    counts = counts_by_node(workers, plan.placement, shape)
    transfers, lost = plan_transfers(held, counts)
    return Migration(counts=counts, roles=indices(counts.shape[2]), transfers=transfers, lost=lost)
