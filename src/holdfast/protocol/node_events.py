"""The events that tell of nodes: who comes, goes, waits, takes whose place; and of what follows from their number."""

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
    """`reason`: failed, drained, quarantined, finished. `detail`: why it is quarantined, or has no tries left."""

    node: str
    reason: str
    detail: str = ""


class NodeRefused(Event, frozen=True, kw_only=True, tag_field="event", tag="node_refused"):
    """A node may not join: the other nodes cannot reach it, it cannot reach them, or it does not fit the job.

    `address`: the address that it advertises. `why`: what failed or differs, and what to do.
    """

    node: str
    why: str
    address: str


class NodeRepaired(Event, frozen=True, kw_only=True, tag_field="event", tag="node_repaired"):
    """A node that had failed trains again, after `repair_s`.

    `repair`: automatic (it came back by itself), or ticket (it was quarantined, and somebody has let it come back).
    """

    node: str
    repair: str
    repair_s: float


class StandbyReady(Event, frozen=True, kw_only=True, tag_field="event", tag="standby_ready"):
    """A standby is warm: from here on it can take the place of any node at once.

    `roles`: how many of its workers are warm, each for a model's whole replica; `warm_s`: what the slowest took.
    """

    node: str
    roles: int
    warm_s: float


class StandbyFailed(Event, frozen=True, kw_only=True, tag_field="event", tag="standby_failed"):
    """A standby is not warm, or gone. `tries`: so often it was told to warm up; `again`: it will be told once more."""

    node: str
    why: str
    tries: int
    again: bool


class StragglerFound(Event, frozen=True, kw_only=True, tag_field="event", tag="straggler_found"):
    """A node computes slower than the others. `factor`: times their median; `action`: move, fewer, told."""

    node: str
    factor: float
    action: str
    why: str


class NodeMoved(Event, frozen=True, kw_only=True, tag_field="event", tag="node_moved"):
    """A node has taken another's place. `reason`: failure, drain, move. `down_s`, `moved_bytes`: of the whole recovery.

    `detail`: why it was this one, and where it is not where the other was.
    """

    from_node: str
    to_node: str
    reason: str
    down_s: float
    moved_bytes: int
    detail: str = ""


class NodeStayed(Event, frozen=True, kw_only=True, tag_field="event", tag="node_stayed"):
    """A node that was to give its place to a standby keeps it.

    `reason`: no_standby (none that is here will ever be warm), job_ended. `detail`: why, and what to do.
    """

    node: str
    reason: str
    detail: str


class MemorySampled(Event, frozen=True, kw_only=True, tag_field="event", tag="memory_sampled"):
    """What workers held and moved around a change of the members: of leavers, joiners and one that stayed.

    `since_generation`: the one in force before it. The samples' `ago_s` count back from the event's `time`.
    """

    since_generation: int
    nodes: tuple[MemoryOfNode, ...]


class JobAtRisk(Event, frozen=True, kw_only=True, tag_field="event", tag="job_at_risk"):
    """The loss of any process would end the job, or all that it has done: `why`, and what to do about it.

    Said when a generation begins in which it is so, once as long as it stays so.
    """

    why: str


class LayoutChanged(Event, frozen=True, kw_only=True, tag_field="event", tag="layout_changed"):
    """Replicas lie over the workers of a node in another way from here on, since there are so many `nodes`; `why`.

    `step`: whose state was put into memory, and read from there. `down_s` runs from the stop after it to the first step
    committed under the new layout. `moved_bytes`: what came from other nodes.
    """

    from_layout: str
    to_layout: str
    nodes: int
    step: int
    why: str
    down_s: float
    moved_bytes: int


class LayoutKept(Event, frozen=True, kw_only=True, tag_field="event", tag="layout_kept"):
    """The layout stays what it is although there are `nodes` now: `why` no other one is better, or could not come."""

    layout: str
    nodes: int
    why: str
