"""What a node's agent and the pool say to each other. Both tell how things stand, never what has changed.

So whatever is lost, said twice or said late does no harm: the next word says it all.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import NAME_PATTERN, PROTOCOL, Count, Name, Rack, Struct, Text

Session = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]

Identity = Annotated[str, Meta(max_length=64)]
NameOrNone = Annotated[str, Meta(pattern=f"^$|{NAME_PATTERN}")]

# ---- agent -> pool ----


class NodeStands(Struct, frozen=True, kw_only=True, tag="NodeStands"):
    """How a node stands. `runs`: the grant whose processes it has, 0: none.

    `ended`: up to this grant everything is over here for good: no process of theirs is left, none will be started.
    `changes`: how often, since its agent began, a script has changed here that it was to run.
    """

    runs: Count = 0
    ended: Count = 0
    changes: Count = 0


class PoolHello(Struct, frozen=True, kw_only=True, tag="PoolHello"):
    """First message of an agent's connection. `session`: of this agent's process; no other has it.

    `term`, `version`: of the newest record of which it was told. `protocol`: what it speaks. `passing`: the node's name
    is of this process alone: no other ever comes back by it.
    """

    node: Name
    session: Session
    agent_pid: Count = 0
    rack: Rack = ""
    zone: Rack = ""
    stands: NodeStands = NodeStands()
    term: Count = 0
    version: Count = 0
    protocol: Count = PROTOCOL
    passing: bool = False
    identity: Identity = ""  # of the pool of that record; "" before the first


class NodeAlive(Struct, frozen=True, kw_only=True, tag="NodeAlive"):
    """The node lives, and stands as it said."""


class LeavePool(Struct, frozen=True, kw_only=True, tag="LeavePool"):
    """The node goes for good: nothing runs there any more."""


FromNode = PoolHello | NodeStands | NodeAlive | LeavePool

# ---- pool -> agent ----


class NodeGrant(Struct, frozen=True, kw_only=True, tag="NodeGrant"):
    """Whose the node is by the pool's record: by grant `grant` of `job`, or nobody's (0).

    `term`, `version`: of that record; an older one than was heard counts no more. `standby`: it is to wait there.
    """

    term: Count
    version: Count
    grant: Count = 0
    job: NameOrNone = ""
    submission: Count = 0
    standby: bool = False
    identity: Identity = ""  # of the pool, as in its record


class PoolRefusal(Struct, frozen=True, kw_only=True, tag="PoolRefusal"):
    """The pool does not take the node, and closes. `stays`: what runs there runs on, and the node asks again."""

    why: Text
    stays: bool = False


ToNode = NodeGrant | PoolRefusal
