"""The plans that a node was told of, and which of its workers they name.

What concerns a generation is said once to a node, in as few bytes as can be: from it this makes what is said to the
workers. A plan comes as a change of an earlier one. Who lacks that one asks for the whole; until it has come, what else
is said of generations waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.coordination.agent.instructions import Pass
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

#: orders that may wait for a plan; a coordinator does not say more before it has answered
_MAX_WAITING = 64


class PlanMaker:
    """Makes plans of their changes."""

    def plan(self, change: PlanChange, base: GenerationPlan | None) -> GenerationPlan:
        """Return the plan that a change leads to.

        Raises:
            MisfitError: it does not lead to the plan that it says it does.
        """
        return rebuilt(change, base)

    def shares(
        self, shares: Shares | None, change: PlanChange, plan: GenerationPlan, base: GenerationPlan | None
    ) -> Assignment:
        """Return each unit's micro-batches of the first step of a plan that was made; () for those of their numbers."""
        return rebuilt_shares(shares, change, plan, base)


@dataclass(frozen=True, slots=True)
class _Known:
    plan: GenerationPlan
    digest: bytes
    #: those of the node's workers that it names
    members: frozenset[str]


@dataclass(slots=True)
class _Missing:
    """The whole plan of this generation was asked for."""

    generation: int
    waiting: list[NodeOrder] = field(default_factory=list[NodeOrder])


class KnownPlans:
    """The plans that are, or may be, in force or pending; and who is a member by what the coordinator has told.

    A coordinator changes neither plan without telling the nodes of those that it names, and what it says comes in
    order. So `members` and `pending` are what it had in mind when it sent an order, whoever has attached or died here
    meanwhile.
    """

    def __init__(self, maker: PlanMaker | None = None) -> None:
        self._maker = maker or PlanMaker()
        self._plans: dict[int, _Known] = {}
        self._members: frozenset[str] = frozenset()
        self._pending: frozenset[str] = frozenset()
        self._missing: _Missing | None = None

    def told_anew(self, members: Sequence[str]) -> None:
        """A coordinator says who is a member; nothing that was said of that before counts."""
        self._members, self._pending, self._missing = frozenset(members), frozenset(), None

    def members_of(self, generation: int) -> frozenset[str]:
        """Return those of the node's workers that the plan of a generation names, where it is known."""
        known = self._plans.get(generation)
        return known.members if known is not None else frozenset()

    def take(self, order: NodeOrder, workers: Sequence[str]) -> list[Pass | AskPlan]:
        """Take an order for the node; return what its workers are to be told, or asks for what is missing.

        Args:
            workers: all of this node that have attached.
        """
        missing = self._missing
        if missing is None or isinstance(order, JobDone):
            return self._take(order, workers)
        if isinstance(order, BeginNode | PrepareNode):
            self._missing = None
            out = self._take(order, workers)
            answered = self._missing is None and order.plan.rest.generation == missing.generation
            return [*out, *self._go_on(missing, workers)] if answered else out
        if isinstance(order, Void) and order.generation == missing.generation:
            self._missing = None
            return self._go_on(missing, workers)
        if len(missing.waiting) < _MAX_WAITING:
            missing.waiting.append(order)
        return []

    def _go_on(self, missing: _Missing, workers: Sequence[str]) -> list[Pass | AskPlan]:
        return [said for order in missing.waiting for said in self.take(order, workers)]

    def _take(self, order: NodeOrder, workers: Sequence[str]) -> list[Pass | AskPlan]:
        if isinstance(order, BeginNode | PrepareNode):
            try:
                return self._planned(order, workers)
            except MisfitError:
                generation = order.plan.rest.generation
                self._missing = _Missing(generation)
                return [AskPlan(generation=generation)]
        return _handed(order, workers, self._concerned(order, workers))

    def _planned(self, order: BeginNode | PrepareNode, workers: Sequence[str]) -> list[Pass | AskPlan]:
        change = order.plan
        base = self._base(change)
        plan = self._maker.plan(change, base)
        members = frozenset(worker for worker in workers if plan.rank(worker) is not None)
        # (of those before, the base and the newest may be the base of the next one)
        keep = {change.base, max(self._plans, default=0)}
        self._plans = {number: known for number, known in self._plans.items() if number in keep}
        self._plans[plan.generation] = _Known(plan, change.digest, members)
        if isinstance(order, BeginNode):
            self._members, self._pending = members, frozenset()
            assignment = self._maker.shares(order.shares, change, plan, base)
            said = Begin(plan=plan, decision=order.decision, assignment=assignment, kept=order.kept)
        else:
            # One that was pending and never voided is in force by now.
            self._members, self._pending = self._members | self._pending, members
            said = Prepare(plan=plan)
        return _handed(said, workers, members)

    def _base(self, change: PlanChange) -> GenerationPlan | None:
        if not change.base:
            return None
        known = self._plans.get(change.base)
        if known is None or known.digest != change.base_digest:
            raise MisfitError(f"generation {change.base} is not known here")
        return known.plan

    def _concerned(
        self, order: Posted | LookAround | Stop | Arm | Disarm | Void | JobDone, workers: Sequence[str]
    ) -> frozenset[str]:
        """Return whom an order is for."""
        match order:
            case Arm():
                return self.members_of(order.generation)  # (whichever coordinator has had it prepared)
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


def _handed(order: Order, workers: Sequence[str], members: frozenset[str]) -> list[Pass | AskPlan]:
    named = tuple(worker for worker in workers if worker in members)
    return [Pass(named, order)] if named else []
