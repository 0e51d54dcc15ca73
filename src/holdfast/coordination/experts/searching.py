"""Searches in the background for a better placement than the current one.

The question contains all inputs, also measured costs, so the result does not depend on how long the search takes.
"""

from __future__ import annotations

import msgspec

from holdfast.coordination.experts.placing import PlacementQuestion, compute_placement, count_by_node
from holdfast.planning import CostModel, Migration, Shortage, decide_rebalance, plan_transfers
from holdfast.planning.arrays import indices
from holdfast.protocol.plan import ExpertPlan


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search: a placement, and whether it is worth the switch."""

    experts: ExpertPlan
    #: whether the switch is worth its cost
    adopt: bool
    #: seconds saved
    gain_s: float
    #: seconds that the switch costs
    cost_s: float
    #: the reason, in words
    why: str


class PlacementSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search for the members of `generation`, requested at a step."""

    generation: int
    step: int
    #: its held experts are the current placement
    question: PlacementQuestion
    #: whether the current placement was only repaired since the last search
    repaired: bool
    #: seconds of one worker for one token of one expert, forward and backward
    token_s: float
    #: as in `CostModel`
    expert_bytes: int
    #: as in `CostModel`
    bandwidth: float
    #: as in `CostModel`
    pause_s: float
    #: as in `CostModel`
    hidden_s: float
    #: number of steps over which savings count
    horizon: int
    #: seconds after which an answer comes too late to be useful
    within_s: float

    def solve(self) -> PlacementAnswer | None:
        """Return the best placement found, and whether its savings are worth the switch; None if not all experts have
        room.

        It takes milliseconds to minutes, by the size of the job.
        """
        question = self.question
        experts = compute_placement(question)
        if isinstance(experts, Shortage):
            return None
        current = count_by_node(question.workers, question.held, question.shape)
        counts = count_by_node(question.workers, experts.placement, question.shape)
        transfers, lost = plan_transfers(current, counts)
        nodes = current.shape[2]
        decision = decide_rebalance(
            question.tokens,
            current,
            Migration(counts=counts, roles=indices(nodes), transfers=transfers, lost=lost),
            threshold=question.fault_threshold,
            steps=self.horizon,
            model=CostModel(
                # A node's workers share its tokens.
                token_s=self.token_s * nodes / len(question.workers),
                expert_bytes=self.expert_bytes,
                bandwidth=self.bandwidth,
                pause_s=self.pause_s,
                hidden_s=self.hidden_s,
            ),
            mended=self.repaired,
            racks=question.node_racks,
            rates=question.node_failure_rates,
        )
        return PlacementAnswer(
            experts=experts,
            adopt=decision.adopt,
            gain_s=decision.gain_s,
            cost_s=decision.cost_s,
            why=decision.reason,
        )
