"""Who comes, and who trains: events, and for whom others wait."""

from __future__ import annotations

import math

from holdfast.coordination.membership import Node
from holdfast.coordination.turn import Transaction
from holdfast.protocol.events import GenerationStarted, JobAtRisk, NodesJoined, WorkersChanged
from holdfast.protocol.plan import Decision, FaultThreshold, GenerationPlan, JoinedNode

#: those that come within so many seconds of others are told of with them
TOGETHER_S = 0.1
#: newcomers that are no crowd: nobody waits for others
FEW = 8
#: a crowd is all here once nobody has come for so long,
QUIET_S = 0.25
#: or for so long, where workers of nodes that are connected do not run yet;
GATHER_S = 1.0
#: and nobody waits for longer than this.
LONGEST_GATHER_S = 5.0


def announce_generation(
    transaction: Transaction, plan: GenerationPlan, reason: str, decision: Decision | None = None
) -> None:
    """A new configuration is in force; `decision`: what it begins with, None at a step's boundary."""
    experts = plan.expert_plan
    transaction.emit(
        GenerationStarted,
        members=tuple(dict.fromkeys(member.node for member in plan.members)),
        world_size=len(plan.members),
        reason=reason,
        decision=decision.kind if decision is not None else "",
        expert_moves=experts.moves if experts else 0,
        fault_threshold=FaultThreshold(asked=experts.asked, given=experts.given) if experts else None,
        seed=transaction.record.seed,
        micro_batches=transaction.record.micro_batches,
        global_batch=transaction.record.global_batch or None,
    )


def warn_of_one_replica(transaction: Transaction, before: GenerationPlan | None, *, snapshots: bool) -> None:
    """A plan is in force: where the model lies over the processes of one node alone, and nothing is kept, say so once.

    Args:
        before: the plan before this one. snapshots: the state is kept in memory from time to time.
    """
    record, plan = transaction.record, transaction.record.plan
    if plan is None or plan.places == 1 or plan.units > 1 or record.saves or snapshots:
        return
    if before is None or before.units > 1:
        why = f"there is one replica of the model ({record.layout}) and no checkpoint: the loss of any of its processes"
        transaction.emit(JobAtRisk, why=f"{why} loses all that was done; give --checkpoint-dir DIR, or add a node")


class Newcomers:
    """Tells of nodes that have come: of the first at once, of those right behind it together.

    A thousand nodes that come in one moment make a few events and one generation, not a thousand.
    """

    def __init__(self, transaction: Transaction, max_nodes: int) -> None:
        """`max_nodes`: how many the job is given; more may come."""
        self._transaction = transaction
        self._max_nodes = max_nodes
        self._told_at = -math.inf
        self._waiting: list[Node] = []
        #: newcomers since the last were taken in, and when the first and the last of them gave a sign
        self._crowd: set[str] = set()
        self._first = self._last = 0.0

    @property
    def gathering(self) -> bool:
        """True while a crowd comes, which is to be taken in at once; a few that come do not wait for each other."""
        if len(self._crowd) <= FEW:
            return False
        now, members = self._transaction.now, self._transaction.members
        complete, here = members.complete_nodes, len(members.nodes) - len(members.standbys) - len(members.owed)
        if complete == here == self._max_nodes or now - self._first >= LONGEST_GATHER_S:
            return False
        return now - self._last < (QUIET_S if complete == here else GATHER_S)

    def came(self, node: Node) -> None:
        """A node is here that nobody awaited, or one of its workers."""
        if not self._crowd:
            self._first = self._transaction.now
        self._crowd.add(node.name)
        here = self._transaction.members.nodes
        if len(self._crowd) > 2 * len(here) + FEW:  # most have gone again
            self._crowd &= here.keys()
        self._last = self._transaction.now

    def taken_in(self) -> None:
        """Whoever is here, and complete, is in the plan that is told now."""
        self._crowd.clear()
        self.tell()

    def attached(self, node: Node, *, is_new: bool) -> None:
        """A worker of the node attached: say so once all of them run. `is_new`: the worker is in no plan yet."""
        if not node.complete or node.pids == node.announced:
            return
        known = bool(node.announced) or node.returning
        node.announced = node.pids
        if not known:
            self._waiting.append(node)
            if self._transaction.now - self._told_at > TOGETHER_S:
                self.tell()
        elif is_new:
            self.tell()
            self._transaction.emit(WorkersChanged, node=node.name, worker_pids=node.pids)

    def tell(self) -> None:
        """Say who has come, before anything that concerns them is said; whoever is gone again has not come."""
        transaction, here = self._transaction, self._transaction.members.nodes
        came = {node.name: node for node in self._waiting if here.get(node.name) is node and not node.aside}.values()
        self._waiting.clear()
        if came:
            self._told_at = transaction.now
            for node in came:
                node.told = True
            transaction.emit(NodesJoined, nodes=tuple(map(_joined, came)))


def _joined(node: Node) -> JoinedNode:
    off = round(node.clock_off_s, 3)
    return JoinedNode(node=node.name, agent_pid=node.agent_pid, worker_pids=node.announced, clock_off_s=off)
