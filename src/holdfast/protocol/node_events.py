"""Events about nodes: joins, departures, standbys, moves, and changes that follow from the number of nodes."""

from __future__ import annotations

from holdfast.protocol.event import Event
from holdfast.protocol.messages.memory import MemoryOfNode
from holdfast.protocol.plan import JoinedNode


class NodesJoined(Event, frozen=True, kw_only=True, tag_field="event", tag="nodes_joined"):
    """All workers of these nodes run."""

    nodes: tuple[JoinedNode, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(joined.node for joined in self.nodes)


class WorkersChanged(Event, frozen=True, kw_only=True, tag_field="event", tag="workers_changed"):
    """A node's workers were replaced."""

    node: str
    worker_pids: tuple[int, ...]


class NodeLeft(Event, frozen=True, kw_only=True, tag_field="event", tag="node_left"):
    """A node has left the job."""

    node: str
    #: failed, drained, quarantined or finished
    reason: str
    #: why it is quarantined, or that it has no restarts left
    detail: str = ""


class NodeRefused(Event, frozen=True, kw_only=True, tag_field="event", tag="node_refused"):
    """A node may not join: the other nodes cannot reach it, it cannot reach them, or it does not fit the job."""

    node: str
    #: the failed check or the difference, with a remedy
    why: str
    #: the address that it advertises
    address: str


class NodeRepaired(Event, frozen=True, kw_only=True, tag_field="event", tag="node_repaired"):
    """A node that had failed trains again."""

    node: str
    #: automatic (it came back), or ticket (it was quarantined, and a user has let it return)
    repair: str
    #: seconds since the failure
    repair_s: float


class StandbyReady(Event, frozen=True, kw_only=True, tag_field="event", tag="standby_ready"):
    """A standby is warm, and can replace a node at once."""

    node: str
    #: number of its workers that are warm, each for a whole replica of the model
    roles: int
    #: seconds that the slowest of them took
    warm_s: float


class StandbyFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="standby_failed"):
    """A standby is not warm, or is gone."""

    node: str
    why: str
    #: how often it was ordered to warm up
    tries: int
    #: whether it will be ordered again
    again: bool


class StragglerFound(Event, frozen=True, kw_only=True, tag_field="event", tag="straggler_found"):
    """A node is slower than the others."""

    node: str
    #: its time divided by the median of the others
    factor: float
    #: move, fewer or told
    action: str
    why: str


class NodeMoved(Event, frozen=True, kw_only=True, tag_field="event", tag="node_moved"):
    """A node has replaced another node."""

    from_node: str
    to_node: str
    #: failure, drain or move
    reason: str
    #: seconds of the whole recovery
    down_s: float
    #: bytes of the whole recovery
    moved_bytes: int
    #: why this node was chosen, and whether its rack or zone differs
    detail: str = ""


class NodeStayed(Event, frozen=True, kw_only=True, tag_field="event", tag="node_stayed"):
    """A node that waited for a replacement keeps its place."""

    node: str
    #: no_standby (no standby will ever be warm) or job_ended
    reason: str
    #: why, with a remedy
    detail: str


class MemorySampled(Event, frozen=True, kw_only=True, tag_field="event", tag="memory_sampled"):
    """Memory and traffic of leavers, joiners and one stayer around a change of the members."""

    #: generation before the change
    since_generation: int
    #: samples; their `ago_s` count back from the time of this event
    nodes: tuple[MemoryOfNode, ...]


class JobAtRisk(Event, frozen=True, kw_only=True, tag_field="event", tag="job_at_risk"):
    """The loss of any process would end the job, or lose all its progress. Sent once as long as that lasts."""

    #: the reason, with a remedy
    why: str


class LayoutChanged(Event, frozen=True, kw_only=True, tag_field="event", tag="layout_changed"):
    """The workers of a node share replicas in another way, because the number of nodes has changed."""

    from_layout: str
    to_layout: str
    nodes: int
    #: step of the state that was stashed and read again
    step: int
    why: str
    #: seconds from the stop after that step to the first step committed under the new layout
    down_s: float
    #: bytes from other nodes
    moved_bytes: int


class LayoutKept(Event, frozen=True, kw_only=True, tag_field="event", tag="layout_kept"):
    """The layout stays, although the number of nodes has changed."""

    layout: str
    nodes: int
    #: why no other layout is better or possible
    why: str
