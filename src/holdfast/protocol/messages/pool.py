"""Messages between a node's agent and the pool. They contain whole states, never changes.

So a message that is lost, repeated or late does no harm: the next message replaces it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import NAME_PATTERN, PROTOCOL, Count, Name, Rack, Struct, Text

Session = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]

Identity = Annotated[str, Meta(max_length=64)]
NameOrNone = Annotated[str, Meta(pattern=f"^$|{NAME_PATTERN}")]

# ---- agent -> pool ----


class NodeState(Struct, frozen=True, kw_only=True, tag="NodeStands"):
    """The state of a node."""

    #: the grant with processes on the node, or 0
    runs: Count = 0
    #: No process of grants up to this one is left, and none will be started.
    ended: Count = 0
    #: how often a script that the node should run has changed since its agent began
    changes: Count = 0


class PoolHello(Struct, frozen=True, kw_only=True, tag="PoolHello"):
    """The first message of an agent's connection."""

    node: Name
    #: unique to this process of the agent
    session: Session
    agent_pid: Count = 0
    rack: Rack = ""
    zone: Rack = ""
    stands: NodeState = NodeState()
    #: term of the newest record that it knows
    term: Count = 0
    #: version of that record
    version: Count = 0
    #: version of the protocol
    protocol: Count = PROTOCOL
    #: whether the node's name belongs to this process alone, so that it never returns
    passing: bool = False
    #: identity of the pool of that record; "" before the first
    identity: Identity = ""  # of the pool of that record; "" before the first


class NodeAlive(Struct, frozen=True, kw_only=True, tag="NodeAlive"):
    """The node lives, and its state is unchanged."""


class LeavePool(Struct, frozen=True, kw_only=True, tag="LeavePool"):
    """The node leaves the pool permanently. No process is left on it."""


FromNode = PoolHello | NodeState | NodeAlive | LeavePool

# ---- pool -> agent ----


class NodeGrant(Struct, frozen=True, kw_only=True, tag="NodeGrant"):
    """The job that has the node by the pool's record."""

    #: term of the record; older records than one seen before are ignored
    term: Count
    #: version of the record
    version: Count
    #: 0 if no job has the node
    grant: Count = 0
    job: NameOrNone = ""
    submission: Count = 0
    #: whether the node waits as a standby of the job
    standby: bool = False
    #: identity of the pool, as in its record
    identity: Identity = ""


class PoolRefusal(Struct, frozen=True, kw_only=True, tag="PoolRefusal"):
    """The pool refuses the node, and closes the connection."""

    why: Text
    #: whether processes on the node continue, and the node tries again
    stays: bool = False


ToNode = NodeGrant | PoolRefusal
