"""A locally started job continues while it has any node, including nodes that were added by hand."""

from __future__ import annotations

from holdfast.control.launch.job_view import JobProgress
from holdfast.protocol.events import NodeLeft, NodesJoined
from holdfast.protocol.plan import JoinedNode


def joined(name: str, pid: int) -> NodesJoined:
    nodes = (JoinedNode(node=name, agent_pid=pid, worker_pids=()),)
    return NodesJoined(time=0.0, job="j", term=1, generation=1, nodes=nodes)


def left(name: str, reason: str) -> NodeLeft:
    return NodeLeft(time=0.0, job="j", term=1, generation=1, node=name, reason=reason)


def test_current_nodes_have_joined_and_not_left() -> None:
    standing = JobProgress(())
    for event in (joined("node-0", 1), joined("far", 2), left("node-0", "drained")):
        standing.on_event(event)
    assert standing.nodes == {"far"}
    standing.on_event(left("far", "failed"))
    assert not standing.nodes
