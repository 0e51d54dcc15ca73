"""Connections without the token: whatever their number and speed, agents still join and the log stays short."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_bench import PATIENCE_S, CoordinatorProcess, frame, hello, make_certificate, receive_message, send_message
from websockets.frames import Frame, Opcode

from holdfast.control.coordinator.http_api import MAX_WAITING
from holdfast.counted_log import INTERVAL_S
from holdfast.errors import RefusedError
from holdfast.protocol.messages.agent import Welcome
from holdfast.protocol.names import MAX_MESSAGE_BYTES

UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer wrong\r\n\r\n"
)
POST = b"POST /inject HTTP/1.1\r\nHost: x\r\n"
HEAVY = Frame(Opcode.BINARY, b"x" * (2 * MAX_MESSAGE_BYTES)).serialize(mask=True)

Connect = Callable[[CoordinatorProcess], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open connections that close at the end of the test."""
    with contextlib.ExitStack() as stack:

        def open_one(coordinator: CoordinatorProcess) -> socket.socket:
            host, port = coordinator.entry.url.split("//")[1].split(":")
            return stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))

        yield open_one


def answer(connection: socket.socket, words: bytes) -> bytes:
    """Send words, and return the received bytes until the other side closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):  # The other side may close before it has read all words.
        connection.sendall(words)
        while data := connection.recv(65536):
            received += data
    return received


def check_few_lines(coordinator: CoordinatorProcess, most: int, began: float) -> None:
    """Check that at most this many lines were logged per rate-limit interval."""
    intervals = 1 + int((time.monotonic() - began) / INTERVAL_S)
    assert len(coordinator.log.splitlines()) <= most * intervals, coordinator.log


def welcomed(coordinator: CoordinatorProcess, node: str) -> float:
    """Join as the agent of another node, and return how long it took."""
    began = time.monotonic()
    with coordinator.agent() as agent:
        send_message(agent, hello(node))
        assert isinstance(receive_message(agent), Welcome)
        return time.monotonic() - began


@pytest.mark.parametrize("words", [b"", b"GET /status HTTP/1.1\r\nX-a: "], ids=["idle", "slow"])
def test_many_unauthenticated_connections_keep_no_agent_from_joining(
    tmp_path: Path, connect: Connect, words: bytes
) -> None:
    """More connections than the limit of open files, renewed as fast as the coordinator drops them."""
    began = time.monotonic()
    with CoordinatorProcess(tmp_path, config={"lease_s": 600.0}) as coordinator, coordinator.agent() as first:
        send_message(first, hello("n0"))
        assert isinstance(receive_message(first), Welcome)
        resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for round_ in range(4):
            for _ in range(100):
                connect(coordinator).sendall(words)
            welcomed(coordinator, f"n{round_ + 1}")
        with coordinator.client() as client:
            assert "n0" in [node["node"] for node in client.status()["nodes"]]
        assert len(os.listdir(f"/proc/{coordinator.process.pid}/fd")) < 256
        check_few_lines(coordinator, 6, began)


def test_silent_connections_are_dropped_and_authenticated_ones_are_kept(tmp_path: Path, connect: Connect) -> None:
    with CoordinatorProcess(tmp_path, config={"lease_s": 600.0}) as coordinator, coordinator.agent() as agent:
        send_message(agent, hello("n0"))
        assert isinstance(receive_message(agent), Welcome)
        assert answer(connect(coordinator), b"") == b""
        assert "without the token is dropped: no token arrived within the limit of 5 s" in coordinator.log
        with coordinator.client() as client:
            assert [node["node"] for node in client.status()["nodes"]] == ["n0"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000, b"400"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 30_000, b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"401"),
        (POST + b"Content-Length: 100000000\r\n\r\n" + b"x" * 200_000, b"401"),
        (POST + b"Content-Length: 100\r\n\r\n", b"401"),
        (POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n", b"401"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", b"401"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n" * 50, b"401"),
        (UPGRADE, b"401"),
        (UPGRADE + frame(hello("n0")), b"401"),
        (UPGRADE + HEAVY, b"401"),
        (UPGRADE.replace(b"Version: 13", b"Version: 99"), b"401"),
        (UPGRADE.replace(b"websocket", b"h2c"), b"401"),
    ],
)
def test_requests_without_the_token_are_refused_immediately(
    shared: CoordinatorProcess, connect: Connect, words: bytes, status: bytes
) -> None:
    before = len(shared.log)
    received = answer(connect(shared), words)
    assert received == b"" or received.startswith(b"HTTP/1.1 " + status)
    assert received.count(b"HTTP/1.1 ") <= 1
    assert "Traceback" not in shared.log[before:]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path_factory.mktemp("shared")) as running:
        yield running


def test_loopback_metrics_allow_one_request_per_connection(shared: CoordinatorProcess, connect: Connect) -> None:
    received = answer(connect(shared), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"holdfast_" in received


def test_a_thousand_wrong_requests_cause_few_log_lines(tmp_path: Path, connect: Connect) -> None:
    began = time.monotonic()
    with CoordinatorProcess(tmp_path) as coordinator:
        for words in (UPGRADE, b"\x00\r\n\r\n", POST + b"Authorization: Bearer no\r\n\r\n", UPGRADE + HEAVY[:4096]):
            for _ in range(250):
                with connect(coordinator) as connection:
                    connection.sendall(words)
        welcomed(coordinator, "n0")
        check_few_lines(coordinator, 12, began)


def test_a_body_that_is_too_large_ends_the_connection(shared: CoordinatorProcess, connect: Connect) -> None:
    head = POST + f"Authorization: Bearer {shared.entry.token}\r\n".encode()
    received = answer(connect(shared), head + b"Content-Length: 10000000\r\n\r\n" + b"x" * 100_000)
    assert b"larger than" in received


def test_an_incomplete_body_times_out(tmp_path: Path, connect: Connect) -> None:
    with CoordinatorProcess(tmp_path, body_s=0.2) as coordinator:
        head = POST + f"Authorization: Bearer {coordinator.entry.token}\r\n".encode()
        received = answer(connect(coordinator), head + b"Content-Length: 100\r\n\r\nx")
        assert b"did not end within 0.2 s" in received


def test_connections_without_tls_are_dropped(tmp_path: Path, connect: Connect) -> None:
    began = time.monotonic()
    cert, key = make_certificate(tmp_path)
    with CoordinatorProcess(tmp_path, tls_cert=cert, tls_key=key, token="t") as coordinator:
        half = b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03"
        late = [connect(coordinator) for _ in range(2)]
        late[1].sendall(half)
        for _ in range(100):
            assert answer(connect(coordinator), b"GET / HTTP/1.1\r\n\r\n") == b""
        trusting = ssl.create_default_context(cafile=str(cert))
        with trusting.wrap_socket(connect(coordinator), server_hostname="127.0.0.1") as inside:
            assert answer(inside, UPGRADE).startswith(b"HTTP/1.1 401")
        assert [answer(connection, b"") for connection in late] == [b"", b""]
        with coordinator.client() as client:
            assert client.status()["job"] == "j"
        assert "ends without TLS" in coordinator.log
        assert "Traceback" not in coordinator.log
        check_few_lines(coordinator, 8, began)


def test_the_number_of_waiting_event_requests_is_limited(tmp_path: Path, connect: Connect) -> None:
    """Hundreds of followers with a valid token must not delay the coordinator's other work."""
    with CoordinatorProcess(tmp_path) as coordinator:
        head = f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {coordinator.entry.token}\r\n\r\n".encode()
        for number in range(MAX_WAITING):
            path = b"GET /events?after=99&wait=60&stream=1" if number % 2 else b"GET /events?after=99&wait=60"
            connect(coordinator).sendall(path + head)
        with coordinator.client() as client:
            client.status()  # The coordinator answers this after the earlier requests.
            with pytest.raises(RefusedError, match="requests wait already"):
                list(client.events(after=99, follow=True))
            assert [event.seq for event in client.events()] == [1]
            client.shutdown(7, "enough")
        assert coordinator.wait() == 7
