"""Events for tests, with default values for all fields that a test does not set."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from holdfast.protocol.events import AnyEvent, NodesJoined
from holdfast.protocol.failures import SeenWorker, SharedStack
from holdfast.protocol.messages.memory import MemoryOfNode
from holdfast.protocol.plan import FaultThreshold, JoinedNode

#: All kinds of events by their JSON names, taken from the union.
KINDS: dict[str, type[AnyEvent]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}
_BLANK = {
    dict[str, float | None]: {},
    float: 0.0,
    int: 0,
    str: "",
    bool: False,
    tuple[int, ...]: (),
    tuple[str, ...]: (),
    float | None: None,
    tuple[SeenWorker, ...]: (),
    tuple[SharedStack, ...]: (),
    tuple[MemoryOfNode, ...]: (),
    FaultThreshold: FaultThreshold(asked=2, given=2),
    tuple[JoinedNode, ...]: (JoinedNode(node="", agent_pid=0, worker_pids=()),),
}


def made(name: str, time: float = 0.0, /, **fields: Any) -> AnyEvent:
    """Return an event by its name in JSON, with the given fields and default values for the other required ones."""
    kind = KINDS[name]
    blank = {field.name: _BLANK[field.type] for field in msgspec.structs.fields(kind) if field.required}
    return kind(**{**blank, "time": time, **fields})


def joined(
    node: str, at: float = 0.0, /, *, agent_pid: int = 0, worker_pids: tuple[int, ...] = (), **fields: Any
) -> NodesJoined:
    """Return `nodes_joined` of one node."""
    who = JoinedNode(node=node, agent_pid=agent_pid, worker_pids=worker_pids)
    blank = {"time": at, "job": "", "term": 0, "generation": 0}
    return NodesJoined(nodes=(who,), **{**blank, **fields})
