"""What each of a simulated pool's processes sees of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.coordination.grants import apply_shares, update_roles
from holdfast.coordination.pool.fence import Fence, StartGrant
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.state import PoolConfig
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.held import Held
from holdfast.protocol.pool.record import PooledJob, PoolRecord
from holdfast.protocol.pool.sharing import JobShares
from tests.simulation.pool.pool_world import JobDisk, Line, LineEnd, PoolWorld


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParts:
    """The machines, to be replaced by wrong ones: what they do must be found."""

    pool: type[Pool] = Pool
    fence: type[Fence] = Fence
    hear: Callable[[Held, JobShares, float], Held] = apply_shares
    update_roles: Callable[[Held, Mapping[str, bool], Mapping[str, str]], Held] = update_roles


class NodeSeen(LineEnd, Protocol):
    """A node, to others."""

    name: str
    session: str
    fence: Fence
    processes: set[int]


class CoordinatorSeen(LineEnd, Protocol):
    """A job's coordinator, to others."""

    name: str
    submission: int
    disk: JobDisk
    members: dict[str, Line]


class ServerSeen(LineEnd, Protocol):
    """The pool's server, to others."""

    def linked(self, job: CoordinatorSeen, line: Line) -> None: ...


class Watching(Protocol):
    """Who looks at all that is written and started."""

    def persisted(self, before: PoolRecord | None, after: PoolRecord) -> None: ...

    def emitted(self, event: AnyPoolEvent) -> None: ...

    def held(self, job: CoordinatorSeen, before: Held, after: Held) -> None: ...

    def started(self, node: NodeSeen, start: StartGrant) -> None: ...


class PoolAround(Protocol):
    """Everything, to one who is in it."""

    @property
    def parts(self) -> PoolParts: ...
    @property
    def world(self) -> PoolWorld: ...
    @property
    def config(self) -> PoolConfig: ...
    @property
    def checker(self) -> Watching: ...
    @property
    def server(self) -> ServerSeen | None: ...
    @property
    def nodes(self) -> Mapping[str, NodeSeen]: ...
    @property
    def coordinators(self) -> Mapping[tuple[str, int], CoordinatorSeen]: ...

    def unfit(self, job: str) -> Collection[str]:
        """Return the nodes that will not do for a job."""
        ...

    def work_s(self, job: str) -> float: ...

    def begin(self, job: PooledJob) -> None: ...

    def close(self, job: str, submission: int) -> None: ...

    def server_died(self, server: LineEnd) -> None: ...

    def job_died(self, job: CoordinatorSeen) -> None: ...
