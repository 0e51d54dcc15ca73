"""What becomes of a node that computes slower than the others: it gives its place to a standby, computes fewer
micro-batches where there is none, or a person is told.
"""

from __future__ import annotations

import math

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.assignment import divided
from holdfast.coordination.generations.planner import factors_of
from holdfast.coordination.lateness.slowness import SLOWER, SlowNodes
from holdfast.coordination.nodes.departures import Departures
from holdfast.coordination.nodes.replacing import Replacing
from holdfast.coordination.turn import Transaction
from holdfast.errors import HoldfastError
from holdfast.protocol.events import StragglerFound
from holdfast.protocol.messages.progress import OwnTimes
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import Departure, SlowNode

#: a node that was slow takes nobody's place for so long, where another can
AVOIDED_S = 3600.0
#: one that stays slow, or is time and again, is told of so often
AGAIN_S = 3600.0
#: that a node's micro-batches take so many times as long as was known, or as short, is worth another division
ANOTHER = 1.1
_KEPT = 1024


class Straggling:
    """`recovery.stragglers`: move, ask or off."""

    def __init__(
        self, transaction: Transaction, config: CoordinatorConfig, departures: Departures, replacing: Replacing
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._departures = departures
        self._replacing = replacing
        self._slow = SlowNodes()
        #: when it was told of whom
        self._told: dict[str, float] = {}
        self._generation = 0

    def told(self, node: str, times: OwnTimes) -> None:
        """A node tells what its workers have computed since its last word."""
        plan = self._transaction.record.plan
        if self._config.spec.recovery.stragglers != "off" and plan is not None and self._transaction.planned_on(node):
            self._slow.told(node, times.computed)
            self._look(plan)

    def _look(self, plan: GenerationPlan) -> None:
        """See whether a member of the plan in force is slow."""
        if plan.generation != self._generation:
            self._generation = plan.generation
            nodes = {member.node for member in plan.members}
            self._slow.follow(nodes, self._transaction.record.relieved)
            self._relieve({node: factor for node, factor in self._transaction.record.relieved.items() if node in nodes})
        self._told = {node: at for node, at in self._told.items() if at > self._transaction.now - AGAIN_S}
        for node, factor in self._slow.found.items():
            self._found(node, factor)
        self._give_back()

    def _give_back(self) -> None:
        """Who is as fast as the others again computes as much as they do; not who is about to leave."""
        record = self._transaction.record
        still = {*self._slow.found, *(one.node for one in record.leaving)}
        self._relieve({node: factor for node, factor in record.relieved.items() if node in still})

    def _relieve(self, relieved: dict[str, float]) -> None:
        if relieved != self._transaction.record.relieved:
            self._transaction.change(relieved=relieved)

    def _found(self, node: str, factor: float) -> None:
        policy, leaving = self._config.spec.recovery.stragglers, {one.node for one in self._transaction.record.leaving}
        if node in leaving:
            return
        known = node in self._told
        why = f"it computes {factor:.2f} times as long as the others' median (from {SLOWER:g} on it is slow)"
        if policy == "move":
            if not known:
                self._remember(node, factor)
            # (again and again: a standby may have become warm since it was told of)
            refusal = self._move(node)
            if not refusal:
                self._tell(node, factor, "move", why)
                return
            fewer = self._gives_fewer(node, factor)
            if not known:
                done = ", so that it computes fewer micro-batches" if fewer else ""
                self._tell(node, factor, "fewer" if fewer else "told", f"{why}; it cannot be moved: {refusal}{done}")
        elif not known:
            self._tell(node, factor, "told", f"{why}; `holdfast move {node}` has a standby take its place")

    def _gives_fewer(self, node: str, factor: float) -> bool:
        """Have a node compute fewer micro-batches, the slower it is the fewer; False where no step is shorter then."""
        record = self._transaction.record
        if record.plan is None or record.expert_shape is not None:
            return False
        known = record.relieved.get(node, 1.0)
        if abs(math.log(factor / known)) > math.log(ANOTHER):
            self._relieve({**record.relieved, node: factor})
        factors = factors_of(self._transaction.record, record.plan.unit_heads, self._config)
        return bool(divided(record.micro_batches, factors))

    def _move(self, node: str) -> str:
        """Have a standby that is warm take a node's place; return why that cannot be."""
        asked = Departure(node=node, since=self._transaction.now, stays=True)
        to, _ = self._replacing.targets([asked]).get(node, ("", ""))
        if not to:
            return "no standby is warm (holdfast run --standbys, holdfast agent --standby)"
        if to in self._replacing.slow:
            return f"standby {to} was slow itself"
        try:
            self._departures.ask((node,), stays=True)
        except HoldfastError as error:
            return str(error)
        self._slow.begin_anew(node)
        return ""

    def _remember(self, node: str, factor: float) -> None:
        others = (
            one for one in self._transaction.record.slow if one.node != node and one.until > self._transaction.now
        )
        slow = SlowNode(node=node, factor=factor, until=self._transaction.now + AVOIDED_S)
        self._transaction.change(slow=(*others, slow)[-_KEPT:])

    def _tell(self, node: str, factor: float, action: str, why: str) -> None:
        self._told[node] = self._transaction.now
        self._transaction.emit(StragglerFound, node=node, factor=round(factor, 3), action=action, why=why)
