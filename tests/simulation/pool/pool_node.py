"""A simulated node of a pool: its agent with the fence, and processes that start and end slowly."""

from __future__ import annotations

from typing import Any

from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, ReportState, StartGrant
from holdfast.protocol.messages.pool import NodeAlive, NodeGrant, PoolHello
from tests.simulation.pool.pool_around import PoolAround
from tests.simulation.pool.pool_world import Line, NodeComes, PoolWorld

POOL = "pool"
JOBS = "jobs"


class SimPoolNode:
    """One life of a node's agent; its processes die with it."""

    def __init__(self, cluster: PoolAround, name: str, life: int) -> None:
        self.name = name
        self.session = f"{life:x}"
        self.up = True
        self.fence: Fence = cluster.parts.fence()
        #: The grants with a running process on this node.
        self.processes: set[int] = set()
        self._cluster = cluster
        self._world: PoolWorld = cluster.world
        self._pool: Line | None = None
        self._job: Line | None = None
        self._runs: StartGrant | None = None
        self._connect_to_pool()
        self._beat()

    def die(self) -> None:
        """Kill the node and its processes."""
        self.up = False
        self.processes.clear()
        for line in (self._pool, self._job):
            if line is not None:
                line.cut()

    # ---- lines ----

    def on_message(self, line: Line, message: Any) -> None:
        """Handle a message from the pool or from the job that runs here."""
        if line is self._pool:
            if isinstance(message, NodeGrant):
                self._do(self.fence.on_grant(message))
        elif line is self._job and self._runs is not None and message == self._runs.grant:
            self._reap(message)  # The job has released this node.

    def lost(self, line: Line) -> None:
        """Connect again after a line is lost."""
        if line is self._pool:
            self._pool = None
            self._world.later(0.05, 1.0, self._connect_to_pool)
        elif line is self._job:
            self._job = None
            self._world.later(0.05, 1.0, self._connect_to_job, self._runs)

    def _connect_to_pool(self) -> None:
        if not self.up or self._pool is not None:
            return
        server = self._cluster.server
        if server is None or not self._world.reaches(self.name, POOL):
            self._world.later(0.2, 1.0, self._connect_to_pool)
            return
        self._pool = Line(self._world, (self.name, POOL), (self, server))
        rack = f"r{int(self.name[1:]) % 3}"
        term, version = self.fence.record_version
        hello = PoolHello(
            node=self.name, session=self.session, rack=rack, stands=self.fence.state, term=term, version=version
        )
        self._pool.send(self, hello)

    def _connect_to_job(self, runs: StartGrant | None) -> None:
        if not self.up or runs is None or runs is not self._runs or self._job is not None:
            return
        job = self._cluster.coordinators.get((runs.job, runs.submission))
        if job is None or not self._world.reaches(self.name, JOBS):
            self._world.later(0.2, 1.0, self._connect_to_job, runs)
            return
        self._job = Line(self._world, (self.name, JOBS), (self, job))
        self._job.send(self, NodeComes(self.name, runs.grant))

    def _beat(self) -> None:
        if self.up:
            if self._pool is not None:
                self._pool.send(self, NodeAlive())
            if self._job is not None:
                self._job.send(self, NodeAlive())
            self._world.later(0.8, 1.0, self._beat)

    # ---- processes ----

    def _do(self, instructions: list[FenceInstruction]) -> None:
        for one in instructions:
            match one:
                case StartGrant():
                    self._runs = one
                    self.processes.add(one.grant)
                    self._cluster.checker.started(self, one)
                    self._world.later(0.05, 0.5, self._connect_to_job, one)
                case ReapGrant(grant):
                    self._reap(grant)
                case ReportState(stands):
                    if self._pool is not None:
                        self._pool.send(self, stands)

    def _reap(self, grant: int) -> None:
        if self._job is not None:
            self._job.cut()
            self._job = None
        self._world.later(0.01, 2.0 if self._world.rng.random() < 0.5 else 0.1, self._reaped, grant)

    def _reaped(self, grant: int) -> None:
        if self.up and grant in self.processes:
            self.processes.discard(grant)
            if self._runs is not None and self._runs.grant == grant:
                self._runs = None
            self._do(self.fence.on_reaped(grant))
