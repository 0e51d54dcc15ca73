"""Hundreds of pool nodes per process that train nothing: real fences and agents, with fake workers.

The launch data of a grant is requested over HTTP, as real nodes do. A grant runs one node of `fake_nodes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
import msgspec

from holdfast.clock import until_mark
from holdfast.control.agent.channel import CoordinatorChannel, open_channel
from holdfast.control.pool_node.pool_agent import BEAT_S
from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, ReportState, StartGrant
from holdfast.protocol.messages.pool import FromNode, NodeAlive, NodeGrant, PoolHello, PoolRefusal, ToNode
from holdfast.protocol.pool.launch import PooledLaunch
from tests.simulation.fakes.fake_nodes import FakeJob, FakeNode, FakeProcesses, Herd

_decoder = msgspec.msgpack.Decoder(NodeGrant | PoolRefusal)
_launches = msgspec.json.Decoder(PooledLaunch)
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class FakePoolPlace:
    """The address and the token of a pool."""

    url: str
    token: str


@dataclass(slots=True)
class PoolLook:
    """Progress of fake nodes.

    The counts are the connected nodes, all connections so far, and the nodes that each job has and has welcomed.
    """

    here: int = 0
    connections: int = 0
    has: dict[str, int] = field(default_factory=dict[str, int])
    welcomed: dict[str, int] = field(default_factory=dict[str, int])
    processor_s: float = 0.0

    def __add__(self, other: PoolLook) -> PoolLook:
        return PoolLook(
            self.here + other.here,
            self.connections + other.connections,
            {job: self.has.get(job, 0) + other.has.get(job, 0) for job in self.has | other.has},
            {job: self.welcomed.get(job, 0) + other.welcomed.get(job, 0) for job in self.welcomed | other.welcomed},
            self.processor_s + other.processor_s,
        )


class _PoolNode:
    """One node: its fence, its connection to the pool, and the fake node that runs under its grant."""

    def __init__(self, herds: _Herds, name: str) -> None:
        self._herds = herds
        self._name = name
        self._session = secrets.token_hex(8)
        self._fence = Fence()
        self._running: FakeNode | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.channel: CoordinatorChannel | None = None
        self.job = ""
        self.connections = 0

    async def live(self) -> None:
        """Connect, and again whenever the connection ends, as it does on a machine that is too slow for all nodes."""
        place = self._herds.place
        make = partial(CoordinatorChannel, decode=_decoder.decode)
        while True:
            with contextlib.suppress(OSError):  # TimeoutError too
                self.channel = await open_channel(place.url, place.token, self._hear, timeout_s=60.0, make=make)
                term, version = self._fence.record_version
                stands = self._fence.state
                hello = PoolHello(node=self._name, session=self._session, stands=stands, term=term, version=version)
                self._say(hello)
                self.connections += 1
                while not self.channel.closed.done():
                    self._say(NodeAlive())
                    await asyncio.sleep(until_mark(time.time(), BEAT_S))
            await asyncio.sleep(BEAT_S)

    def end(self) -> None:
        """End the node."""
        for task in self._tasks:
            task.cancel()
        if self._running is not None:
            self._running.lose()
        if self.channel is not None:
            self.channel.abort()

    def _say(self, message: FromNode) -> None:
        assert self.channel is not None
        self.channel.send(message)

    def _hear(self, message: ToNode) -> None:
        assert isinstance(message, NodeGrant), message
        self._obey(self._fence.on_grant(message))

    def _obey(self, instructions: Iterable[FenceInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartGrant():
                    self.job = instruction.job
                    self._soon(instruction)
                case ReapGrant():
                    if self._running is not None:
                        self._running.lose()
                case ReportState(stands):
                    self._say(stands)

    def _soon(self, start: StartGrant) -> None:
        task = asyncio.get_running_loop().create_task(self._run(start))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, start: StartGrant) -> None:
        """Run a node of the job until its agent ends, or the pool ends the grant."""
        herd = await self._herds.of(start)
        self._running = FakeNode(herd, self._name, start.grant)
        herd.nodes[self._name] = self._running
        await asyncio.wait((self._running.task,))
        herd.nodes.pop(self._name, None)
        self._running, self.job = None, ""
        self._obey(self._fence.on_reaped(start.grant))


class _Herds:
    """All fake nodes of one process."""

    def __init__(self, place: FakePoolPlace) -> None:
        self.place = place
        self._nodes: dict[str, _PoolNode] = {}
        self._herds: dict[tuple[str, int], Herd] = {}
        self._http = httpx.AsyncClient(
            base_url=place.url,
            headers={"Authorization": f"Bearer {place.token}"},
            trust_env=False,
            timeout=60.0,
            limits=httpx.Limits(max_connections=16),
        )
        self._living: list[asyncio.Task[None]] = []

    def start(self, names: Sequence[str]) -> None:
        """Start these nodes."""
        for name in names:
            node = self._nodes[name] = _PoolNode(self, name)
            self._living.append(asyncio.get_running_loop().create_task(node.live()))

    def seen(self) -> PoolLook:
        """Return the progress of all nodes."""
        look = PoolLook(processor_s=time.process_time())
        for node in self._nodes.values():
            look.here += node.channel is not None and not node.channel.closed.done()
            look.connections += node.connections
            if node.job:
                look.has[node.job] = look.has.get(node.job, 0) + 1
        for (job, _), herd in self._herds.items():
            welcomed = sum(node.agent.machine.is_welcomed for node in herd.nodes.values())
            look.welcomed[job] = look.welcomed.get(job, 0) + welcomed
        return look

    def lose(self, name: str) -> float:
        """Lose a node at once, without a message; return when (time.monotonic)."""
        self._nodes.pop(name).end()
        return time.monotonic()

    def end(self) -> None:
        """End all nodes."""
        for task in self._living:
            task.cancel()
        for node in self._nodes.values():
            node.end()

    async def of(self, start: StartGrant) -> Herd:
        """Return the herd of a grant's job. Each call requests the launch data, as each real node does."""
        launch = None
        while launch is None:
            with contextlib.suppress(httpx.TransportError):  # a kept connection may have ended meanwhile
                answer = await self._http.get(f"/jobs/{start.job}/launch")
                launch = _launches.decode(answer.raise_for_status().content)
        key = (start.job, start.submission)
        if key not in self._herds:
            url = self.place.url + launch.address
            job = FakeJob(name=start.job, url=url, token=launch.token, workers_per_node=1, micro_batches=64)
            self._herds[key] = Herd(job)
        return self._herds[key]


class FakePoolNodes(FakeProcesses):
    """The fake nodes of a pool."""

    def __init__(self, place: FakePoolPlace, names: Sequence[str], *, processes: int = 2) -> None:
        """Start the processes, as `FakeProcesses` does."""
        super().__init__(partial(_Herds, place), names, processes=processes)

    def look(self) -> PoolLook:
        """Return the progress of all nodes."""
        return sum(self.ask("seen"), PoolLook())

    def until(self, what: str, holds: Callable[[PoolLook], bool], *, timeout_s: float) -> PoolLook:
        """Wait until `holds`, called with the progress, returns true.

        Raises:
            TimeoutError: It was not true in time. The message begins with `what`.
        """
        deadline = time.monotonic() + timeout_s
        while not holds(look := self.look()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} after {timeout_s:g} s: {look}")
            time.sleep(_POLL_S)
        return look
