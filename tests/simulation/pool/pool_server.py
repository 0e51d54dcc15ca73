"""The simulated server of a pool: the shell around its machine, with the store and the journal."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.coordination.inputs import Tick
from holdfast.coordination.pool.inputs import (
    JobConnected,
    JobMessage,
    NextPlansSolved,
    NodeDisconnected,
    NodeMessage,
    PoolInput,
)
from holdfast.coordination.pool.instructions import (
    DisconnectNode,
    EmitPool,
    PersistPool,
    PoolInstruction,
    SendToJob,
    SendToNode,
    SolveNextPlans,
    StartCoordinator,
    StopCoordinator,
    StopOutdatedPool,
)
from holdfast.errors import HoldfastError
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.record import PoolRecord
from tests.simulation.pool.pool_around import CoordinatorSeen, PoolAround
from tests.simulation.pool.pool_world import Crash, Line, PoolWorld

#: The time to solve the plans for the next failures, in seconds.
_SOLVED_S = 0.3


class SimPoolServer:
    """One life of the pool's server."""

    def __init__(self, cluster: PoolAround) -> None:
        self.up = True
        self._cluster = cluster
        self._world: PoolWorld = cluster.world
        disk = self._world.disk
        self._version, self._length = disk.version, len(disk.journal)
        record = msgspec.json.decode(msgspec.json.encode(disk.record), type=PoolRecord) if disk.record else None
        self.pool = cluster.parts.pool(cluster.config, record, len(disk.journal))
        self._numbers: dict[int, Line] = {}
        self._by_line: dict[int, int] = {}
        self._last_number = 0
        self._jobs: dict[str, Line] = {}

    def start(self) -> None:
        """Start the pool from its record."""
        self._run(lambda: self.pool.start(self._world.now, "", 1))
        self._tick()

    def die(self) -> None:
        """Kill the server."""
        if not self.up:
            return
        self.up = False
        for line in (*self._numbers.values(), *self._jobs.values()):
            line.cut()
        self._cluster.server_died(self)

    def feed(self, event: PoolInput) -> str:
        """Handle an input; return the reason if the machine refuses it, else ""."""
        return self._run(lambda: self.pool.handle(event, self._world.now)) if self.up else "the server is down"

    def linked(self, job: CoordinatorSeen, line: Line) -> None:
        """Handle the connection of a job's coordinator."""
        self._jobs[job.name] = line
        self.feed(JobConnected(job.name))

    def on_message(self, line: Line, message: Any) -> None:
        """Handle a message from a node or a job."""
        for name, known in self._jobs.items():
            if known is line:
                self.feed(JobMessage(name, message))
                return
        if id(line) not in self._by_line:
            self._last_number += 1
            self._numbers[self._last_number] = line
            self._by_line[id(line)] = self._last_number
        self.feed(NodeMessage(self._by_line[id(line)], message))

    def lost(self, line: Line) -> None:
        """Handle the loss of a line."""
        self._jobs = {name: known for name, known in self._jobs.items() if known is not line}
        number = self._by_line.get(id(line))
        if number is not None:
            self.feed(NodeDisconnected(number))

    def _tick(self) -> None:
        if self.up:
            self.feed(Tick())
            self._world.timeline.after(0.5, self._tick)

    def _run(self, call: Any) -> str:
        try:
            instructions: list[PoolInstruction] = call()
        except HoldfastError as error:
            return str(error)
        try:
            for instruction in instructions:
                if not self.up:
                    break
                self._carry_out(instruction)
        except Crash:
            self.die()
        return ""

    def _persist(self, record: PoolRecord) -> None:
        world, disk = self._world, self._world.disk
        world.writing("pool")
        if disk.version != self._version:
            world.note("a server finds that another has taken the pool")
            self.die()
            return
        before, disk.record = disk.record, record
        disk.version = self._version = disk.version + 1
        self._cluster.checker.persisted(before, record)

    def _emit(self, event: AnyPoolEvent) -> None:
        disk = self._world.disk
        self._world.writing("pool")
        if len(disk.journal) != self._length:
            self.die()
            return
        disk.journal.append(event)
        self._length += 1
        self._cluster.checker.emitted(event)

    def _carry_out(self, instruction: PoolInstruction) -> None:
        world = self._world
        match instruction:
            case StopOutdatedPool(newer):
                raise AssertionError(f"the server reports that its store is outdated, but it is not: {newer}")
            case PersistPool(record):
                self._persist(record)
            case EmitPool(event):
                self._emit(event)
            case SendToNode(connection, message):
                self._numbers[connection].send(self, message)
            case DisconnectNode(connection):
                self._numbers[connection].cut()
            case StartCoordinator(job):
                self._cluster.start_coordinator(job)
            case SendToJob(job, shares):
                if job in self._jobs:
                    self._jobs[job].send(self, shares)
            case StopCoordinator(job, submission):
                self._jobs.pop(job, None)
                self._cluster.stop_coordinator(job, submission)
            case SolveNextPlans(question):
                world.timeline.after(_SOLVED_S, lambda: self.feed(NextPlansSolved(question.number, question.solve())))
