"""Searches for a better expert placement, which is adopted if it pays.

A search starts after each repair of a placement (at a failure or a join), and every N steps for the recent loads. The
first one starts as soon as loads are known: until then all experts count as equal.

The machine requests a search (PlanExperts) and continues. The answer (Planned) comes after any time, or never. An
answer for an old generation is dropped. While another change of the generation is under way, an answer waits. So the
duration of a search affects only when the placement changes.
"""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.searching import PlacementAnswer, PlacementSearch
from holdfast.coordination.generations.planner import placement_question
from holdfast.coordination.inputs import Planned
from holdfast.coordination.instructions import PlanExperts
from holdfast.coordination.progress.costs import MeasuredCosts
from holdfast.coordination.progress.loads import LoadBook
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import RebalanceDecided
from holdfast.protocol.plan import LOADS_WINDOW, ExpertPlan, GenerationPlan

#: The time limit of a search is at least this many seconds, even with short steps: the largest ones take minutes.
LEAST_SEARCH_S = 600.0


class Rebalancing:
    """Requests expert placements, and returns answers that should be adopted."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig, loads: LoadBook, step: int) -> None:
        """Begin after the committed `step`: the first search follows a later step, once loads are known."""
        self._transaction = transaction
        self._config = config
        self._loads = loads
        self._asked_at = step
        self._looked = False
        #: The generation of the last search.
        self._searched = 0
        #: Whether its answer is awaited.
        self._waiting = False
        #: The answer, until no other change of the generation is under way.
        self._found: PlacementAnswer | None = None

    def poll(self, plan: GenerationPlan, committed: int, costs: MeasuredCosts) -> ExpertPlan | None:
        """Return a found placement if it should be adopted; otherwise start a search if one is due, and return None.

        Args:
            plan: the plan in force, which nothing is about to change.
            committed: the newest committed step.
        """
        found = self._weighed(plan)
        if found is None:
            self._ask(plan, committed, costs)
        return found

    def on_planned(self, planned: Planned) -> None:
        """Store the answer of the last search. Answers to earlier ones are ignored."""
        if self._waiting and planned.generation == self._searched:
            self._waiting = False
            self._found = planned.found

    def _ask(self, plan: GenerationPlan, committed: int, costs: MeasuredCosts) -> None:
        """Start a search for the members of `plan` if one is due after this step.

        It is due after a repair of the placement in this generation, or for recent loads, unless an answer is awaited.
        Never without experts, or with static ones.
        """
        self._asked_at = min(self._asked_at, committed)  # The committed step may be lower after a rollback.
        experts, loads, transaction = plan.expert_plan, self._loads, self._transaction
        if experts is None or self._config.spec.experiments.static_experts:
            return
        anew = self._searched != plan.generation
        if (self._waiting and not anew) or not (self._due(committed) or (experts.repaired and anew)):
            return
        held = dict(zip(plan.workers, experts.placement, strict=True))
        question = placement_question(
            transaction.record, transaction.members, plan.workers, held, self._config, loads.tokens
        )
        assert question is not None
        self._asked_at, self._searched, self._waiting, self._found = committed, plan.generation, True, None
        self._looked |= loads.tokens is not None
        horizon = self._steps_to_next_look()
        search = PlacementSearch(
            generation=plan.generation,
            step=committed,
            question=question,
            repaired=experts.repaired,
            token_s=loads.token_s,
            expert_bytes=loads.expert_bytes,
            bandwidth=costs.bandwidth,
            pause_s=costs.pause_s,
            hidden_s=costs.step_s,
            horizon=horizon,
            within_s=max(LEAST_SEARCH_S, horizon * costs.step_s),
        )
        transaction.compute(PlanExperts(search))

    def _due(self, committed: int) -> bool:
        """Return whether a search for the recent loads is due: as soon as loads are known, then every `rebalance_every`
        steps.

        Never if `rebalance_every` is 0, nor twice after the same step.
        """
        every = self._config.spec.experts.rebalance_every
        if not every or committed == self._asked_at or self._loads.tokens is None:
            return False
        return not self._looked or committed // every != self._asked_at // every

    def _weighed(self, plan: GenerationPlan) -> ExpertPlan | None:
        """Return the found placement if it should be adopted, and emit the reason either way.

        None also without an answer, or if it is for another generation.
        """
        found, self._found = self._found, None
        if found is None or self._searched != plan.generation:
            return None
        self._transaction.emit(
            RebalanceDecided,
            step=self._asked_at,
            adopted=found.adopt,
            gain_s=found.gain_s,
            cost_s=found.cost_s,
            moves=found.experts.moves,
            why=found.why,
        )
        return found.experts if found.adopt else None

    def _steps_to_next_look(self) -> int:
        """Return the number of steps until the next search, or `LOADS_WINDOW` if none is planned."""
        every = self._config.spec.experts.rebalance_every
        return every - self._asked_at % every if every else LOADS_WINDOW
