"""Events about who is there and who trains."""

from __future__ import annotations

from holdfast.coordination.nodes.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.protocol.events import FaultThreshold, GenerationStarted, JoinedNode, NodesJoined, WorkersChanged
from holdfast.protocol.plan import GenerationPlan


def announce_generation(turn: Turn, plan: GenerationPlan, reason: str) -> None:
    """A new configuration is in force."""
    experts = plan.expert_plan
    turn.emit(
        GenerationStarted,
        members=tuple(dict.fromkeys(member.node for member in plan.members)),
        world_size=len(plan.members),
        reason=reason,
        expert_moves=experts.moves if experts else 0,
        fault_threshold=FaultThreshold(asked=experts.asked, given=experts.given) if experts else None,
    )


def announce_node(turn: Turn, node: Node, *, is_new: bool) -> None:
    """A worker of the node attached: say so once all of them run. `is_new`: the worker is in no plan yet."""
    if not node.complete or node.pids == node.announced:
        return
    known = bool(node.announced) or node.returning
    node.announced = node.pids
    if not known:
        turn.emit(NodesJoined, nodes=(JoinedNode(node=node.name, agent_pid=node.agent_pid, worker_pids=node.pids),))
    elif is_new:
        turn.emit(WorkersChanged, node=node.name, worker_pids=node.pids)
