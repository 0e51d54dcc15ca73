"""The ladder of a job's nodes (Unicron, Figure 7): try again in place, start its processes again, take the node out.

Each rung has a budget per node and window of time; where it is used up, or the class of a failure says so, the next one
is taken. What is beyond them all is quarantined, by name and host, until somebody lets it come back.
"""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.budget import TOGETHER_S, Budget
from holdfast.coordination.inputs import Failure
from holdfast.coordination.nodes.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.errors import UnreachableError
from holdfast.protocol.events import NodeRepaired
from holdfast.protocol.failures import Detector, FailureKind, Severity
from holdfast.protocol.names import index_of
from holdfast.protocol.record import Quarantined

#: Trying again costs all members some tens of milliseconds; a link that breaks more than once a minute is better left
#: out.
MAX_RETRIES = 5
#: of budgets, so many are kept: far more than nodes fail within a window
_KEPT = 4096
AUTOMATIC, TICKET = "automatic", "ticket"


class Ladder:
    """Who has used up what, who is quarantined, and who was repaired by whom."""

    def __init__(self, turn: Turn, config: CoordinatorConfig) -> None:
        self._turn = turn
        self._max_restarts, self._nodes_to_begin = config.spec.recovery.max_restarts, config.spec.nodes_to_begin
        #: by node, its agent's process (see `_agent`) and rung: a machine that was replaced begins anew
        self._budgets: dict[tuple[str, int, Severity], Budget] = {}
        #: the newest loss of a node: when, which, and what it was counted in
        self._lost = -TOGETHER_S, "", Budget()
        #: since when nodes are gone, and who brings them back
        self._gone: dict[str, tuple[float, str]] = {}

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
        return budget.use(self._turn.now, place)

    def _agent(self, failure: Failure) -> int:
        """Return the agent's process whose budget a failure uses up; 0: the name's, whoever bears it.

        What says nonsense, or is lost while others build a group with it, costs them a swap each time: that it comes
        back as another process must not let it keep all other newcomers out for ever.
        """
        record, node = self._turn.record, self._turn.members.nodes.get(failure.node)
        if node is None:
            return 0
        plan, pending = record.plan, record.pending
        member = plan is not None and any(plan.rank(worker) is not None for worker in node.workers)
        coming = pending is not None and any(pending.rank(worker) is not None for worker in node.workers)
        nonsense = failure.kind is FailureKind.EXCEPTION
        return 0 if not failure.worker and (nonsense or (coming and not member)) else node.agent_pid

    def _with_others(self, node: str, budget: Budget) -> bool:
        """Nodes that are lost within a second of each other are lost with what they share, and blameless."""
        now = self._turn.now
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
        self._gone[node] = self._turn.now, AUTOMATIC

    def back(self, node: Node) -> None:
        """All workers of a node run: say so where it had been gone."""
        since, repair = self._gone.pop(node.name, (0.0, ""))
        if repair:
            self._turn.emit(NodeRepaired, node=node.name, repair=repair, repair_s=self._turn.now - since)

    # ---- beyond the last rung ----

    def quarantined(self, node: str, host: str) -> Quarantined | None:
        """Return why a node may not come, None where it may."""
        known = self._turn.record.quarantined
        return next((one for one in known if one.node == node or (one.host and one.host == host)), None)

    def quarantine(self, node: str, host: str, why: str) -> bool:
        """Let a node come no more; nor another one on its host, unless more nodes than it are there, or on their way.

        Returns:
            False where nodes are still to come with which the job is to begin: what they meet says more.
        """
        turn = self._turn
        begun = turn.record.generation > 0
        shared = not begun or any(other.host == host for other in turn.members.nodes.values() if other.name != node)
        entry = Quarantined(node=node, host="" if shared else host, why=why[:1000], since=turn.now)
        others = (one for one in turn.record.quarantined if one.node != node)
        turn.change(quarantined=(*others, entry))
        self._gone.pop(node, None)
        return begun or len(turn.record.quarantined) >= self._nodes_to_begin

    def undrain(self, node: str) -> None:
        """Let a node come back, with all its budgets.

        Raises:
            UnreachableError: it is not quarantined.
        """
        turn = self._turn
        entry = next((one for one in turn.record.quarantined if one.node == node), None)
        if entry is None:
            names = ", ".join(one.node for one in turn.record.quarantined) or "none"
            raise UnreachableError(f"no node {node!r} is quarantined: those that are: {names}")
        turn.change(quarantined=tuple(one for one in turn.record.quarantined if one is not entry))
        self._gone[node] = entry.since, TICKET
        self._budgets = {key: budget for key, budget in self._budgets.items() if key[0] != node}
