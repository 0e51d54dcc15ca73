"""A scripted coordinator, and an agent in the same event loop with real worker processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from holdfast.clock import SystemClock
from holdfast.control.agent.node_agent import Agent
from holdfast.control.agent.settings import AgentSettings
from holdfast.errors import EXIT_FAILED
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.agent import (
    AgentMessage,
    CoordinatorMessage,
    EndNode,
    FromWorker,
    Hello,
    Leave,
    ToWorker,
    Welcome,
)
from holdfast.protocol.messages.orders import Inject
from holdfast.protocol.messages.worker import Attach, WorkerMessage
from places import CONTROL_SCRIPTS

DEADLINE = 60.0
TOKEN = "t0ken"
M = TypeVar("M")


class FakeCoordinator:
    """Accepts agents, answers Hello with `welcome` (not at all if it is None), and records agent messages."""

    def __init__(self, term: int = 1) -> None:
        self.welcome: Welcome | None = Welcome(term=term, lease_s=0.3, heartbeat_s=0.02, committed=0)
        self.received: list[AgentMessage] = []
        self.hellos: list[Hello] = []
        self.url = ""
        self._changed = asyncio.Condition()
        self._connection: ServerConnection | None = None
        self._decoder = msgspec.msgpack.Decoder(AgentMessage)

    async def send(self, message: CoordinatorMessage) -> None:
        assert self._connection is not None
        await self._connection.send(msgspec.msgpack.encode(message))

    async def send_raw(self, data: bytes) -> None:
        assert self._connection is not None
        await self._connection.send(data)

    async def order(self, worker: str, key: str, value: bytes = b"") -> None:
        """Send an order to an obedient worker."""
        await self.send(ToWorker(worker=worker, order=Inject(fault=key, phase=value.hex())))

    async def make_send(self, worker: str, message: WorkerMessage) -> None:
        """Make an obedient worker send a message, and wait until it arrives."""
        await self.order(worker, "say", msgspec.msgpack.encode(message))
        await self.until(lambda: message in self.worker_messages, f"{message} to arrive")

    def drop(self) -> None:
        """Abort the connection without a close frame."""
        assert self._connection is not None
        self._connection.transport.abort()

    @property
    def worker_messages(self) -> list[WorkerMessage]:
        return [message.message for message in self.received if isinstance(message, FromWorker)]

    @property
    def attached(self) -> list[Attach]:
        """All workers that ever attached, in order; each appears once, even if its Attach was replayed."""
        found: dict[str, Attach] = {}
        for outer in self.received:
            kept = outer.kept if isinstance(outer, Hello) else (outer.message,) if isinstance(outer, FromWorker) else ()
            found |= {message.worker: message for message in kept if isinstance(message, Attach)}
        return list(found.values())

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: bool(condition())), DEADLINE)
            except TimeoutError:
                raise AssertionError(f"waited too long for {what}; received {self.received[-10:]}") from None

    async def attach(self, count: int = 1) -> list[str]:
        """Wait until this many workers have attached; return their ids."""
        await self.until(lambda: len(self.attached) >= count, f"{count} workers")
        return [message.worker for message in self.attached]

    async def serve(self, connection: ServerConnection) -> None:
        if connection.request is None or connection.request.headers.get("Authorization") != f"Bearer {TOKEN}":
            await connection.close()
            return
        self._connection = connection
        try:
            async for data in connection:
                assert isinstance(data, bytes)
                await self._on_message(connection, self._decoder.decode(data))
        except ConnectionClosed:
            pass

    async def _on_message(self, connection: ServerConnection, message: AgentMessage) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
            if self.welcome is not None:
                await connection.send(msgspec.msgpack.encode(self.welcome))
        if isinstance(message, Leave) and message.awaits_answer:
            await connection.send(msgspec.msgpack.encode(EndNode(exit_code=EXIT_FAILED, why=message.detail)))
        async with self._changed:
            self.received.append(message)
            self._changed.notify_all()


def agent_settings(
    coordinator: str, folder: Path, script: str, *args: str, workers: int = 1, **changes: object
) -> AgentSettings:
    settings = AgentSettings(
        coordinator=coordinator,
        token=TOKEN,
        spec=JobSpec(name="job", script=str(CONTROL_SCRIPTS / script), args=args, workers_per_node=workers),
        node="node-0",
        folder=str(folder),
        digest="d",
        environment=dict(os.environ),
        preload=(),
    )
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def fake_coordinator(term: int = 1, port: int = 0) -> AsyncIterator[FakeCoordinator]:
    coordinator = FakeCoordinator(term)
    async with serve(coordinator.serve, "127.0.0.1", port, compression=None, ping_interval=None) as server:
        coordinator.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield coordinator


Story = Callable[[FakeCoordinator, Agent, "asyncio.Task[int]"], Awaitable[None]]


def play(story: Story, script: str = "obedient.py", *args: str, workers: int = 1, **changes: object) -> Agent:
    """Run a test story with one agent, and check that it leaves no files or processes behind."""

    async def run() -> Agent:
        with tempfile.TemporaryDirectory(prefix="hf-") as folder:
            async with fake_coordinator() as coordinator:
                agent = Agent(
                    agent_settings(coordinator.url, Path(folder), script, *args, workers=workers, **changes),
                    SystemClock(),
                )
                running = asyncio.create_task(agent.run())
                try:
                    await asyncio.wait_for(story(coordinator, agent, running), 2 * DEADLINE)
                finally:
                    agent.end(0, "the test is over")
                    await asyncio.wait_for(running, DEADLINE)
            assert not [name for name in os.listdir(folder) if name.startswith("node-")]
            pids = {attach.pid for attach in coordinator.attached}
            assert not [pid for pid in pids if alive(pid)], "a worker is left behind"
        return agent

    return asyncio.run(run())


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"
