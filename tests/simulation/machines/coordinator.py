"""The shell around the coordinator's machine: it executes instructions in order and crashes as planned.

As in the real shell, a write to the store may take time. Later instructions and inputs wait for the write. The
coordinator may die during the write, and the write may still take effect.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from holdfast.coordination.experts.searching import PlacementSearch
from holdfast.coordination.inputs import Disconnected, Input, Planned, Received, Tick
from holdfast.coordination.instructions import (
    Broadcast,
    Close,
    Emit,
    EndJob,
    Instruction,
    Persist,
    PlanExperts,
    Send,
    SendToPool,
    StopOutdated,
)
from holdfast.errors import BadInputError, RefusedError, SupersededError, UnreachableError
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.protocol.pool.sharing import JobState
from holdfast.protocol.record import Record
from tests.simulation.faults.places_taken import PlacesTaken
from tests.simulation.invariants import Checker
from tests.simulation.machines.experts.stored import FreeMoves
from tests.simulation.network import SimConnection
from tests.simulation.process import Process
from tests.simulation.world import World


class CoordinatorSurroundings(Protocol):
    """The operations of the cluster that a coordinator process uses."""

    world: World
    checker: Checker
    places: PlacesTaken
    outdated_seen: int

    def on_outdated_message(self, shell: CoordinatorShell, name: str, message: CoordinatorMessage) -> None: ...

    def write_due(self, shell: CoordinatorShell, what: str) -> bool: ...

    def coordinator_gone(self, shell: CoordinatorShell) -> None: ...

    def persisted(self, record: Record) -> None: ...

    def on_job_state(self, shell: CoordinatorShell, stands: JobState) -> None: ...

    def job_ended(self, exit_code: int, why: str) -> None: ...


class CoordinatorShell(Process):
    """One coordinator process, from its start to its crash or its job's end."""

    def __init__(self, cluster: CoordinatorSurroundings, pid: int) -> None:
        super().__init__()
        self.pid = pid
        self.connections: dict[int, SimConnection] = {}
        self.ended = False
        #: The inputs received while a record is being written, or None if no write is in progress.
        self._waiting: deque[Callable[[], object]] | None = None
        #: The stale message in the current or last transaction's input; it must have no effect.
        self._stale: WorkerMessage | None = None
        #: The time until which its processor is busy with the inputs received so far.
        self._free_at = 0.0
        self._cluster = cluster
        self._world = world = cluster.world
        #: The process reads its machine's clock once and adds the elapsed time.
        self.clock_off_s = world.clock_off_s
        self._version = world.store.version
        self._length = len(world.journal.events)
        config = replace(world.config, takeover=world.store.version > 0)
        self.machine = world.parts.coordinator(config, world.journal.position(), world.store.record)
        if world.plan.experts:
            self.machine.context.progress.costs = FreeMoves()

    @property
    def phase(self) -> str:
        """The coordinator's current phase."""
        machine = self.machine
        if machine.over is not None:
            return "ended"
        return "swapping" if machine.state == "running" and machine.record.pending is not None else machine.state

    @property
    def _now(self) -> float:
        return self._world.timeline.now + self.clock_off_s

    def boot(self) -> None:
        """Start a new term."""
        self._cluster.checker.handles(None)
        self._execute(self.machine.start(self._now, f"sim://{self.pid}", self.pid))
        self._tick_later()

    def feed(self, event: Input) -> None:
        """Handle one input completely, after all earlier inputs."""
        if self._waiting is not None:
            self._waiting.append(partial(self.feed, event))
        elif self.alive:
            self._world.trace("coordinator", self.pid, "<-", event)
            instructions = self.machine.handle(event, self._now)
            self._stale = self._cluster.checker.handles(event)
            self._execute(instructions)

    def ask(self, request: Input) -> None:
        """Handle a user's request in order; ignore a refusal."""
        if self._waiting is not None:
            self._waiting.append(partial(self.ask, request))
            return
        with contextlib.suppress(BadInputError, RefusedError, UnreachableError):
            self.feed(request)

    def feed_connection(self, number: int, event: Received) -> None:
        """Handle a message when the processor is free, if its connection is still open."""
        self._in_turn(self._heard, number, event)

    def forget_connection(self, number: int, event: Disconnected) -> None:
        """Handle the end of a connection once, after its messages."""
        self._in_turn(self._ended, number, event)

    def _in_turn(self, action: Callable[..., object], *args: Any) -> None:
        """Run an action after all earlier inputs have had their processor time."""
        timeline, handle_s = self._world.timeline, self._world.plan.handle_s
        if not handle_s:
            action(*args)
            return
        self._free_at = max(self._free_at, timeline.now) + handle_s
        timeline.at(self._free_at, self.deliver, action, *args)

    def _heard(self, number: int, event: Received) -> None:
        if number in self.connections:
            self.feed(event)

    def _ended(self, number: int, event: Disconnected) -> None:
        if self.connections.pop(number, None) is not None:
            self.feed(event)

    def crash(self) -> None:
        """Crash; the agents' connections are reset."""
        if self.alive:
            self.alive = False
            self._world.trace("coordinator", self.pid, "crashes")
            for connection in self.connections.values():
                connection.close_from_above()
            self._cluster.coordinator_gone(self)

    def resume(self) -> None:
        """Continue after a pause; the overdue tick comes before or after the queued inputs."""
        if self.alive and self.stopped and self._world.rng.random() < 0.5:
            self._backlog.insert(0, (self.feed, (Tick(),)))
        super().resume()

    def _tick_later(self) -> None:
        self._world.timeline.after(self._world.config.tick_s, self.deliver, self._tick)

    def _tick(self) -> None:
        if self._waiting is not None:
            self._waiting.append(self._tick)
            return
        self.feed(Tick())
        self._tick_later()

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        rest = _one_by_one(instructions)
        for instruction in rest:
            if self._cluster.write_due(self, type(instruction).__name__):
                return
            if isinstance(instruction, Persist):
                self._world.journal.sync()
                delay = self._world.store_delay()
                if delay:
                    self._waiting = deque()
                    store = self._world.store
                    self._world.trace("coordinator", self.pid, "writes", instruction.record)
                    self._world.timeline.after(delay, self._arrive, instruction.record, store.cuts, rest)
                    return
            try:
                self._carry_out(instruction)
            except SupersededError:
                self.crash()
                return

    def _arrive(self, record: Record, cuts: int, rest: Iterator[Instruction]) -> None:
        """Complete a write at the store; if the coordinator has died, the write takes effect or not at random."""
        world = self._world
        if world.store.cuts != cuts or not (self.alive or world.rng.random() < 0.5):
            return
        world.trace("coordinator", self.pid, "has written", record)
        # Another coordinator may have handled an input during the write.
        self._cluster.checker.goes_on(self._stale)
        try:
            self._carry_out(Persist(record))
        except SupersededError:
            self.deliver(self.crash)
        else:
            self.deliver(self._written, rest)

    def _written(self, rest: Iterator[Instruction]) -> None:
        """Continue the transaction after its write, then handle the inputs that waited."""
        waiting, self._waiting = self._waiting or deque[Callable[[], object]](), None
        self._cluster.checker.goes_on(self._stale)
        self._execute(rest)
        while waiting:
            if self._waiting is not None:  # Another write: the earlier inputs keep their order.
                self._waiting.extendleft(reversed(waiting))
                return
            waiting.popleft()()

    def _send(self, number: int, message: CoordinatorMessage) -> None:
        world, connection = self._world, self.connections.get(number)
        if connection is not None:
            world.trace("coordinator", self.pid, "->", number, message)
            if world.store.outdated:
                self._cluster.on_outdated_message(self, connection.agent.name, message)
            self._free_at = max(self._free_at, world.timeline.now) + world.plan.send_s
            connection.send_down(message, self._free_at)

    def _stop_outdated(self, newer: str) -> None:
        assert self._world.store.outdated, f"the coordinator reports that its store is outdated, but it is not: {newer}"
        self._cluster.outdated_seen += 1
        self.crash()

    def _emit(self, event: AnyEvent) -> None:
        world, cluster = self._world, self._cluster
        self._length = world.journal.append(event, self._length)
        world.trace("journal", event)
        if not world.store.outdated:
            cluster.checker.emitted(self.machine, event)
            cluster.places.take(event, self.machine.record)

    def _persist(self, record: Record) -> None:
        world, cluster = self._world, self._cluster
        self._version = world.store.swap(record, self._version)
        if not world.store.outdated:
            cluster.checker.persisted(self.machine, record)
            cluster.persisted(record)

    def _search(self, search: PlacementSearch) -> None:
        """Search a placement; the search may take any time, fail, or never end."""
        world = self._world
        fate = world.rng.random()
        if fate < 0.9:
            found = search.solve() if fate < 0.8 else None
            world.after("plan", self, self.feed, Planned(search.generation, found))

    def _carry_out(self, instruction: Instruction) -> None:
        world = self._world
        match instruction:
            case Send(number, message):
                self._send(number, message)
            case Emit(event):
                self._emit(event)
            case Persist(record):
                self._persist(record)
            case Close(number):
                connection = self.connections.get(number)
                if connection is not None:
                    connection.close_from_above()
            case StopOutdated(newer):
                self._stop_outdated(newer)
            case PlanExperts(search):
                self._search(search)
            case EndJob(exit_code, why):
                world.journal.sync()
                self.ended = True
                self._cluster.job_ended(exit_code, why)
            case SendToPool(stands):
                self._cluster.on_job_state(self, stands)
            case Broadcast():
                raise AssertionError("a broadcast must be split into single messages")


def _one_by_one(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions with each broadcast split, because a coordinator may crash between two recipients."""
    for instruction in instructions:
        if isinstance(instruction, Broadcast):
            yield from (Send(number, instruction.message) for number in instruction.connections)
        else:
            yield instruction
