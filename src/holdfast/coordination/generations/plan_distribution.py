"""Distribution of plans: a delta to nodes that have the previous plan, the full plan to all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.coordination.generations.plan_delta import Assignment, change_of, shares_of
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_FAILED
from holdfast.protocol.messages.agent import Refused
from holdfast.protocol.messages.plans import AskPlan, BeginNode, PrepareNode
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Decision, GenerationPlan

#: A node that asks for more full plans of one generation cannot read them.
MAX_ASKED = 3

_Plan = GenerationPlan | None
_Tell = Callable[[_Plan], BeginNode | PrepareNode]


class PlanDistribution:
    """Sends plans to nodes, and keeps them for nodes that ask for a full plan."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._told: dict[int, _Tell] = {}
        self._wholes: dict[int, BeginNode | PrepareNode] = {}
        #: How often each node has asked for a full plan of the newest generation.
        self._asked: dict[str, int] = {}
        #: The newest generation.
        self._newest = 0

    def send_begin(
        self, plan: GenerationPlan, base: _Plan, decision: Decision, assignment: Assignment, kept: Assignment = ()
    ) -> None:
        """Send a generation that begins now to its members. All earlier plans are forgotten.

        Args:
            base: the previous plan, or None.
            assignment: the micro-batches of each replica group in the first step; () for the usual ones.
            kept: the already summed micro-batches that each group keeps.
        """
        self._told.clear()
        self._distribute(
            plan, base, partial(_make_begin, plan, decision, assignment, kept, self._transaction.record.micro_batches)
        )

    def send_prepare(self, plan: GenerationPlan, base: _Plan) -> None:
        """Send a pending generation to its members; the base is the plan in force."""
        self._distribute(plan, base, partial(_make_prepare, plan))

    def on_ask_plan(self, node: Node, ask: AskPlan) -> str:
        """Send the full plan to a node that asked for it, unless a newer plan was sent since.

        Returns:
            "", or why the node was refused, which it is told: it has asked more than 3 times in one generation.
        """
        generation = self._transaction.record.generation
        if generation != self._newest:
            self._newest = generation
            self._asked.clear()
        count = self._asked[node.name] = self._asked.get(node.name, 0) + 1
        if count > MAX_ASKED:
            why = f"node {node.name} asks for the plan of generation {ask.generation} again and again"
            self._transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED))
            return why
        tell, whole = self._told.get(ask.generation), self._wholes.get(ask.generation)
        # Without an entry, a newer plan has been sent since.
        if whole is None and tell is not None:
            whole = self._wholes[ask.generation] = tell(None)
        if whole is not None:
            self._transaction.send(node.connection, whole)
        return ""

    def _distribute(self, plan: GenerationPlan, base: _Plan, tell: _Tell) -> None:
        """Send a plan to its members: as a delta to nodes with live workers of the base, in full to all others.

        Keep it for nodes that ask, together with the plan in force.

        Args:
            tell: makes the message from the base, or from None for the full plan.
        """
        transaction = self._transaction
        in_force = transaction.record.plan.generation if transaction.record.plan is not None else 0
        self._told = {number: told for number, told in self._told.items() if number == in_force}
        self._told[plan.generation] = tell
        self._wholes.clear()
        having = (
            {node_of(worker) for worker in transaction.members.live(base.workers)} if base is not None else set[str]()
        )
        told = [worker for worker in plan.workers if node_of(worker) in having]
        if told:
            transaction.order_all(told, tell(base))
        if len(told) < len(plan.members):
            whole = self._wholes[plan.generation] = tell(None)
            transaction.order_all((worker for worker in plan.workers if node_of(worker) not in having), whole)


def _make_begin(
    plan: GenerationPlan, decision: Decision, assignment: Assignment, kept: Assignment, micro_batches: int, base: _Plan
) -> BeginNode:
    shares = shares_of(assignment, micro_batches, plan, base) if assignment else None
    return BeginNode(plan=change_of(plan, base), decision=decision, shares=shares, kept=kept)


def _make_prepare(plan: GenerationPlan, base: _Plan) -> PrepareNode:
    return PrepareNode(plan=change_of(plan, base))
