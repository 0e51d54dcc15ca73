"""Events about new nodes and new generations, and the wait for nodes that connect together."""

from __future__ import annotations

import math

from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import GenerationStarted, JobAtRisk, NodesJoined, WorkersChanged
from holdfast.protocol.plan import Decision, FaultThreshold, GenerationPlan, JoinedNode

#: Nodes that join within this many seconds are reported in one event.
TOGETHER_S = 0.1
#: At most this many newcomers join without waiting for others.
FEW = 8
#: More newcomers are complete once none has connected for this many seconds.
QUIET_S = 0.25
#: The same, while workers of connected nodes are still starting.
GATHER_S = 1.0
#: The longest wait for newcomers in seconds.
LONGEST_GATHER_S = 5.0


def announce_generation(
    transaction: Transaction, plan: GenerationPlan, reason: str, decision: Decision | None = None
) -> None:
    """Emit `generation_started` with the plan's members, experts and data division.

    Args:
        reason: why the generation begins.
        decision: its start, or None if it begins by a swap at a step boundary.
    """
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
    """Emit a warning if one replica group of several workers has the only copy of the model, unless this was so before.

    Not if the job saves or keeps snapshots.

    Args:
        before: the previous plan, or None for the first plan, of which it warns as well.
        snapshots: whether the job keeps snapshots.
    """
    record, plan = transaction.record, transaction.record.plan
    if plan is None or plan.places == 1 or plan.units > 1 or record.saves or snapshots:
        return
    if before is None or before.units > 1:
        why = f"there is one replica of the model ({record.layout}) and no checkpoint: the loss of any of its processes"
        transaction.emit(JobAtRisk, why=f"{why} loses all that was done; give --checkpoint-dir DIR, or add a node")


class Newcomers:
    """Emits which nodes have joined: the first at once, the following ones together.

    If a thousand nodes connect at once, that gives a few events and one generation, not a thousand.
    """

    def __init__(self, transaction: Transaction, max_nodes: int) -> None:
        """`max_nodes`: the configured number of nodes; more may connect."""
        self._transaction = transaction
        self._max_nodes = max_nodes
        self._told_at = -math.inf
        self._waiting: list[Node] = []
        #: Newcomers since the last plan.
        self._crowd: set[str] = set()
        #: When the first of them connected.
        self._first = 0.0
        #: When one of them last connected or attached a worker.
        self._last = 0.0

    @property
    def gathering(self) -> bool:
        """Whether many nodes are connecting, which will join together. A few do not wait for each other.

        The wait ends when all configured nodes are complete, when none has connected for a moment, or after 5 seconds.
        """
        if len(self._crowd) <= FEW:
            return False
        now, members = self._transaction.now, self._transaction.members
        complete, here = members.complete_nodes, len(members.nodes) - len(members.standbys) - len(members.owed)
        if complete == here == self._max_nodes or now - self._first >= LONGEST_GATHER_S:
            return False
        return now - self._last < (QUIET_S if complete == here else GATHER_S)

    def on_node_arrived(self, node: Node) -> None:
        """Record that an unexpected node has connected, or attached a worker, for `gathering`."""
        if not self._crowd:
            self._first = self._transaction.now
        self._crowd.add(node.name)
        here = self._transaction.members.nodes
        # If most have disconnected again, forget them.
        if len(self._crowd) > 2 * len(here) + FEW:
            self._crowd &= here.keys()
        self._last = self._transaction.now

    def on_plan_made(self) -> None:
        """Record that all complete nodes are in the next plan, so that none is waited for; emit the joined ones."""
        self._crowd.clear()
        self.emit_joined()

    def on_worker_attached(self, node: Node, *, is_new: bool) -> None:
        """Emit that a node has joined, once all its workers have attached: at once, or with others that join within 0.1
        s.

        If the node has joined before, emit its new workers instead.

        Args:
            is_new: the worker is in no plan yet.
        """
        if not node.complete or node.pids == node.announced:
            return
        known = bool(node.announced) or node.returning
        node.announced = node.pids
        if not known:
            self._waiting.append(node)
            if self._transaction.now - self._told_at > TOGETHER_S:
                self.emit_joined()
        elif is_new:
            self.emit_joined()
            self._transaction.emit(WorkersChanged, node=node.name, worker_pids=node.pids)

    def emit_joined(self) -> None:
        """Emit the nodes that wait to be reported as joined, before other events about them. Nodes that are lost again
        are left out.
        """
        transaction, here = self._transaction, self._transaction.members.nodes
        joined = {node.name: node for node in self._waiting if here.get(node.name) is node and not node.aside}.values()
        self._waiting.clear()
        if joined:
            self._told_at = transaction.now
            for node in joined:
                node.told = True
            transaction.emit(NodesJoined, nodes=tuple(map(_joined, joined)))


def _joined(node: Node) -> JoinedNode:
    """Return a node's entry in the event of joined nodes, with its clock offset in seconds."""
    off = round(node.clock_off_s, 3)
    return JoinedNode(node=node.name, agent_pid=node.agent_pid, worker_pids=node.announced, clock_off_s=off)
