"""Reacts to a node that computes slower than the others.

A standby replaces it, or it computes fewer micro-batches without one, or only an event names it.
"""

from __future__ import annotations

import math

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.assignment import divide_by_speed
from holdfast.coordination.generations.planner import factors_of
from holdfast.coordination.hang_detection.slow_nodes import SLOWER, SlowNodes
from holdfast.coordination.nodes.draining import Draining
from holdfast.coordination.nodes.replacements import Replacements
from holdfast.coordination.transaction import Transaction
from holdfast.errors import HoldfastError
from holdfast.protocol.events import StragglerFound
from holdfast.protocol.messages.progress import OwnTimes
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import Departure, SlowNode

#: seconds for which a slow node does not replace another one, if there is an alternative
AVOID_S = 3600.0
#: seconds between two events about the same node
REPORT_AGAIN_S = 3600.0
#: relative change of a node's factor from which its share is changed
SHARE_CHANGE = 1.1
_KEPT = 1024


class StragglerPolicy:
    """Follows `recovery.stragglers`: move, ask or off."""

    def __init__(
        self, transaction: Transaction, config: CoordinatorConfig, departures: Draining, replacing: Replacements
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._departures = departures
        self._replacing = replacing
        self._slow = SlowNodes()
        #: when each node was last reported
        self._reported_at: dict[str, float] = {}
        self._generation = 0

    def on_own_times(self, node: str, times: OwnTimes) -> None:
        """Handle a node's report of the micro-batches computed since its last report: test it, react to slow nodes, and
        restore the shares of nodes that are fast again.

        Ignored if the policy is off, and for nodes outside the plan.
        """
        plan = self._transaction.record.plan
        if self._config.spec.recovery.stragglers != "off" and plan is not None and self._transaction.planned_on(node):
            self._slow.on_report(node, times.computed)
            self._check_nodes(plan)

    def _check_nodes(self, plan: GenerationPlan) -> None:
        """React to every node that is slow now, and restore the shares of nodes that are fast again.

        In a new generation, nodes outside the plan are forgotten first.
        """
        if plan.generation != self._generation:
            self._generation = plan.generation
            nodes = {member.node for member in plan.members}
            self._slow.keep_nodes(nodes, self._transaction.record.relieved)
            self._set_relieved(
                {node: factor for node, factor in self._transaction.record.relieved.items() if node in nodes}
            )
        self._reported_at = {
            node: at for node, at in self._reported_at.items() if at > self._transaction.now - REPORT_AGAIN_S
        }
        for node, factor in self._slow.slow_nodes.items():
            self._on_slow_node(node, factor)
        self._restore_shares()

    def _restore_shares(self) -> None:
        """Restore the full share of nodes that are fast again, but not of draining nodes."""
        record = self._transaction.record
        still = {*self._slow.slow_nodes, *(one.node for one in record.leaving)}
        self._set_relieved({node: factor for node, factor in record.relieved.items() if node in still})

    def _set_relieved(self, relieved: dict[str, float]) -> None:
        """Record the nodes with smaller shares, and their factors."""
        if relieved != self._transaction.record.relieved:
            self._transaction.change(relieved=relieved)

    def _on_slow_node(self, node: str, factor: float) -> None:
        """React to a slow node as the policy says: move it to a warm standby, else reduce its share; or only report it.

        Nodes that leave already are skipped. A node is reported once an hour at most; moving it is tried each time.
        """
        policy, leaving = self._config.spec.recovery.stragglers, {one.node for one in self._transaction.record.leaving}
        if node in leaving:
            return
        known = node in self._reported_at
        why = f"it computes {factor:.2f} times as long as the others' median (from {SLOWER:g} on it is slow)"
        if policy == "move":
            if not known:
                self._record_slow_node(node, factor)
            # Try each time: a standby may have become warm since the last report.
            refusal = self._move_to_standby(node)
            if not refusal:
                self._report(node, factor, "move", why)
                return
            fewer = self._reduce_share(node, factor)
            if not known:
                done = ", so that it computes fewer micro-batches" if fewer else ""
                self._report(node, factor, "fewer" if fewer else "told", f"{why}; it cannot be moved: {refusal}{done}")
        elif not known:
            self._report(node, factor, "told", f"{why}; `holdfast move {node}` replaces it by a standby")

    def _reduce_share(self, node: str, factor: float) -> bool:
        """Record a slow node's factor if it has changed by more than 10 %, so that it computes fewer micro-batches.

        Returns:
            Whether fewer micro-batches make a step shorter; never with experts, with which nothing is recorded.
        """
        record = self._transaction.record
        if record.plan is None or record.expert_shape is not None:
            return False
        known = record.relieved.get(node, 1.0)
        if abs(math.log(factor / known)) > math.log(SHARE_CHANGE):
            self._set_relieved({**record.relieved, node: factor})
        factors = factors_of(self._transaction.record, record.plan.unit_heads, self._config)
        return bool(divide_by_speed(record.micro_batches, factors))

    def _move_to_standby(self, node: str) -> str:
        """Request that a warm standby takes over a node's ranks, and forget its reports; return why it is impossible,
        else "".
        """
        asked = Departure(node=node, since=self._transaction.now, stays=True)
        to, _ = self._replacing.select_standbys([asked]).get(node, ("", ""))
        if not to:
            return "no standby is warm (holdfast run --standbys, holdfast agent --standby)"
        if to in self._replacing.slow:
            return f"standby {to} was slow itself"
        try:
            self._departures.request((node,), stays=True)
        except HoldfastError as error:
            return str(error)
        self._slow.forget_node(node)
        return ""

    def _record_slow_node(self, node: str, factor: float) -> None:
        """Record a slow node, so that it replaces no other node for an hour, if there is an alternative."""
        others = (
            one for one in self._transaction.record.slow if one.node != node and one.until > self._transaction.now
        )
        slow = SlowNode(node=node, factor=factor, until=self._transaction.now + AVOID_S)
        self._transaction.change(slow=(*others, slow)[-_KEPT:])

    def _report(self, node: str, factor: float, action: str, why: str) -> None:
        """Emit that a node is slow, with the action, and note the time."""
        self._reported_at[node] = self._transaction.now
        self._transaction.emit(StragglerFound, node=node, factor=round(factor, 3), action=action, why=why)
