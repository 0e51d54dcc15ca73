"""Hundreds of nodes per process that train nothing: real agents, over real connections, with fake workers.

All messages and state come from the real machines, so that a coordinator cannot tell the difference. If the coordinator
sends the same bytes to many agents, each process decodes them once and makes one plan of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from holdfast.clock import SystemClock
from holdfast.control.agent.channel import CoordinatorChannel, OnMessage
from holdfast.control.agent.memory import MemoryReading
from holdfast.control.agent.node_agent import Agent
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.workforce import WorkforceOwner
from holdfast.control.link.framing import ToWorkerProcess
from holdfast.coordination.timing.reading import ProgressAccount, Reading
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec
from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.names import index_of
from tests.simulation.fakes.fake_look import Arrivals, Look
from tests.simulation.fakes.fake_worker import FakeModel, FakeWorker, Rendezvous
from tests.simulation.fakes.shared_messages import SharedMessages
from tests.simulation.shared_plans import SharedPlans

#: how long messages are handled before the sockets are read again
_HANDLE_S = 0.002
_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeJob:
    """A job of fake nodes, and the address of its coordinator. `micro_batches`: per step, of one sample each."""

    name: str
    url: str
    token: str
    workers_per_node: int
    micro_batches: int


# ---- in the process of the fake nodes ----


class _CountedChannel(CoordinatorChannel):
    """Counts messages and bytes. Messages are handled only after all available messages were read."""

    def __init__(self, herd: Herd, url: str, token: str, on_message: OnMessage) -> None:
        super().__init__(url, token, partial(herd.take, self, on_message), herd.messages.decode)
        self._traffic = herd.look.traffic

    def data_received(self, data: bytes) -> None:
        self._traffic.heard_bytes += len(data)
        super().data_received(data)

    def _write(self, data: bytes) -> None:
        self._traffic.said += 1
        self._traffic.said_bytes += len(data)
        super()._write(data)


class _FakeWorkforce:
    """The workers of one fake node, in its agent's process."""

    def __init__(self, herd: Herd, settings: AgentSettings, owner: WorkforceOwner) -> None:
        self._herd = herd
        self._owner = owner
        self._workers: list[FakeWorker | None] = [None] * settings.spec.workers_per_node
        self._by_name: dict[str, FakeWorker] = {}

    @property
    def workers(self) -> list[FakeWorker]:
        return [worker for worker in self._workers if worker is not None]

    async def open(self) -> None:
        pass

    async def end(self) -> None:
        self._by_name.clear()

    async def close(self) -> None:
        self._by_name.clear()

    def replace(self, worker: str) -> None:
        herd, index = self._herd, index_of(worker)
        fresh = FakeWorker(worker, herd.model, say=self._owner.on_worker_message, told=herd.told, entered=herd.entered)
        fresh.rendezvous = herd.rendezvous
        self._workers[index] = fresh
        self._by_name = {known: one for known, one in self._by_name.items() if one in self._workers}
        self._by_name[worker] = fresh
        # A real process attaches only after the agent has registered it.
        asyncio.get_running_loop().call_soon(fresh.attach)

    def pass_on(self, workers: Sequence[str], order: ToWorkerProcess) -> None:
        if isinstance(order, UnitAnswer):
            raise TypeError(f"fake workers form no replica groups: {order}")
        for worker in [self._by_name[name] for name in workers if name in self._by_name]:
            worker.order(order)

    def send_signal(self, number: int) -> None:
        pass

    def find_stopped(self) -> set[str]:
        return set()

    def readings(self, now: float, closely: Collection[str]) -> dict[str, Reading]:
        return {}

    def read_memory(self) -> MemoryReading:
        """Return an empty reading: no process holds memory."""
        return MemoryReading()

    def accounts(self) -> dict[str, ProgressAccount]:
        return {}

    def read_stacks(self) -> Awaitable[dict[str, str]]:
        return asyncio.sleep(0.0, dict[str, str]())

    def kill_hung(self, worker: str, why: str) -> None:
        pass


