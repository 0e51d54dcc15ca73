"""What a job's own record has of its pool: a part of that record; `coordination.tenancy` changes it."""

from __future__ import annotations

import msgspec

from holdfast.protocol.names import Struct
from holdfast.protocol.pool.sharing import JobStanding, PoolWish


class HeldGrant(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="HeldGrant"):
    """A grant that a job holds."""

    number: int
    #: when the job heard of it, unix seconds
    since: float
    #: the node has joined by it
    came: bool = False
    #: the pool wants the node back, in good order
    leaving: bool = False
    #: the node waits as a standby; otherwise it counts as one that trains
    standby: bool = False
    #: the version of the pool's newest decision on `standby` that the job has followed
    role_version: int = 0


class Held(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Held"):
    """What a job's record has of its pool: grants by node, and those given back of which the pool still speaks.

    `failure_rate`: how often a node of the pool fails, per second; 0 before it has said so.
    `anew`: it was suspended and keeps no checkpoints: until it trains again nothing is left of what it had done.
    `term`, `heard`: of the newest shares that were heard. `standing`, `why`: what the pool is told of the job.
    """

    submission: int
    term: int = 0
    heard: int = 0
    grants: dict[str, HeldGrant] = msgspec.field(default_factory=dict[str, HeldGrant])
    returned: frozenset[int] = frozenset()
    wish: PoolWish = "run"
    standing: JobStanding = "going"
    why: str = ""
    failure_rate: float = 0.0
    anew: bool = False
    #: how many nodes train by the pool's newest word; None before the first one
    places: int | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The grants held."""
        return frozenset(grant.number for grant in self.grants.values())

    @property
    def waiting(self) -> frozenset[int]:
        """The grants held by whose nodes no place is filled."""
        return frozenset(grant.number for grant in self.grants.values() if grant.standby)

    @property
    def training(self) -> int:
        """The number of grants whose nodes count as ones that train, without those that the pool wants back."""
        return sum(not (grant.standby or grant.leaving) for grant in self.grants.values())

    @property
    def to_leave(self) -> tuple[str, ...]:
        """The nodes to give back, in good order."""
        return tuple(node for node, grant in self.grants.items() if grant.leaving)
