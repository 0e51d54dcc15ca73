"""Expert handoff: experts that only draining nodes hold are copied to other nodes first, during training."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.blobs import count_fewest_nodes, find_lost_experts
from holdfast.coordination.experts.placing import PlacementQuestion, compute_placement, keep_placement
from holdfast.coordination.generations.planner import hold_only_copy, lacks_slots, placement_question
from holdfast.coordination.nodes.draining import Draining
from holdfast.coordination.progress.loads import LoadBook
from holdfast.coordination.transaction import Transaction
from holdfast.planning import Shortage
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import ExpertPlan, ExpertShape, GenerationPlan


class ExpertHandoff:
    """Computes the placement of an expert handoff. It is called while nothing is about to change the plan."""

    def __init__(
        self, transaction: Transaction, config: CoordinatorConfig, loads: LoadBook, departures: Draining
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._loads = loads
        self._draining = departures

    def plan_handoff(self, plan: GenerationPlan) -> ExpertPlan | None:
        """Return a placement that copies experts held only by draining nodes, or None if nothing must or can be copied.

        If the others have no slots for them, standbys that replace the nodes are promoted to join first.
        """
        leavers = self._draining.find_leaving_workers(plan.workers, plan)
        if not leavers or not hold_only_copy(self._transaction.record, plan, leavers):
            return None
        stayers = [worker for worker in plan.workers if worker not in leavers]
        if not stayers or lacks_slots(self._transaction, self._config, stayers):
            self._draining.promote_replacements(even_if_late=True)
            return None
        if plan.expert_plan is None:
            return None
        held = dict(zip(plan.workers, plan.expert_plan.placement, strict=True))
        record, members = self._transaction.record, self._transaction.members
        question = placement_question(record, members, stayers, held, self._config, self._loads.tokens)
        experts = _with_all(question) if question is not None else None
        if experts is None or record.expert_shape is None:
            return None
        return _beside_the_leavers(plan, plan.expert_plan, stayers, experts, record.expert_shape)


def _with_all(question: PlacementQuestion) -> ExpertPlan | None:
    """Return a placement with every expert, by few changes or else by a search; None if the slots do not suffice."""
    for solve in (keep_placement, compute_placement):
        found = solve(question)
        if found is None or isinstance(found, Shortage):
            continue
        if not find_lost_experts(question.shape, list(found.placement)):
            return found
    return None


def _beside_the_leavers(
    plan: GenerationPlan, before: ExpertPlan, stayers: Sequence[str], experts: ExpertPlan, shape: ExpertShape
) -> ExpertPlan:
    """Return the placement of all members. Draining nodes keep their experts, as the source of the copies.

    If a pool recalls more nodes than the fault threshold allows, some experts are on fewer nodes from then on.

    Args:
        before: the placement in force.
        stayers: the members that do not leave.
        experts: their new placement.
    """
    placed = dict(zip(stayers, experts.placement, strict=True))
    rows = zip(plan.workers, before.placement, strict=True)
    placement = tuple(placed.get(worker, blob) for worker, blob in rows)
    nodes = map(node_of, plan.workers)
    given = min(before.given, count_fewest_nodes(shape, list(zip(nodes, placement, strict=True))))
    return msgspec.structs.replace(before, placement=placement, held=before.placement, moves=experts.moves, given=given)
