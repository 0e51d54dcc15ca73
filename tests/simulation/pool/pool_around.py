"""The interfaces of a simulated pool's processes to each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.coordination.grants import apply_shares, update_roles
from holdfast.coordination.pool.fence import Fence, StartGrant
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.state import PoolConfig
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import PooledJob, PoolRecord
from holdfast.protocol.pool.sharing import JobShares
from tests.simulation.pool.pool_world import JobDisk, Line, LineEnd, PoolWorld


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParts:
    """The machines under test; a test may replace one by a wrong machine that the checker must detect."""

    pool: type[Pool] = Pool
    fence: type[Fence] = Fence
    apply_shares: Callable[[Held, JobShares, float], Held] = apply_shares
    update_roles: Callable[[Held, Mapping[str, bool], Mapping[str, str]], Held] = update_roles


class NodeSeen(LineEnd, Protocol):
    """A node, as other processes see it."""

    name: str
    session: str
    fence: Fence
    processes: set[int]


class CoordinatorSeen(LineEnd, Protocol):
    """A job's coordinator, as other processes see it."""

    name: str
    submission: int
    disk: JobDisk
    members: dict[str, Line]


class ServerSeen(LineEnd, Protocol):
    """The pool's server, as other processes see it."""

    def linked(self, job: CoordinatorSeen, line: Line) -> None: ...


class Watching(Protocol):
    """The observer of all writes and starts."""

    def persisted(self, before: PoolRecord | None, after: PoolRecord) -> None: ...

    def emitted(self, event: AnyPoolEvent) -> None: ...

    def held(self, job: CoordinatorSeen, before: Held, after: Held) -> None: ...

    def started(self, node: NodeSeen, start: StartGrant) -> None: ...


class PoolAround(Protocol):
    """The whole simulation, as its processes see it."""

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
        """Return the nodes that are unfit for a job."""
        ...

    def work_s(self, job: str) -> float: ...

    def start_coordinator(self, job: PooledJob) -> None: ...

    def stop_coordinator(self, job: str, submission: int) -> None: ...

    def server_died(self, server: LineEnd) -> None: ...

    def job_died(self, job: CoordinatorSeen) -> None: ...
