"""Escalates failures of a node (Unicron, Figure 7): retry in place, restart its processes, remove the node.

Each escalation step has a budget per node and window of time. When it is used up, or the class of a failure requires
it, the next step follows. After the last one the node is quarantined, by name and host, until a user readmits it.
"""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.budget import TOGETHER_S, Budget
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_FAILED, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeRepaired
from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import EndNode, Leave
from holdfast.protocol.names import index_of
from holdfast.protocol.record import MAX_LISTED, MAX_REASON, GivenUp, Quarantined

#: Most retries within the window. Each costs all members some tens of milliseconds; a link that breaks more often than
#: once a minute is better left out.
MAX_RETRIES = 5
#: most budgets that are kept; far fewer nodes fail within a window
_KEPT = 4096
AUTOMATIC = "automatic"
TICKET = "ticket"
#: An agent's reason to leave, and the reason in the event: the cause is not known yet.
EVENT_REASONS = {"exhausted": "failed", "told": "failed"}


class EscalationPolicy:
    """The budgets of nodes, the quarantined and given-up nodes, and the repairs."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction = transaction
        self._max_restarts = config.spec.recovery.max_restarts
        self._nodes_to_begin = config.spec.nodes_to_begin
        self._pooled = bool(config.submission)
        #: by node, its agent's process (see `_budget_owner`) and severity: a replaced machine starts with full budgets
        self._budgets: dict[tuple[str, int, Severity], Budget] = {}
        #: the newest loss of a node: time, name, budget
        self._last_loss = -TOGETHER_S, "", Budget()
        #: by lost node, since when, and the kind of repair
        self._lost_nodes: dict[str, tuple[float, str]] = {}
        #: the node that was excluded in this transaction, and why
        self._last_excluded = "", ""

    def count_failure(self, failure: Failure) -> int:
        """Count a failure on the escalation step of its severity; return the number of tries within the window.

        Processes of one node that end together count once. Nodes that are lost within a second of each other count as
        no try.
        """
        place = index_of(failure.worker) if failure.worker else 0
        key = failure.node, self._budget_owner(failure), failure.severity
        budget = self._budgets.pop(key, None) or Budget()
        self._budgets[key] = budget  # The newest is last.
        while len(self._budgets) > _KEPT:
            del self._budgets[next(iter(self._budgets))]
        if failure.evidence.detector is Detector.NODE_HEALTH and self._is_lost_with_others(failure.node, budget):
            return budget.tries
        return budget.count_try(self._transaction.now, place)

    def _budget_owner(self, failure: Failure) -> int:
        """Return the PID of the agent that owns the budget of a failure, or 0 if the node's name owns it.

        The name owns failures of unconnected nodes, invalid messages, and losses of a node that only joins. These cost
        the others a swap each time, and a new agent process must not reset that budget: the node would keep all other
        new nodes out forever.
        """
        record, node = self._transaction.record, self._transaction.members.nodes.get(failure.node)
        if node is None:
            return 0
        plan, pending = record.plan, record.pending
        member = plan is not None and any(plan.rank(worker) is not None for worker in node.workers)
        coming = pending is not None and any(pending.rank(worker) is not None for worker in node.workers)
        nonsense = failure.kind is FailureKind.EXCEPTION
        return 0 if not failure.worker and (nonsense or (coming and not member)) else node.agent_pid

    def _is_lost_with_others(self, node: str, budget: Budget) -> bool:
        """Record that a node is lost; return whether another one was lost less than a second before.

        Then both lost something shared, and are blameless: the try of the other node is undone.
        """
        now = self._transaction.now
        since, other, counted = self._last_loss
        self._last_loss = now, node, budget
        if other == node or now - since >= TOGETHER_S:
            return False
        counted.undo_try(since)
        return True

    def is_exhausted(self, severity: Severity, tries: int) -> bool:
        """Return whether this many tries exceed the budget of an escalation step."""
        return tries > (MAX_RETRIES if severity is Severity.RETRY else self._max_restarts)

    def on_node_lost(self, node: str) -> None:
        """Record that a node is lost now. Its return will be reported as an automatic repair."""
        self._lost_nodes.pop(node, None)
        self._lost_nodes[node] = self._transaction.now, AUTOMATIC
        while len(self._lost_nodes) > _KEPT:
            del self._lost_nodes[next(iter(self._lost_nodes))]

    def on_node_complete(self, node: Node) -> None:
        """Emit `node_repaired`, with the seconds since its loss, if a lost node has all its workers again."""
        since, repair = self._lost_nodes.pop(node.name, (0.0, ""))
        if repair:
            self._transaction.emit(NodeRepaired, node=node.name, repair=repair, repair_s=self._transaction.now - since)

    # ---- after the last escalation step ----

    def find_quarantine(self, node: str, host: str) -> Quarantined | None:
        """Return the quarantine that refuses a node, by its name or its host, or None if it may join."""
        known = self._transaction.record.quarantined
        return next((one for one in known if one.node == node or (one.host and one.host == host)), None)

    def quarantine(self, node: str, host: str, why: str) -> None:
        """Record a node as quarantined, with its host if no other node is there and the job has started.

        It no longer counts as given up or as lost.

        Args:
            host: the name of its host, or "" if unknown.
        """
        transaction = self._transaction
        begun = transaction.record.generation > 0
        shared = not begun or any(
            other.host == host for other in transaction.members.nodes.values() if other.name != node
        )
        entry = Quarantined(node=node, host="" if shared else host, why=why[:MAX_REASON], since=transaction.now)
        others = (one for one in transaction.record.quarantined if one.node != node)
        transaction.change(quarantined=(*others, entry)[-MAX_LISTED:], given_up=self._given_up_without(node))
        self._lost_nodes.pop(node, None)
        if not self._pooled:  # A pool may grant another node.
            self._last_excluded = node, f"is quarantined: {why}"

    def on_leave(self, node: Node, leave: Leave) -> None:
        """Handle that an agent leaves: quarantine a broken machine, give up a node that used up its tries, else do
        nothing.

        If the agent waits for an answer, it is told to end.
        """
        if leave.reason == "quarantined":
            self.quarantine(node.name, node.host, leave.detail)
        elif leave.reason == "exhausted":
            self._give_up(node.name, node.host, leave.detail)
        if leave.awaits_answer:
            self._transaction.send(node.connection, EndNode(exit_code=EXIT_FAILED, why=leave.detail))

    def _give_up(self, node: str, host: str, why: str) -> None:
        """Record a node that has used up its tries as given up.

        The cause may be the work, which the other nodes meet later. So the node is quarantined only once a step is
        committed without it. The current step may have started with it, so it does not count.
        """
        transaction = self._transaction
        step = transaction.position.step + 2
        entry = GivenUp(node=node, host=host, why=why[:MAX_REASON], since=transaction.now, step=step)
        transaction.change(given_up=(*self._given_up_without(node), entry)[-MAX_LISTED:])
        self._last_excluded = node, f"is given up: {why}"

    def quarantine_given_up(self) -> None:
        """Quarantine each given-up node if a later step was committed without it: the node was the cause, and not the
        work. Emit `node_left` for each.
        """
        transaction = self._transaction
        for entry in [one for one in transaction.record.given_up if one.step <= transaction.position.step]:
            self.quarantine(entry.node, entry.host, entry.why)
            transaction.emit(NodeLeft, node=entry.node, reason="quarantined", detail=entry.why)

    def on_node_admitted(self, node: str) -> None:
        """Handle that a node is admitted: it does not count as given up."""
        if any(one.node == node for one in self._transaction.record.given_up):
            self._transaction.change(given_up=self._given_up_without(node))

    def _given_up_without(self, node: str) -> tuple[GivenUp, ...]:
        """Return the given-up nodes except one."""
        return tuple(one for one in self._transaction.record.given_up if one.node != node)

    def explain_deserted(self, *, awaited: bool) -> str:
        """Return why the job cannot continue because its last node was excluded in this transaction; "" if it can. The
        exclusion is then forgotten: a second call returns "".

        A node that was only lost may return, and so may the nodes that are `awaited`. A job that has not started waits
        until as many nodes as it needs were excluded: their exceptions give more evidence.
        """
        (node, why), self._last_excluded = self._last_excluded, ("", "")
        record = self._transaction.record
        if not node or self._transaction.members.nodes or self._lost_nodes or awaited:
            return ""
        if not record.generation and len(self.excluded_nodes) < self._nodes_to_begin:
            return ""
        return f"the last node, {node}, {why}"

    @property
    def excluded_nodes(self) -> tuple[Quarantined | GivenUp, ...]:
        """The quarantined nodes, then the given-up ones."""
        return *self._transaction.record.quarantined, *self._transaction.record.given_up

    def readmit_node(self, node: str) -> None:
        """Remove a node from the quarantined and given-up ones, with full budgets. Its return is reported as a repair.

        Raises:
            UnreachableError: The node is neither quarantined nor given up.
        """
        transaction = self._transaction
        record = transaction.record
        entry = next((one for one in self.excluded_nodes if one.node == node), None)
        if entry is None:
            away = ", ".join(one.node for one in (*record.drained, *self.excluded_nodes)) or "none"
            what = "is in the job" if node in transaction.members.nodes else "is not in the job"
            raise UnreachableError(
                f"node {node} {what}, and neither drained nor quarantined: there is nothing to undo; "
                f"nodes that can be undrained: {away}"
            )
        quarantined = tuple(one for one in record.quarantined if one.node != node)
        transaction.change(quarantined=quarantined, given_up=self._given_up_without(node))
        self._lost_nodes[node] = entry.since, TICKET
        self._budgets = {key: budget for key, budget in self._budgets.items() if key[0] != node}
