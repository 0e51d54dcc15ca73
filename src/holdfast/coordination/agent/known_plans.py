"""The plans that a node has received, and which of its workers each of them names.

The coordinator sends each order once per node, as compactly as possible; this module expands it for the workers. A plan
arrives as a change of an earlier plan. If a node lacks the earlier plan, it requests the complete one. Until that
arrives, other orders about generations wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.coordination.agent.instructions import SendToWorkers
from holdfast.coordination.generations.plan_delta import Assignment, MisfitError, rebuilt, rebuilt_shares
from holdfast.protocol.messages.agent import NodeOrder
from holdfast.protocol.messages.orders import (
    Arm,
    Begin,
    Disarm,
    JobDone,
    LookAround,
    Order,
    Posted,
    Prepare,
    Stop,
    Void,
)
from holdfast.protocol.messages.plans import AskPlan, BeginNode, PlanChange, PrepareNode, Shares
from holdfast.protocol.plan import GenerationPlan

#: the number of orders that may wait for a plan; a coordinator sends no more before it has answered
_MAX_WAITING = 64


class PlanBuilder:
    """Builds plans from their changes."""

    def build_plan(self, change: PlanChange, base: GenerationPlan | None) -> GenerationPlan:
        """Return the plan that results from a change.

        Raises:
            MisfitError: The result is not the plan that the change announces.
        """
        return rebuilt(change, base)

    def build_shares(
        self, shares: Shares | None, change: PlanChange, plan: GenerationPlan, base: GenerationPlan | None
    ) -> Assignment:
        """Return each replica group's micro-batches of the first step, or () for the default shares."""
        return rebuilt_shares(shares, change, plan, base)


@dataclass(frozen=True, slots=True)
class _Known:
    plan: GenerationPlan
    digest: bytes
    #: the workers of this node that are members of the plan
    members: frozenset[str]


@dataclass(slots=True)
class _Missing:
    """A generation for which the complete plan was requested, and the orders that wait for it."""

    generation: int
    waiting: list[NodeOrder] = field(default_factory=list[NodeOrder])


class KnownPlans:
    """The plans that may be current or pending, and the members that the coordinator has named.

    A coordinator announces each change of these plans to the nodes of the members, and its messages arrive in order. So
    `members` and `pending` match its view when it sent an order, even if workers have attached or died here meanwhile.
    """

    def __init__(self, maker: PlanBuilder | None = None) -> None:
        self._maker = maker or PlanBuilder()
        self._plans: dict[int, _Known] = {}
        self._members: frozenset[str] = frozenset()
        self._pending: frozenset[str] = frozenset()
        self._missing: _Missing | None = None

    def reset_members(self, members: Sequence[str]) -> None:
        """Set the members that a new coordinator names, and drop all earlier information."""
        self._members, self._pending, self._missing = frozenset(members), frozenset(), None

    def members_of(self, generation: int) -> frozenset[str]:
        """Return the workers of this node that are members of a generation, or none if its plan is unknown."""
        known = self._plans.get(generation)
        return known.members if known is not None else frozenset()

    def on_order(self, order: NodeOrder, workers: Sequence[str]) -> list[SendToWorkers | AskPlan]:
        """Handle an order for the node; return orders for its workers, or a request for a missing plan.

        While a plan is missing, later orders wait for it (at most `_MAX_WAITING`; others are dropped), except the order
        that the job is done.

        Args:
            workers: All workers of this node that have attached.
        """
        missing = self._missing
        if missing is None or isinstance(order, JobDone):
            return self._process(order, workers)
        if isinstance(order, BeginNode | PrepareNode):
            self._missing = None
            out = self._process(order, workers)
            answered = self._missing is None and order.plan.rest.generation == missing.generation
            return [*out, *self._process_waiting(missing, workers)] if answered else out
        if isinstance(order, Void) and order.generation == missing.generation:
            self._missing = None
            return self._process_waiting(missing, workers)
        if len(missing.waiting) < _MAX_WAITING:
            missing.waiting.append(order)
        return []

    def _process_waiting(self, missing: _Missing, workers: Sequence[str]) -> list[SendToWorkers | AskPlan]:
        return [result for order in missing.waiting for result in self.on_order(order, workers)]

    def _process(self, order: NodeOrder, workers: Sequence[str]) -> list[SendToWorkers | AskPlan]:
        """Handle an order at once: build a plan that it contains, or find the workers for which it is meant.

        If the plan changes one that is unknown here, request the full plan; orders then wait for it.
        """
        if isinstance(order, BeginNode | PrepareNode):
            try:
                return self._process_plan(order, workers)
            except MisfitError:
                generation = order.plan.rest.generation
                self._missing = _Missing(generation)
                return [AskPlan(generation=generation)]
        return _send_to_members(order, workers, self._recipients(order, workers))

    def _process_plan(self, order: BeginNode | PrepareNode, workers: Sequence[str]) -> list[SendToWorkers | AskPlan]:
        """Build the full plan from the change in an order, and return `Begin` or `Prepare` for the workers of this node
        that are members.

        Plans that can no longer be the base of a change are dropped.

        Raises:
            MisfitError: The plan that is changed is unknown here, or another one.
        """
        change = order.plan
        base = self._base_plan(change)
        plan = self._maker.build_plan(change, base)
        members = frozenset(worker for worker in workers if plan.rank(worker) is not None)
        # Besides the new plan, only the base and the newest plan can be the base of the next change.
        keep = {change.base, max(self._plans, default=0)}
        self._plans = {number: known for number, known in self._plans.items() if number in keep}
        self._plans[plan.generation] = _Known(plan, change.digest, members)
        if isinstance(order, BeginNode):
            self._members, self._pending = members, frozenset()
            assignment = self._maker.build_shares(order.shares, change, plan, base)
            begin = Begin(plan=plan, decision=order.decision, assignment=assignment, kept=order.kept)
        else:
            # A pending plan that was never voided is current by now.
            self._members, self._pending = self._members | self._pending, members
            begin = Prepare(plan=plan)
        return _send_to_members(begin, workers, members)

    def _base_plan(self, change: PlanChange) -> GenerationPlan | None:
        """Return the known plan that a change starts from, or None if the change is a full plan.

        Raises:
            MisfitError: The plan is unknown here, or its digest differs.
        """
        if not change.base:
            return None
        known = self._plans.get(change.base)
        if known is None or known.digest != change.base_digest:
            raise MisfitError(f"the plan of generation {change.base} is unknown here")
        return known.plan

    def _recipients(
        self, order: Posted | LookAround | Stop | Arm | Disarm | Void | JobDone, workers: Sequence[str]
    ) -> frozenset[str]:
        """Return the workers for which an order is meant.

        JobDone is for all; Disarm is for the members of the current generation, Stop also for those of the pending one;
        any other order is for the members of the generation that it names. A Void also ends the pending generation.
        """
        match order:
            case Arm():
                return self.members_of(order.generation)  # Independent of the coordinator that has sent Prepare.
            case Disarm():
                return self._members
            case Void():
                self._pending = frozenset()
                return self.members_of(order.generation)
            case JobDone():
                return frozenset(workers)
            case Posted() | LookAround():
                return self.members_of(order.generation)
            case Stop():
                return self._members | self._pending


def _send_to_members(order: Order, workers: Sequence[str], members: frozenset[str]) -> list[SendToWorkers | AskPlan]:
    named = tuple(worker for worker in workers if worker in members)
    return [SendToWorkers(named, order)] if named else []