class FakeNode:
    """One node: its agent's task, and its current connection.

    `grant` is the number of the pool's grant under which the job has the node; 0 without a pool.
    """

    def __init__(self, herd: Herd, name: str, grant: int = 0) -> None:
        job = herd.job
        experiments = ExperimentSpec(watch=False)  # fake workers have no processes to watch
        each = job.workers_per_node
        spec = JobSpec(name=job.name, script="none.py", workers_per_node=each, experiments=experiments)
        settings = AgentSettings(
            spec=spec,
            coordinator=job.url,
            token=job.token,
            node=name,
            folder="/nonexistent",
            digest="none",
            preflight=False,
            grant=grant,
        )
        self._herd = herd
        self._channel: _CountedChannel | None = None
        self._force: _FakeWorkforce | None = None
        self.agent = Agent(settings, SystemClock(), workers=self._workforce, channel=self._connection, plans=herd.plans)
        #: done once the agent has ended on its own, or is lost
        self.task = asyncio.get_running_loop().create_task(self.agent.run())
        self.task.add_done_callback(_over)

    @property
    def workers(self) -> list[FakeWorker]:
        assert self._force is not None
        return self._force.workers

    def lose(self) -> float:
        """Lose the node at once, without a message; return when (time.monotonic)."""
        at = time.monotonic()
        if self._channel is not None:
            self._channel.abort()
        self.task.cancel()
        return at

    def _workforce(self, settings: AgentSettings, owner: WorkforceOwner, _tasks: object) -> _FakeWorkforce:
        self._force = _FakeWorkforce(self._herd, settings, owner)
        return self._force

    def _connection(self, url: str, token: str, on_message: OnMessage) -> _CountedChannel:
        self._channel = _CountedChannel(self._herd, url, token, on_message)
        return self._channel


def _over(task: asyncio.Task[Any]) -> None:
    """Raise the error of an agent or a command that has ended, if it failed."""
    if not task.cancelled():
        task.result()


class Herd:
    """All fake nodes of one process that belong to one job."""

    def __init__(self, job: FakeJob) -> None:
        self.job = job
        self.model = FakeModel(job.micro_batches)
        self.rendezvous = Rendezvous.NCCL
        self.messages = SharedMessages()
        self.plans = SharedPlans()
        self.look = Look()
        self.nodes: dict[str, FakeNode] = {}
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[_CountedChannel, OnMessage, CoordinatorMessage, float]] = deque()
        #: when the current message was read
        self._at = 0.0

    def take(self, channel: _CountedChannel, on_message: OnMessage, message: CoordinatorMessage) -> None:
        """Queue a message, so that it is handled after all available messages were read."""
        self.look.traffic.heard += 1
        if not self._waiting:
            self._loop.call_soon(self._handle)
        self._waiting.append((channel, on_message, message, time.monotonic()))

    def told(self, generation: int) -> None:
        self.look.told.setdefault(generation, Arrivals()).note(self._at)

    def entered(self, generation: int) -> None:
        self.look.entered.setdefault(generation, Arrivals()).note(time.monotonic())

    def _handle(self) -> None:
        until = time.monotonic() + _HANDLE_S
        while self._waiting and time.monotonic() < until:
            channel, on_message, message, self._at = self._waiting.popleft()
            if not channel.closed.done():
                on_message(message)
        if self._waiting:
            self._loop.call_soon(self._handle)

    # ---- commands ----

    def start(self, names: Sequence[str]) -> None:
        for name in names:
            self.nodes[name] = FakeNode(self, name)

    async def compute(self) -> None:
        await self._each(FakeWorker.compute)

    async def train(self, step: int) -> None:
        await self._each(lambda worker: worker.train(step))

    async def _each(self, act: Callable[[FakeWorker], None]) -> None:
        for node in list(self.nodes.values()):
            for worker in node.workers:
                act(worker)
            # thousands of nodes act at once, and heartbeats must not wait for the last of them
            await asyncio.sleep(0)

    def lose(self, name: str) -> float:
        return self.nodes.pop(name).lose()

    def end(self) -> None:
        for node in self.nodes.values():
            node.lose()

    def keys(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        for worker in self._workers():
            worker.rendezvous = rendezvous

    def seen(self) -> Look:
        look = self.look
        look.welcomed.clear()
        for node in self.nodes.values():
            if node.agent.machine.is_welcomed:
                term = node.agent.machine.term
                look.welcomed[term] = look.welcomed.get(term, 0) + 1
        look.processor_s = time.process_time()
        return look

    def _workers(self) -> list[FakeWorker]:
        return [worker for node in self.nodes.values() for worker in node.workers]


class Obedient(Protocol):
    """An object in a process of fakes. Its methods are the commands that the process runs."""

    def end(self) -> None:
        """Release all resources."""
        ...


def _live(make: Callable[[], Obedient], commands: Connection) -> None:
    """Run fake nodes in this process until the pipe ends, with a low priority, so that measured processes go first."""
    os.nice(5)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_obey(make, commands))


