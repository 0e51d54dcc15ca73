"""The part of a job's record about its pool. `coordination.pool_client` changes it."""

from __future__ import annotations

import msgspec

from holdfast.protocol.names import Struct
from holdfast.protocol.pool.sharing import JobStanding, PoolWish


class HeldGrant(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="HeldGrant"):
    """A grant that a job holds."""

    number: int
    #: when the job learned of it, unix seconds
    since: float
    #: whether the node has joined
    came: bool = False
    #: whether the pool wants the node back
    leaving: bool = False
    #: whether the node waits as a standby
    standby: bool = False
    #: the version of the pool's newest decision on `standby` that the job has followed
    role_version: int = 0


class Held(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Held"):
    """The grants of a job, by node."""

    submission: int
    #: term of the newest shares that the job has seen
    term: int = 0
    #: version of the newest shares that the job has seen
    heard: int = 0
    grants: dict[str, HeldGrant] = msgspec.field(default_factory=dict[str, HeldGrant])
    #: grants that were returned, and that the pool still lists
    returned: frozenset[int] = frozenset()
    wish: PoolWish = "run"
    #: the job's state, which the pool is told
    standing: JobStanding = "going"
    #: the reason, which the pool is told
    why: str = ""
    #: failures of a node of the pool per second; 0 before the pool has sent it
    failure_rate: float = 0.0
    #: Whether it was suspended and keeps no checkpoints: until it trains again, all its progress is lost.
    anew: bool = False
    #: number of nodes that train by the newest shares, or None before the first
    places: int | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The grants held."""
        return frozenset(grant.number for grant in self.grants.values())

    @property
    def waiting(self) -> frozenset[int]:
        """The grants of nodes that wait as standbys."""
        return frozenset(grant.number for grant in self.grants.values() if grant.standby)

    @property
    def training(self) -> int:
        """The number of grants of nodes that train, without grants that the pool wants back."""
        return sum(not (grant.standby or grant.leaving) for grant in self.grants.values())

    @property
    def to_leave(self) -> tuple[str, ...]:
        """The nodes that the job returns to the pool."""
        return tuple(node for node, grant in self.grants.items() if grant.leaving)
