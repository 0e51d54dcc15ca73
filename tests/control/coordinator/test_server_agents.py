"""Agents against a real coordinator process: who is let in, what is refused, what is seen at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_bench import PATIENCE_S, CoordinatorProcess, attach, frame, hear, hello, say
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from holdfast.control.coordinator import agent_channel
from holdfast.control.coordinator.agent_channel import AgentChannel, AgentConnection
from holdfast.control.coordinator.shell import in_parts
from holdfast.protocol.events import FailureDetected
from holdfast.protocol.messages.agent import FromWorker, Heartbeat, Refused, Welcome
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.plans import BeginNode
from holdfast.protocol.messages.worker import Entered
from holdfast.protocol.names import MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES
from places import CONTROL_SCRIPTS


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator for all tests that must not harm it: each ends by seeing that it goes on."""
    with CoordinatorProcess(tmp_path_factory.mktemp("shared")) as coordinator:
        yield coordinator


def _lives(coordinator: CoordinatorProcess) -> bool:
    """A new agent is welcome, and the HTTP side answers."""
    with coordinator.agent() as agent:
        say(agent, hello(f"probe-{os.urandom(4).hex()}"))
        welcome = hear(agent)
    with coordinator.client() as client:
        return isinstance(welcome, Welcome) and client.status()["job"] == "j"


def _closed_for(agent: ClientConnection) -> tuple[int, str]:
    """Wait until the coordinator closes; return code and reason."""
    while True:
        try:
            agent.recv(timeout=PATIENCE_S)
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")


def test_a_store_that_takes_its_time_holds_up_what_is_told_and_not_the_server(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    with (
        CoordinatorProcess(tmp_path, store=f"sqlite:{store}") as coordinator,
        contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other,
        coordinator.agent() as agent,
    ):
        say(agent, hello("n0"))
        assert isinstance(hear(agent), Welcome)
        other.execute("BEGIN IMMEDIATE")
        say(agent, attach("n0"))
        with pytest.raises(TimeoutError):
            agent.recv(timeout=0.5)
        url, token = coordinator.entry.url, coordinator.entry.token
        answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=5.0)
        assert "holdfast_" in answer.text
        other.execute("ROLLBACK")
        told = hear(agent)
        assert isinstance(told, BeginNode)


def test_an_agent_is_welcome(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        say(agent, hello("n0"))
        welcome = hear(agent)
    assert isinstance(welcome, Welcome)
    assert (welcome.term, welcome.committed) == (1, 0)


@pytest.mark.parametrize("token", ["", "wrong", "wr\xf6ng"])
def test_without_the_token_nobody_gets_in(shared: CoordinatorProcess, token: str) -> None:
    with pytest.raises(InvalidStatus) as caught, shared.agent(token):
        pass
    assert caught.value.response.status_code == 401
    assert _lives(shared)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (b"\xdd\xff\xff\xff\xff", "malformed"),
        ("text", "text frame"),
        (msgspec.msgpack.encode(Heartbeat()), "no Hello"),
        (msgspec.msgpack.encode({"type": "Hello"}), "malformed"),
        (msgspec.msgpack.encode(hello("n0")).replace(b"n0", b"n/"), "malformed"),
        (msgspec.msgpack.encode(hello("n0")).replace(b"n0", b"n\xb5"), "malformed"),
    ],
    ids=["empty", "invalid", "deep", "huge-array", "text", "heartbeat", "no-fields", "bad-name", "bad-utf8"],
)
def test_what_is_malformed_closes_only_its_connection(shared: CoordinatorProcess, data: bytes | str, why: str) -> None:
    name = f"bystander-{os.urandom(4).hex()}"
    with shared.agent() as bystander, shared.agent() as agent:
        say(bystander, hello(name))
        assert isinstance(hear(bystander), Welcome)
        agent.send(data)
        code, reason = _closed_for(agent)
        assert (code, why in reason) == (1008, True), reason
        say(bystander, Heartbeat())
        with shared.client() as client:
            assert name in [node["node"] for node in client.status()["nodes"]]
    assert _lives(shared)


