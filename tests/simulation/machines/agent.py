"""A simulated node's agent: a shell around `AgentMachine` with one connection and simulated worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from holdfast.coordination.agent import instructions as ask
from holdfast.coordination.agent.identity import EndingNotice, NodeIdentity
from holdfast.coordination.timing.reading import Reading
from holdfast.errors import EXIT_ENDED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import JoinUnit, UnitAnswer, UnitFormed, UnitRefused
from holdfast.protocol.messages import any_side as msg
from tests.simulation.machines.saving import SimKeeper, SimWriter
from tests.simulation.machines.unit import SimUnit
from tests.simulation.machines.worker import SimWorker, WorkerSurroundings
from tests.simulation.network import SimConnection
from tests.simulation.process import Process

#: Nodes with this number or a higher one are standbys.
FIRST_STANDBY = 10_000


def is_standby(name: str) -> bool:
    """Return whether the node with this name is a standby."""
    return int(name[1:]) >= FIRST_STANDBY


class AgentSurroundings(WorkerSurroundings, Protocol):
    """The operations of the cluster that an agent uses."""

    def connect(self, agent: SimAgent) -> SimConnection | None: ...

    def grant_of(self, name: str) -> int: ...


class SimAgent(Process):
    """One node's agent. If the agent dies, the node dies."""

    def __init__(self, cluster: AgentSurroundings, name: str) -> None:
        super().__init__()
        self.name = name
        self.workers: list[SimWorker] = []
        self.exit_code: int | None = None
        self._cluster = cluster
        self._world = world = cluster.world
        self.standby = is_standby(name)
        self.grant = cluster.grant_of(name)
        node = NodeIdentity(
            job="sim",
            node=name,
            workers=world.plan.workers_per_node,
            digest="script",
            agent_pid=world.pid(),
            standby=self.standby,
            grant=self.grant,
            address=name,
            probe_port=1 if world.plan.probes else 0,
        )
        self.machine = world.parts.agent(node, world.nonce, world.plans)
        self._notice = EndingNotice(0.0)
        self._connection: SimConnection | None = None
        #: The memory that the workers of each replica group share, by the number of the group.
        self._units: dict[int, SimUnit] = {}
        self.writer = SimWriter(world, cluster.checker, name, self, self._written)
        self._keeper = SimKeeper(
            world, name, self, lambda part: self._obey(self.machine.on_part_fetched(part, self._now))
        )
        #: The error of this node's clock, in seconds; neighbouring nodes differ.
        self._clock_off_s = 3600.0 * (int(name[1:]) % 5 - 2)

    @property
    def _now(self) -> float:
        """The time on this node's clock."""
        return self._world.timeline.now + self._clock_off_s

    # ---- life ----

    def boot(self) -> None:
        """Start the workers and connect to the coordinator."""
        self._obey(self.machine.start(self._keeper.found()))
        self.connect()
        self._tick()
        self._look()

    def kill(self, *, seen: bool) -> None:
        """Kill the node. If `seen`, the coordinator's connection is reset; otherwise the coordinator gets no signal."""
        if not self.alive:
            return
        self.alive = False
        self._keeper.close()
        for worker in self.workers:
            worker.kill()
        if self._connection is not None:
            self._connection.close_from_below(seen=seen)

    @property
    def ended_by_machine(self) -> bool:
        """Whether the machine that runs this node has asked the agent to terminate."""
        return self._notice.is_given

    def told_to_end(self, grace_s: float) -> None:
        """Handle a termination notice: the agent must end within `grace_s` seconds."""
        if self._notice.is_given or not self.machine.ever_welcomed:
            return
        self._notice = EndingNotice(grace_s)
        self._obey(self._notice.start(self._now))
        self._world.timeline.after(grace_s, self.deliver, self._end_at_last)

    def _end_at_last(self) -> None:
        self._obey(self._notice.leave())
        self._obey(self.machine.end(EXIT_ENDED, "told to end"))

    def stop(self) -> None:
        super().stop()
        for worker in self.workers:
            worker.stop()

    def resume(self) -> None:
        order = [*self.workers, None] if self._world.rng.random() < 0.5 else [None, *self.workers]
        for process in order:
            super().resume() if process is None else process.resume()

    def _tick(self) -> None:
        self._obey(self.machine.tick(self._now, self._stopped()))
        self._world.timeline.after(self.machine.watch_s, self.deliver, self._tick)

    def _look(self) -> None:
        watch, readings = self.machine.watch, self._readings()
        if watch.is_learning_due(self._now):
            accounts = {worker.id: worker.page.account for worker in self.workers}
            self._obey(self.machine.send_seen(*watch.learn(self._now, readings, accounts), now=self._now))
        self._obey(self.machine.send_seen(*watch.find_late(self._now, readings), now=self._now))
        self._world.timeline.after(watch.check_interval_s, self.deliver, self._look)

    def _answer(self, question: msg.Probe | msg.TakeStacks | msg.TakeMemory | msg.ProbeAddress) -> None:
        if isinstance(question, msg.ProbeAddress):
            self._world.after("look", self, self._probe, question)
        elif isinstance(question, msg.Probe):
            stands = self.machine.watch.list_activities(self._now, self._readings(), self._stopped())
            self._obey(self.machine.send_seen(msg.ProbeAnswer(number=question.number, stands=stands), now=self._now))
        elif isinstance(question, msg.TakeMemory):
            samples = (msg.MemorySample(ago_s=0.0, memory=len(self.workers)),)
            self._obey(self.machine.send_seen(msg.MemoryTaken(number=question.number, samples=samples), now=self._now))
        else:
            stacks = tuple(msg.WorkerStack(worker=worker.id, stack=worker.at) for worker in self.workers)
            self._obey(self.machine.send_seen(msg.Stacks(number=question.number, workers=stacks), now=self._now))

    def _probe(self, question: msg.ProbeAddress) -> None:
        """Connect to another node; a connection that is never answered gives no answer."""
        plane, other = self._world.data_plane, question.host
        blocked = plane.blocked(self.name, other)
        if (blocked is not None and not blocked.refused) or not plane.reaches(self.name, {other}):
            return
        error = "connection refused" if blocked is not None else ""
        self._obey(self.machine.send_seen(msg.AddressProbed(number=question.number, error=error), now=self._now))

    def _readings(self) -> dict[str, Reading]:
        return {
            worker.id: worker.page.read(worker.machine, self._now, stopped=worker.stopped, hung=worker.hung)
            for worker in self.workers
        }

    def _stopped(self) -> set[str]:
        return {worker.id for worker in self.workers if worker.stopped}

    def _obey(self, instructions: Iterable[ask.AgentInstruction]) -> None:
        """Execute the machine's instructions."""
        for instruction in instructions:
            match instruction:
                case ask.SendToCoordinator(message):
                    self._send(message)
                case ask.Replay(messages):
                    self._send(*messages)
                case ask.SendToWorkers(workers, order):
                    self._pass_on(workers, order)
                case ask.StartWorker(name):
                    self._replace(name)
                case ask.KillHung(name):
                    self._kill_hung(name)
                case ask.AnswerRequest(question):
                    self._answer(question)
                case ask.UpdateCheckpoints(order):
                    self.writer.obey(order)
                case ask.FetchParts() | ask.DropParts() | ask.AdmitReaders() | ask.OpenSnapshotMemory():
                    self._keep(instruction)
                case ask.Reconnect():
                    self.reconnect_to_new()
                case ask.EndAgent(exit_code):
                    # An agent that ended after a termination notice may start again.
                    self.exit_code = None if self._notice.is_given else exit_code
                    self.kill(seen=True)

    def _keep(self, work: ask.SnapshotWork) -> None:
        if isinstance(work, ask.OpenSnapshotMemory):
            self._obey(self.machine.on_memory_opened(self._keeper.opened(), self._now))
        else:
            self._keeper.obey(work)

    def _written(self, news: msg.WorkerMessage) -> None:
        """Report the outcome for a checkpoint part, even if its worker has died."""
        self._world.trace(news.worker, news)
        self._obey(self.machine.on_worker_message(news, self._now))

    # ---- workers ----

    def _pass_on(self, workers: tuple[str, ...], order: msg.Order | UnitAnswer) -> None:
        if isinstance(order, UnitAnswer):
            # All scripts are equal, so a refusal would end the job.
            if isinstance(order, UnitRefused):
                raise AssertionError(f"{', '.join(workers)} cannot form a replica group: {order.why}")
            # Simulated workers do not need the other answers.
            if isinstance(order, UnitFormed):
                self._formed(order)
            return
        for worker in [worker for worker in self.workers if worker.id in workers]:
            worker.deliver(worker.order, order)

    def _kill_hung(self, name: str) -> None:
        for worker in [worker for worker in self.workers if worker.id == name]:
            worker.kill()
            self.worker_ended(worker, -9, FailureKind.HANG)

    def _come(self, worker: SimWorker) -> None:
        """Send a worker's request to join a replica group, with the layouts of the job."""
        word = JoinUnit(worker=worker.id, layouts=self._world.plan.listed)
        self.deliver(lambda: self._obey(self.machine.on_worker_message(word, self._now)))

    def _formed(self, unit: UnitFormed) -> None:
        for worker in [worker for worker in self.workers if worker.id in unit.workers]:
            worker.take_place(unit.layout.places)
            self._world.after("pause", worker, self._begin, worker)

    def _begin(self, worker: SimWorker) -> None:
        """Build the model in the worker's script, or fail if the script cannot use this layout."""
        way = self._world.plan.fails_under(worker.places)
        if way == 0:
            worker.raised("Oops", looped=False)
        elif way == 2:
            self._kill_hung(worker.id)
        else:
            worker.attach()

    def unit_of(self, worker: str, places: int) -> SimUnit | None:
        """Return the shared memory of a worker's replica group of `places` workers, or None if it has one worker."""
        return self._units.setdefault(msg.index_of(worker) // places, SimUnit(places)) if places > 1 else None

    def _break_unit(self, worker: SimWorker) -> None:
        """End the other workers of a replica group after one has ended.

        The coordinator receives a report of each of them, or of none.
        """
        places = worker.places
        number = msg.index_of(worker.id) // places
        self._units.pop(number, None)
        others = [one for one in self.workers if one is not worker and one.places == places]
        mates = [one for one in others if msg.index_of(one.id) // places == number]
        reported = self._world.rng.random() < 0.5 if mates else True
        for mate in mates:
            mate.kill()
            self.workers.remove(mate)
            self._world.trace(mate.id, "ended with", worker.id)
            detail = f"ended with {worker.id}"
            down = msg.WorkerDown(worker=mate.id, kind=FailureKind.PROCESS_EXIT, detail=detail, exit_code=-9)
            instructions = self.machine.on_worker_ended(down, self._now, clean=False)
            self._obey([one for one in instructions if reported or one != ask.SendToCoordinator(down)])

    def _replace(self, name: str) -> None:
        """Kill the process at a worker's local rank and start another process there."""
        for worker in [worker for worker in self.workers if msg.index_of(worker.id) == msg.index_of(name)]:
            worker.kill()
            self.workers.remove(worker)
            self._break_unit(worker)
        self._world.after("restart", self, self._start_worker, name)

    def _start_worker(self, name: str) -> None:
        if name not in self.machine.workers:
            return  # All workers have been replaced since.
        worker = SimWorker(self._cluster, self, name, self._world.pid())
        self.workers.append(worker)
        self._world.add_worker(worker)
        self._world.after("start", worker, self._come if self._world.plan.layouts else SimWorker.attach, worker)

    def relay(self, worker: SimWorker, message: msg.WorkerMessage) -> None:
        """Pass a worker's message to the machine."""
        if worker in self.workers:
            self._world.trace(worker.id, message)
            self._obey(self.machine.on_worker_message(message, self._now))

    def worker_ended(self, worker: SimWorker, code: int, kind: FailureKind, final: bool = False) -> None:
        """Handle the end of a worker process."""
        self._ended(worker, msg.WorkerDown(worker=worker.id, kind=kind, detail=kind, exit_code=code, final=final))

    def worker_raised(self, worker: SimWorker, error: msg.ScriptError | None) -> None:
        """Handle a worker that ended with an exception of its script; `error` is None if it reported none."""
        kind, detail = FailureKind.EXCEPTION, f"ValueError: {error.place}" if error is not None else "exception"
        self._ended(worker, msg.WorkerDown(worker=worker.id, kind=kind, detail=detail, exit_code=1, error=error))

    def _ended(self, worker: SimWorker, down: msg.WorkerDown) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._world.trace(worker.id, "ended", down.kind)
            self._obey(self.machine.on_worker_ended(down, self._now, clean=down.exit_code == 0))
            if down.exit_code:
                self._break_unit(worker)

    # ---- the connection ----

    def connect(self) -> None:
        """Connect to the coordinator, if it is running."""
        if self._connection is not None or not self.alive:
            return
        connection = self._cluster.connect(self)
        if connection is not None:
            self._connection = connection
            wall = self._now + self._world.troubles(self.name).wall_off_s
            self._obey(self.machine.on_connected(self._now, wall=wall))
            self._obey(self._notice.repeat(self._now))

    def disconnected(self, connection: SimConnection) -> None:
        """Connect again after the connection is lost; retry without limit."""
        if connection is self._connection:
            self._connection = None
            self.machine.on_disconnected()
            self._reconnect_later()

    def reconnect_to_new(self) -> None:
        """Close the current connection, if any, and connect again."""
        if self._connection is not None:
            self._connection.close_from_below()
            self._connection = None
            self.machine.on_disconnected()
        self._reconnect_later()

    def cut(self, *, lose: bool, above_s: float, below_s: float) -> None:
        """Cut the network between this node and the coordinator."""
        if self._connection is not None:
            self._connection.cut(lose=lose, above_s=above_s, below_s=below_s)

    def _reconnect_later(self) -> None:
        self._world.after("reconnect", self, self.connect)

    def _send(self, *messages: msg.AgentMessage) -> None:
        for message in messages:
            if self._connection is not None:
                self._connection.send_up(message)

    def on_message(self, connection: SimConnection, message: msg.CoordinatorMessage) -> None:
        """Handle a message from the coordinator."""
        if connection is not self._connection:
            return
        if isinstance(message, msg.Refused) and not message.retry:
            self._cluster.checker.refused_for_good(self.name, message)
        self._obey(self.machine.on_message(message, self._now))
