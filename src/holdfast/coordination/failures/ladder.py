"""The ladder of a job's nodes (Unicron, Figure 7): try again in place, start its processes again, take the node out.

Each rung has a budget per node and window of time; where it is used up, or the class of a failure says so, the next one
is taken. What is beyond them all is quarantined, by name and host, until somebody lets it come back.
"""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.budget import TOGETHER_S, Budget
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_FAILED, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeRepaired
from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.messages.agent import EndNode, Leave
from holdfast.protocol.names import index_of
from holdfast.protocol.record import MAX_LISTED, MAX_REASON, GivenUp, Quarantined

#: Trying again costs all members some tens of milliseconds; a link that breaks more than once a minute is better left
#: out.
MAX_RETRIES = 5
#: of budgets, so many are kept: far more than nodes fail within a window
_KEPT = 4096
AUTOMATIC, TICKET = "automatic", "ticket"
#: what an agent says for its reason to leave, and as what its node has left: nobody knows yet whose fault that is
LEFT_AS = {"exhausted": "failed", "told": "failed"}


class Ladder:
    """Who has used up what, who is quarantined, and who was repaired by whom."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction = transaction
        self._max_restarts, self._nodes_to_begin = config.spec.recovery.max_restarts, config.spec.nodes_to_begin
        self._pooled = bool(config.submission)
        #: by node, its agent's process (see `_agent`) and rung: a machine that was replaced begins anew
        self._budgets: dict[tuple[str, int, Severity], Budget] = {}
        #: the newest loss of a node: when, which, and what it was counted in
        self._lost = -TOGETHER_S, "", Budget()
        #: since when nodes are gone, and who brings them back
        self._gone: dict[str, tuple[float, str]] = {}
        #: the node that is out since this transaction, and why
        self._out = "", ""

    def tries(self, failure: Failure) -> int:
        """Count a failure on the rung that its severity says; return how often that makes within the window."""
        place = index_of(failure.worker) if failure.worker else 0
        key = failure.node, self._agent(failure), failure.severity
        budget = self._budgets.pop(key, None) or Budget()
        self._budgets[key] = budget  # (the newest last)
        while len(self._budgets) > _KEPT:
            del self._budgets[next(iter(self._budgets))]
        if failure.evidence.detector is Detector.NODE_HEALTH and self._with_others(failure.node, budget):
            return budget.tries
        return budget.use(self._transaction.now, place)

    def _agent(self, failure: Failure) -> int:
        """Return the agent's process whose budget a failure uses up; 0: the name's, whoever bears it.

        What says nonsense, or is lost while others build a group with it, costs them a swap each time: that it comes
        back as another process must not let it keep all other newcomers out for ever.
        """
        record, node = self._transaction.record, self._transaction.members.nodes.get(failure.node)
        if node is None:
            return 0
        plan, pending = record.plan, record.pending
        member = plan is not None and any(plan.rank(worker) is not None for worker in node.workers)
        coming = pending is not None and any(pending.rank(worker) is not None for worker in node.workers)
        nonsense = failure.kind is FailureKind.EXCEPTION
        return 0 if not failure.worker and (nonsense or (coming and not member)) else node.agent_pid

    def _with_others(self, node: str, budget: Budget) -> bool:
        """Nodes that are lost within a second of each other are lost with what they share, and blameless."""
        now = self._transaction.now
        since, other, counted = self._lost
        self._lost = now, node, budget
        if other == node or now - since >= TOGETHER_S:
            return False
        counted.undo(since)
        return True

    def exhausted(self, severity: Severity, tries: int) -> bool:
        """Tell whether so many tries are more than a rung has."""
        return tries > (MAX_RETRIES if severity is Severity.RETRY else self._max_restarts)

    def gone(self, node: str) -> None:
        """A node has left although nobody wanted it to."""
        self._gone.pop(node, None)
        self._gone[node] = self._transaction.now, AUTOMATIC
        while len(self._gone) > _KEPT:
            del self._gone[next(iter(self._gone))]

    def back(self, node: Node) -> None:
        """All workers of a node run: say so where it had been gone."""
        since, repair = self._gone.pop(node.name, (0.0, ""))
        if repair:
            self._transaction.emit(NodeRepaired, node=node.name, repair=repair, repair_s=self._transaction.now - since)

    # ---- beyond the last rung ----

    def quarantined(self, node: str, host: str) -> Quarantined | None:
        """Return why a node may not come, None where it may."""
        known = self._transaction.record.quarantined
        return next((one for one in known if one.node == node or (one.host and one.host == host)), None)

    def quarantine(self, node: str, host: str, why: str) -> None:
        """Let a node come no more; nor another one on its host, unless more nodes are there, or on their way."""
        transaction = self._transaction
        begun = transaction.record.generation > 0
        shared = not begun or any(
            other.host == host for other in transaction.members.nodes.values() if other.name != node
        )
        entry = Quarantined(node=node, host="" if shared else host, why=why[:MAX_REASON], since=transaction.now)
        others = (one for one in transaction.record.quarantined if one.node != node)
        transaction.change(quarantined=(*others, entry)[-MAX_LISTED:], given_up=self._given_up_but(node))
        self._gone.pop(node, None)
        if not self._pooled:  # (a pool may have another one)
            self._out = node, f"is quarantined: {why}"

    def left(self, node: Node, leave: Leave) -> None:
        """An agent goes: its machine is broken, or it has used up its tries (it waits to be heard), or all is well."""
        if leave.reason == "quarantined":
            self.quarantine(node.name, node.host, leave.detail)
        elif leave.reason == "exhausted":
            self._give_up(node.name, node.host, leave.detail)
        if leave.awaits_answer:
            self._transaction.send(node.connection, EndNode(exit_code=EXIT_FAILED, why=leave.detail))

    def _give_up(self, node: str, host: str, why: str) -> None:
        """A node has used up its tries: whether that is its own fault, the steps of the others say.

        What its processes die of may be the work's, and the others only slower to meet it: as long as nothing has been
        committed without the node, nobody knows. The step that is under way may be of before.
        """
        transaction = self._transaction
        step = transaction.position.step + 2
        entry = GivenUp(node=node, host=host, why=why[:MAX_REASON], since=transaction.now, step=step)
        transaction.change(given_up=(*self._given_up_but(node), entry)[-MAX_LISTED:])
        self._out = node, f"is given up: {why}"

    def made_good(self) -> None:
        """A step is committed: who was given up before it, and has not come back, was to blame."""
        transaction = self._transaction
        for entry in [one for one in transaction.record.given_up if one.step <= transaction.position.step]:
            self.quarantine(entry.node, entry.host, entry.why)
            transaction.emit(NodeLeft, node=entry.node, reason="quarantined", detail=entry.why)

    def came(self, node: str) -> None:
        """A node is let in: what it was given up for does not count."""
        if any(one.node == node for one in self._transaction.record.given_up):
            self._transaction.change(given_up=self._given_up_but(node))

    def _given_up_but(self, node: str) -> tuple[GivenUp, ...]:
        return tuple(one for one in self._transaction.record.given_up if one.node != node)

    def deserted(self, *, awaited: bool) -> str:
        """Return why the job cannot go on: its last node is out just now, and all others are, too; "" where it can.

        The same rule however they went. Who is only gone may come back, and so may who is `awaited`; a job that has not
        begun hears all its nodes: what the others meet says more.
        """
        (node, why), self._out = self._out, ("", "")
        record = self._transaction.record
        if not node or self._transaction.members.nodes or self._gone or awaited:
            return ""
        if not record.generation and len(self.all_out) < self._nodes_to_begin:
            return ""
        return f"the last node, {node}, {why}"

    @property
    def all_out(self) -> tuple[Quarantined | GivenUp, ...]:
        """The nodes that are quarantined, or given up, each once."""
        return *self._transaction.record.quarantined, *self._transaction.record.given_up

    def undrain(self, node: str) -> None:
        """Let a node come back, with all its budgets.

        Raises:
            UnreachableError: it is neither drained nor quarantined.
        """
        transaction = self._transaction
        record = transaction.record
        entry = next((one for one in self.all_out if one.node == node), None)
        if entry is None:
            away = ", ".join(one.node for one in (*record.drained, *self.all_out)) or "none"
            what = "is in the job" if node in transaction.members.nodes else "is not in the job"
            raise UnreachableError(
                f"node {node} {what}, and neither drained nor quarantined: there is nothing to undo; "
                f"nodes that can be undrained: {away}"
            )
        quarantined = tuple(one for one in record.quarantined if one.node != node)
        transaction.change(quarantined=quarantined, given_up=self._given_up_but(node))
        self._gone[node] = entry.since, TICKET
        self._budgets = {key: budget for key, budget in self._budgets.items() if key[0] != node}