def test_what_is_too_large_is_not_even_buffered(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        with contextlib.suppress(ConnectionClosed):
            agent.send(b"\x00" * (MAX_MESSAGE_BYTES + 1))
        code, _ = _closed_for(agent)
        assert code in (1009, 1006)
    assert _lives(shared)


def test_the_largest_message_passes(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        say(agent, hello("large"))
        hear(agent)
        agent.send(b"\x00" * MAX_MESSAGE_BYTES)
        assert _closed_for(agent)[0] == 1008


def test_hello_is_said_once(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        say(agent, hello("twice"))
        hear(agent)
        say(agent, hello("twice"))
        assert _closed_for(agent) == (1008, "a second Hello")


def test_a_refused_agent_hears_why_before_it_is_closed(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        say(agent, hello("n0", protocol=99))
        refused = hear(agent)
        assert isinstance(refused, Refused)
        assert "protocol 99" in refused.why
        assert _closed_for(agent)[0] == 1000


def test_a_stop_is_sent_without_waiting_for_an_acknowledgement(shared: CoordinatorProcess) -> None:
    """TCP_NODELAY is set on accepted connections: ask the kernel, through the coordinator's descriptors."""
    code = (
        "import os, socket, sys\n"
        "from holdfast.control.coordinator.server import bind\n"
        "listener = bind('127.0.0.1', 0)\n"
        "client = socket.create_connection(listener.getsockname())\n"
        "listener.setblocking(True)\n"
        "accepted = listener.accept()[0]\n"
        "print(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), accepted.proto == socket.IPPROTO_TCP)\n"
        "for s in (accepted, client, listener): s.close()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert out.stdout.split() == ["1", "True"]


# ---- fuzzing ----

_valid = [
    msgspec.msgpack.encode(message)
    for message in (
        hello("fuzz", session="f" * 16),
        Heartbeat(),
        FromWorker(message=attach("fuzz")),
        FromWorker(message=Entered(worker="fuzz/0/ab", generation=1, applied=0)),
    )
]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A valid message with some bytes changed, cut, or put in."""
    data = bytearray(draw(st.sampled_from(_valid)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.sampled_from(["change", "cut", "insert"]))
        if how == "cut":
            del data[place:]
        elif how == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=9))
        elif data:
            data[place] = draw(st.integers(0, 255))
    return bytes(data)


@given(frames=st.lists(st.one_of(st.binary(max_size=300), _mutated(), st.sampled_from(_valid)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_is_sent_harms_the_coordinator(shared: CoordinatorProcess, frames: list[bytes]) -> None:
    with shared.agent() as agent, contextlib.suppress(ConnectionClosed):
        for frame in frames:
            agent.send(frame)
    assert shared.process.poll() is None, shared.log


@given(data=st.binary(max_size=2000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_comes_over_the_port_harms_the_coordinator(shared: CoordinatorProcess, data: bytes) -> None:
    host, port = shared.entry.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass
    assert shared.process.poll() is None, shared.log


def test_it_still_lives_after_all_that(shared: CoordinatorProcess) -> None:
    assert _lives(shared)
    assert "Traceback" not in shared.log


# ---- failures ----


@contextlib.contextmanager
def _generation_of(coordinator: CoordinatorProcess, names: list[str]) -> Iterator[list[ClientConnection]]:
    """Bring a raw node `raw` and nodes `names` to the point where each was told to begin."""
    with contextlib.ExitStack() as stack:
        agents: list[ClientConnection] = []
        for name in names:
            agents.append(stack.enter_context(coordinator.agent()))
            say(agents[-1], hello(name, session=os.urandom(8).hex()))
            assert isinstance(hear(agents[-1]), Welcome)
            say(agents[-1], attach(name))
        for agent in agents:
            assert isinstance(hear(agent), BeginNode)
        yield agents


def _next_stop(agent: ClientConnection) -> Stop:
    while True:
        message = hear(agent)
        if isinstance(message, Stop):
            return message


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_a_connection_that_ends_stops_the_others(tmp_path: Path, how: str) -> None:
    # The lease is far longer than the test's patience: only the end of the connection can tell.
    with CoordinatorProcess(tmp_path, nodes=3, config={"lease_s": 1000.0}) as coordinator:
        with coordinator.raw_agent() as raw:
            raw.sendall(frame(hello("a")) + frame(attach("a")))
            with _generation_of(coordinator, ["b", "c"]) as agents:
                if how == "reset":
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raw.close()
                assert [_next_stop(agent).generation for agent in agents] == [1, 1]
        failure = coordinator.until_event(FailureDetected)
        assert (failure.node, failure.kind) == ("a", "connection_lost")


_SLEEPER = """
import sys, msgspec
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from server_bench import attach, hear, hello, say
from websockets.sync.client import connect
headers = {"Authorization": "Bearer " + sys.argv[3]}
with connect(sys.argv[2], additional_headers=headers, ping_interval=None, proxy=None) as agent:
    say(agent, hello("victim"))
    hear(agent)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_death_of_an_agents_process_is_seen_without_a_lease(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, nodes=2, config={"lease_s": 1000.0}) as coordinator:
        url = coordinator.entry.url.replace("http", "ws", 1) + "/agent"
        here = str(CONTROL_SCRIPTS.parent)
        victim = subprocess.Popen(
            [sys.executable, "-c", _SLEEPER, here, url, coordinator.entry.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"ready\n"
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
        failure = coordinator.until_event(FailureDetected)
        assert (failure.node, failure.kind) == ("victim", "connection_lost")


# ---- the queue of a slow agent, without a network ----


class StuckWebSocket:
    """Takes `room` messages and then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[bytes] = []
        self.closed: list[tuple[int, str]] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send_bytes(self, data: bytes) -> None:
        if len(self.sent) >= self.room:
            await asyncio.Event().wait()
        self.sent.append(data)

    async def close(self, code: int, reason: str) -> None:
        self.closed.append((code, reason))


class FakeShell:
    """Records what reaches the machine."""

    def __init__(self) -> None:
        self.story: list[Any] = []
        self.connection: Any = None
        self.metrics = self
        self.joined = asyncio.Event()

    def refused(self) -> None:
        self.story.append("refused")

    async def add(self, number: int, connection: Any, message: Any) -> None:
        self.story.append(("hello", number))
        self.connection = connection
        self.joined.set()

    async def feed(self, event: Any) -> None:
        self.story.append(event)

    async def remove(self, number: int) -> None:
        self.story.append(("gone", number))


def _run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, PATIENCE_S))


def test_messages_leave_in_order_and_the_close_comes_last() -> None:
    async def main() -> StuckWebSocket:
        websocket = StuckWebSocket(room=100)
        connection = AgentConnection(websocket)  # type: ignore[arg-type]
        connection.send(b"1")
        writer = asyncio.create_task(connection.write())
        await asyncio.sleep(0)
        connection.send(b"2")
        connection.send(b"3")
        connection.close(1000, "bye")
        connection.send(b"too late")
        await writer
        return websocket

    websocket = _run(main())
    assert websocket.sent == [b"1", b"2", b"3"]
    assert websocket.closed == [(1000, "bye")]


def test_the_largest_message_that_there_may_be_finds_room_and_what_is_behind_it_too() -> None:
    """All of its parts are queued before the first can go: an agent that reads as fast as it can was given up."""

    async def main() -> StuckWebSocket:
        websocket = StuckWebSocket(room=1 << 20)
        connection = AgentConnection(websocket)  # type: ignore[arg-type]
        parts = in_parts(bytes(MAX_WHOLE_BYTES))
        for part in [*parts, b"stop"]:
            connection.send(part)
        connection.close()
        await connection.write()
        assert len(websocket.sent) == len(parts) + 1
        return websocket

    assert _run(main()).sent[-1] == b"stop"


def test_an_agent_that_does_not_read_is_given_up_and_blocks_nobody() -> None:
    async def main() -> list[Any]:
        websocket, shell = StuckWebSocket(room=2), FakeShell()
        serving = asyncio.create_task(AgentChannel(shell).serve(websocket))  # type: ignore[arg-type]
        websocket.incoming.put_nowait({"type": "websocket.receive", "bytes": msgspec.msgpack.encode(hello("slow"))})
        await shell.joined.wait()
        for _ in range(agent_channel.MAX_QUEUED_BYTES // MAX_MESSAGE_BYTES + 4):
            shell.connection.send(b"x" * MAX_MESSAGE_BYTES)
            await asyncio.sleep(0)
        await serving
        assert len(websocket.sent) == 2
        return shell.story

    assert _run(main())[:2] == [("hello", 1), ("gone", 1)]


def test_who_says_nothing_is_closed() -> None:
    async def main() -> tuple[StuckWebSocket, list[Any]]:
        websocket, shell = StuckWebSocket(room=2), FakeShell()
        await AgentChannel(shell, hello_timeout_s=0.01).serve(websocket)  # type: ignore[arg-type]
        return websocket, shell.story

    websocket, story = _run(main())
    assert websocket.closed == [(1008, "no Hello in time")]
    assert "refused" in story
    assert ("hello", 1) not in story
