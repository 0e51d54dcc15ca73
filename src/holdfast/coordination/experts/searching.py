"""The search for a better placement than the one in force, as a question that is answered beside everything else.

All that the answer depends on is in the question, measured costs too: so it does not matter how long it takes.
"""

from __future__ import annotations

import msgspec

from holdfast.coordination.experts.placing import PlacementQuestion, counts_by_node, place
from holdfast.planning import CostModel, Migration, Shortage, decide_rebalance, plan_transfers
from holdfast.planning.arrays import indices
from holdfast.protocol.plan import ExpertPlan


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: a placement, and whether it is worth its switch: seconds saved and spent, and why in words."""

    experts: ExpertPlan
    adopt: bool
    gain_s: float
    cost_s: float
    why: str


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A search for the members of `generation`, asked for at a step.

    `question`: what is held is the placement in force. `repaired`: nobody has looked for a better one since it was
    mended. `token_s`: seconds that a worker needs for one token of one expert, forward and backward; `expert_bytes`,
    `bandwidth`, `pause_s` and `hidden_s`: as in `CostModel`. `horizon`: for so many steps what is saved counts.
    `within_s`: an answer after so many seconds is worth nothing.
    """

    generation: int
    step: int
    question: PlacementQuestion
    repaired: bool
    token_s: float
    expert_bytes: int
    bandwidth: float
    pause_s: float
    hidden_s: float
    horizon: int
    within_s: float

    def solve(self) -> Found | None:
        """Search, for milliseconds to minutes, by the size of the job; None: there is no room for all experts."""
        question = self.question
        experts = place(question)
        if isinstance(experts, Shortage):
            return None
        current = counts_by_node(question.workers, question.held, question.shape)
        counts = counts_by_node(question.workers, experts.placement, question.shape)
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
            racks=question.rack,
            rates=question.rates,
        )
        return Found(
            experts=experts,
            adopt=decision.adopt,
            gain_s=decision.gain_s,
            cost_s=decision.cost_s,
            why=decision.reason,
        )
