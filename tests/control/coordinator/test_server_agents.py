"""Agents against a real coordinator process: admission, refusals, and immediate detection of failures."""

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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_bench import PATIENCE_S, CoordinatorProcess, attach, frame, hello, receive_message, send_message
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

from holdfast.control.serving import agent_channel
from holdfast.control.serving.agent_channel import AgentChannel, AgentConnection, Framer
from holdfast.control.serving.machine_shell import split_message
from holdfast.protocol.events import FailureDetected
from holdfast.protocol.job_spec import RecoverySpec
from holdfast.protocol.messages.agent import AgentMessage, FromWorker, Heartbeat, Refused, Welcome
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.plans import BeginNode
from holdfast.protocol.messages.worker import Entered
from holdfast.protocol.names import MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES
from places import CONTROL_SCRIPTS


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator for all tests that must not harm it; each test ends with a check that it still serves.

    Made-up messages may be those of a member that repeatedly joins and leaves, so it tolerates many losses of its only
    node.
    """
    patient = RecoverySpec(max_restarts=1_000)
    with CoordinatorProcess(tmp_path_factory.mktemp("shared"), recovery=patient) as coordinator:
        yield coordinator


def _lives(coordinator: CoordinatorProcess) -> bool:
    """Return whether the coordinator welcomes a new agent and answers HTTP requests."""
    with coordinator.agent() as agent:
        send_message(agent, hello(f"probe-{os.urandom(4).hex()}"))
        welcome = receive_message(agent)
    with coordinator.client() as client:
        return isinstance(welcome, Welcome) and client.status()["job"] == "j"


def _closed_for(agent: ClientConnection) -> tuple[int, str]:
    """Wait until the coordinator closes; return code and reason."""
    while True:
        try:
            agent.recv(timeout=PATIENCE_S)
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")


def test_a_slow_store_delays_replies_to_agents_but_not_the_server(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    with (
        CoordinatorProcess(tmp_path, store=f"sqlite:{store}") as coordinator,
        contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other,
        coordinator.agent() as agent,
    ):
        send_message(agent, hello("n0"))
        assert isinstance(receive_message(agent), Welcome)
        other.execute("BEGIN IMMEDIATE")
        send_message(agent, attach("n0"))
        with pytest.raises(TimeoutError):
            agent.recv(timeout=0.5)
        url, token = coordinator.entry.url, coordinator.entry.token
        answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S)
        assert "holdfast_" in answer.text
        other.execute("ROLLBACK")
        reply = receive_message(agent)
        assert isinstance(reply, BeginNode)


def test_an_agent_receives_a_welcome(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        send_message(agent, hello("n0"))
        welcome = receive_message(agent)
    assert isinstance(welcome, Welcome)
    assert (welcome.term, welcome.committed) == (1, 0)


@pytest.mark.parametrize("token", ["", "wrong", "wr\xf6ng"])
def test_an_agent_without_the_token_is_refused(shared: CoordinatorProcess, token: str) -> None:
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
        (msgspec.msgpack.encode(Heartbeat()), "not a Hello"),
        (msgspec.msgpack.encode({"type": "Hello"}), "malformed"),
        (msgspec.msgpack.encode(hello("n0")).replace(b"n0", b"n/"), "malformed"),
        (msgspec.msgpack.encode(hello("n0")).replace(b"n0", b"n\xb5"), "malformed"),
    ],
    ids=["empty", "invalid", "deep", "huge-array", "text", "heartbeat", "no-fields", "bad-name", "bad-utf8"],
)
def test_a_malformed_message_closes_only_its_connection(
    shared: CoordinatorProcess, data: bytes | str, why: str
) -> None:
    name = f"bystander-{os.urandom(4).hex()}"
    with shared.agent() as bystander, shared.agent() as agent:
        send_message(bystander, hello(name))
        assert isinstance(receive_message(bystander), Welcome)
        agent.send(data)
        code, reason = _closed_for(agent)
        assert (code, why in reason) == (1008, True), reason
        send_message(bystander, Heartbeat())
        with shared.client() as client:
            assert name in [node["node"] for node in client.status()["nodes"]]
    assert _lives(shared)


def test_an_oversized_message_closes_the_connection(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        with contextlib.suppress(ConnectionClosed):
            agent.send(b"\x00" * (MAX_MESSAGE_BYTES + 1))
        code, _ = _closed_for(agent)
        assert code in (1009, 1006)
    assert _lives(shared)


def test_a_message_of_the_maximum_size_is_accepted(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        send_message(agent, hello("large"))
        receive_message(agent)
        agent.send(b"\x00" * MAX_MESSAGE_BYTES)
        assert _closed_for(agent)[0] == 1008


def test_messages_are_read_however_the_stream_is_split(shared: CoordinatorProcess) -> None:
    name = f"cut-{os.urandom(4).hex()}"
    with shared.agent() as agent:
        greeting = Frame(Opcode.BINARY, msgspec.msgpack.encode(hello(name))).serialize(mask=True)
        beat = Frame(Opcode.BINARY, msgspec.msgpack.encode(Heartbeat())).serialize(mask=True)
        for part in (greeting[:1], greeting[1:9], greeting[9:] + beat[:3], beat[3:], beat, beat + beat):
            agent.socket.sendall(part)
            time.sleep(0.05)  # Makes the coordinator read each chunk separately.
        assert isinstance(receive_message(agent), Welcome)
        send_message(agent, hello(name))
        assert _closed_for(agent)[1] == "a second Hello"
    with shared.agent() as agent:
        send_message(agent, hello(f"cut-{os.urandom(4).hex()}"))
        assert isinstance(receive_message(agent), Welcome)
        agent.socket.sendall(Frame(Opcode.BINARY, beat[6:7], fin=False).serialize(mask=True))
        time.sleep(0.05)
        agent.socket.sendall(beat)
        assert _closed_for(agent)[0] == 1002, "a message may not begin inside another"
    assert _lives(shared)


def test_a_second_hello_closes_the_connection(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        send_message(agent, hello("twice"))
        receive_message(agent)
        send_message(agent, hello("twice"))
        assert _closed_for(agent) == (1008, "a second Hello")


def test_a_refused_agent_receives_the_reason_before_the_close(shared: CoordinatorProcess) -> None:
    with shared.agent() as agent:
        send_message(agent, hello("n0", protocol=99))
        refused = receive_message(agent)
        assert isinstance(refused, Refused)
        assert "protocol 99" in refused.why
        assert _closed_for(agent)[0] == 1000


def test_accepted_connections_have_tcp_nodelay_set(shared: CoordinatorProcess) -> None:
    """Accepted connections have TCP_NODELAY set, as the kernel reports through the coordinator's descriptors."""
    code = (
        "import os, socket, sys\n"
        "from holdfast.control.serving.listening import open_listener\n"
        "listener = open_listener('127.0.0.1', 0)\n"
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
    """Change, cut, or insert some bytes in a valid message."""
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
def test_random_messages_do_not_harm_the_coordinator(shared: CoordinatorProcess, frames: list[bytes]) -> None:
    with shared.agent() as agent, contextlib.suppress(ConnectionClosed):
        for frame in frames:
            agent.send(frame)
    assert shared.process.poll() is None, shared.log


@given(data=st.binary(max_size=2000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_on_the_port_do_not_harm_the_coordinator(shared: CoordinatorProcess, data: bytes) -> None:
    host, port = shared.entry.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass
    assert shared.process.poll() is None, shared.log


def test_the_coordinator_still_serves_after_the_fuzz_tests(shared: CoordinatorProcess) -> None:
    assert _lives(shared)
    assert "Traceback" not in shared.log


# ---- failures ----


@contextlib.contextmanager
def _generation_of(coordinator: CoordinatorProcess, names: list[str]) -> Iterator[list[ClientConnection]]:
    """Start a generation with the raw node `raw` and the nodes `names`."""
    with contextlib.ExitStack() as stack:
        agents: list[ClientConnection] = []
        for name in names:
            agents.append(stack.enter_context(coordinator.agent()))
            send_message(agents[-1], hello(name, session=os.urandom(8).hex()))
            assert isinstance(receive_message(agents[-1]), Welcome)
            send_message(agents[-1], attach(name))
        for agent in agents:
            assert isinstance(receive_message(agent), BeginNode)
        yield agents


def _next_stop(agent: ClientConnection) -> Stop:
    while True:
        message = receive_message(agent)
        if isinstance(message, Stop):
            return message


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_a_lost_connection_stops_the_other_nodes(tmp_path: Path, how: str) -> None:
    # The lease is far longer than the test's timeout, so only the end of the connection can reveal the loss.
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
here = Path(sys.argv[1])
sys.path[:0] = [str(here), str(here.parent)]
from server_bench import attach, hello, receive_message, send_message
from websockets.sync.client import connect
headers = {"Authorization": "Bearer " + sys.argv[3]}
with connect(sys.argv[2], additional_headers=headers, ping_interval=None, proxy=None) as agent:
    send_message(agent, hello("victim"))
    receive_message(agent)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_death_of_an_agent_process_is_detected_before_its_lease_expires(tmp_path: Path) -> None:
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


# ---- one connection, without a network ----


class FakeSocket:
    """A socket that accepts `room` frames and then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[bytes] = []
        self.closed: list[tuple[int, str]] = []
        self.user: Any = None
        self.is_open = True
        self.reads = True

    @property
    def is_writable(self) -> bool:
        return len(self.sent) < self.room

    def take_over(self, user: Any) -> None:
        self.user = user

    def write(self, frame: bytes) -> None:
        self.sent.append(frame)

    def pause(self) -> None:
        self.reads = False

    def resume(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.is_open = False
        self.user.on_closed(1006)

    async def close(self, code: int, reason: str) -> None:
        """Close with starlette's signature."""
        self.closed.append((code, reason))


class FakeShell:
    """Records the inputs of the machine; inputs that arrive while its gate is shut wait until it opens."""

    def __init__(self) -> None:
        self.story: list[Any] = []
        self.connection: Any = None
        self.metrics = self
        self.gate = asyncio.Event()
        self.gate.set()

    def count_refusal(self) -> None:
        self.story.append("refused")

    async def add_connection(self, number: int, connection: Any, message: Any) -> None:
        self.story.append(("hello", number))
        self.connection = connection

    def on_message(self, number: int, message: Any) -> asyncio.Future[Any] | None:
        self.story.append(message)
        return None if self.gate.is_set() else asyncio.ensure_future(self.gate.wait())

    async def remove_connection(self, number: int) -> None:
        self.story.append(("gone", number))


def _run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, PATIENCE_S))


def _connection(socket: FakeSocket, shell: FakeShell | None = None) -> AgentConnection:
    decode = msgspec.msgpack.Decoder(AgentMessage).decode
    socket.user = AgentConnection(1, shell or FakeShell(), socket, decode, Framer())  # type: ignore[arg-type]
    return socket.user


def _attend(shell: FakeShell, socket: FakeSocket, **limits: float) -> asyncio.Task[None]:
    return asyncio.create_task(AgentChannel(shell, **limits).serve_socket(socket, socket))  # type: ignore[arg-type]


def test_messages_are_sent_in_order_before_the_close() -> None:
    async def main() -> list[bytes]:
        socket = FakeSocket(room=1)
        connection = _connection(socket)
        for message in (b"1", b"2", b"3"):
            connection.send(message)
        connection.close(1000, "bye")
        connection.send(b"too late")
        assert connection.closed.done()
        for socket.room in (2, 3):
            assert not connection.empty.done()
            connection.on_writable()
        assert connection.empty.done()
        return socket.sent

    assert _run(main()) == [Framer()(message) for message in (b"1", b"2", b"3")]


def test_the_frame_of_a_shared_message_is_made_once() -> None:
    framer, message = Framer(), bytes(1000)
    assert framer(message) is framer(message)
    assert framer(message)[-1000:] == message != framer(b"another")


def test_the_largest_message_and_a_following_one_fit_into_the_queue() -> None:
    """All parts are queued before the first is sent; a fast reader must not be dropped for it."""

    async def main() -> None:
        socket = FakeSocket(room=0)
        connection = _connection(socket)
        parts = split_message(bytes(MAX_WHOLE_BYTES))
        for part in [*parts, b"stop"]:
            connection.send(part)
        socket.room = 1 << 20
        connection.on_writable()
        assert socket.is_open
        assert socket.sent == [Framer()(part) for part in [*parts, b"stop"]]

    _run(main())


def test_an_agent_that_does_not_read_is_disconnected() -> None:
    async def main() -> list[Any]:
        socket, shell = FakeSocket(room=2), FakeShell()
        serving = _attend(shell, socket)
        await asyncio.sleep(0)
        socket.user.on_message(msgspec.msgpack.encode(hello("slow")))
        while shell.connection is None:
            await asyncio.sleep(0)
        for _ in range(agent_channel.MAX_QUEUED_BYTES // MAX_MESSAGE_BYTES + 4):
            shell.connection.send(b"x" * MAX_MESSAGE_BYTES)
        await serving
        assert (len(socket.sent), socket.is_open) == (2, False)
        return shell.story

    assert _run(main()) == [("hello", 1), ("gone", 1)]


def test_closing_does_not_wait_for_an_agent_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> FakeSocket:
        monkeypatch.setattr(agent_channel, "CLOSE_FRAME_S", 0.01)
        socket, shell = FakeSocket(room=0), FakeShell()
        serving = _attend(shell, socket)
        await asyncio.sleep(0)
        socket.user.send(b"last")
        socket.user.close()
        await serving
        return socket

    assert not _run(main()).is_open


def test_a_connection_without_a_hello_is_closed() -> None:
    async def main() -> tuple[FakeSocket, list[Any]]:
        socket, shell = FakeSocket(room=2), FakeShell()
        await _attend(shell, socket, hello_timeout_s=0.01)
        return socket, shell.story

    socket, story = _run(main())
    assert socket.closed == [(1008, "no Hello in time")]
    assert "refused" in story
    assert ("hello", 1) not in story


def test_reading_pauses_while_an_earlier_message_waits_for_a_write() -> None:
    async def main() -> None:
        socket, shell = FakeSocket(room=2), FakeShell()
        serving = _attend(shell, socket)
        await asyncio.sleep(0)
        beats = [Heartbeat(generation=1, applied=(step,)) for step in range(3)]
        socket.user.on_message(msgspec.msgpack.encode(hello("n0")))
        assert socket.reads
        shell.gate.clear()
        for beat in beats:
            socket.user.on_message(msgspec.msgpack.encode(beat))
        assert not socket.reads
        socket.is_open = False
        socket.user.on_closed(1006)
        while len(shell.story) < 2:
            await asyncio.sleep(0)
        assert shell.story == [("hello", 1), beats[0]]
        shell.gate.set()
        await serving
        assert shell.story == [("hello", 1), *beats, ("gone", 1)]
        assert socket.reads

    _run(main())