async def _obey(make: Callable[[], Obedient], commands: Connection) -> None:
    loop = asyncio.get_running_loop()
    herd, over = make(), loop.create_future()

    def command() -> None:
        try:
            name, arguments = commands.recv()
        except EOFError:
            if not over.done():
                over.set_result(None)
            return
        loop.create_task(answer(getattr(herd, name)(*arguments))).add_done_callback(_over)

    async def answer(found: Any) -> None:
        commands.send(await found if isawaitable(found) else found)

    def failed(_loop: object, context: dict[str, Any]) -> None:
        if not over.done():
            over.set_exception(context.get("exception") or RuntimeError(context["message"]))

    loop.set_exception_handler(failed)
    loop.add_reader(commands.fileno(), command)
    await over
    loop.remove_reader(commands.fileno())
    herd.end()


# ---- in the caller's process ----


class FakeProcesses:
    """Fake nodes in separate processes. Use it as a context manager, which ends all processes."""

    def __init__(self, make: Callable[[], Obedient], names: Sequence[str], *, processes: int = 2) -> None:
        """Start the processes, without any node.

        Args:
            make: Called in each process.
            names: Names of the nodes.
            processes: The number of processes that share the nodes.
        """
        self.names = list(names)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(min(processes, len(names))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_live, args=(make, theirs), name=f"fakes-{secrets.token_hex(2)}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._home = {name: place % len(self._pipes) for place, name in enumerate(self.names)}
        self.ask("seen")  # wait until the processes are up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self) -> None:
        """Start all nodes at once."""
        for place, pipe in enumerate(self._pipes):
            pipe.send(("start", ([name for name in self.names if self._home[name] == place],)))
        self._answers()

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Run a command in all processes; return their answers."""
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return self._answers()

    def ask_of(self, node: str, name: str) -> Any:
        """Run a command about a node in the process of that node; return the answer."""
        pipe = self._pipes[self._home[node]]
        pipe.send((name, (node,)))
        return pipe.recv()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


class FakeNodes(FakeProcesses):
    """The fake nodes of a job."""

    def __init__(self, job: FakeJob, names: Sequence[str], *, processes: int = 2) -> None:
        """Start the processes, as `FakeProcesses` does."""
        self.job = job
        super().__init__(partial(Herd, job), names, processes=processes)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.names) * self.job.workers_per_node

    def compute(self) -> None:
        """Make every worker compute the first micro-batch of the step in progress."""
        self.ask("compute")

    def train(self, step: int) -> None:
        """Make every worker apply this step."""
        self.ask("train", step)

    def use_keys(self, rendezvous: Rendezvous) -> None:
        """Post keys of this kind from now on."""
        self.ask("keys", rendezvous)

    def lose(self, name: str) -> float:
        """Lose a node at once, without a message; return when (time.monotonic)."""
        self.names.remove(name)
        return self.ask_of(name, "lose")

    def look(self) -> Look:
        """Return the progress of all nodes."""
        return sum(self.ask("seen"), Look())

    def until_entered(self, generation: int, *, timeout_s: float) -> Look:
        """Wait until all workers have entered a generation.

        Raises:
            TimeoutError: Some workers have not entered in time.
        """
        return self._until(lambda look: look.entered.get(generation, Arrivals()).count, self.workers, timeout_s)

    def until_welcomed(self, term: int, *, timeout_s: float) -> Look:
        """Wait until a coordinator of this term has welcomed all agents.

        Raises:
            TimeoutError: Some agents were not welcomed in time.
        """
        return self._until(lambda look: look.welcomed.get(term, 0), len(self.names), timeout_s)

    def _until(self, count: Callable[[Look], int], wanted: int, timeout_s: float) -> Look:
        deadline = time.monotonic() + timeout_s
        while count(look := self.look()) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count(look)} of {wanted} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return look
