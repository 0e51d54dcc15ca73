"""A coordinator in its own process, and scripted agents."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import JobEntry
from holdfast.protocol.events import Event
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec, OutputSpec, RecoverySpec
from holdfast.protocol.messages.agent import CoordinatorMessage, FromWorker, Hello
from holdfast.protocol.messages.worker import Attach, WorkerMessage
from holdfast.protocol.names import PROTOCOL, worker_id
from places import CONTROL_SCRIPTS
from warm_start import WarmProcess

E = TypeVar("E", bound=Event)

#: Timeout for conditions that may take long on a loaded machine; no measurement depends on it.
PATIENCE_S = 60.0

_SCRIPT = CONTROL_SCRIPTS / "coordinator.py"


def commands() -> str:
    """Return the socket of the zygote that forks the coordinators; conftest.py replaces this function."""
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CoordinatorMessage)


class CoordinatorProcess:
    """Runs one coordinator, as a context manager that leaves no process behind.

    Attributes:
        entry: the address and token of the coordinator.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 1,
        allow_faults: bool = False,
        events: Path | None = None,
        recovery: RecoverySpec | None = None,
        config: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
        spec = JobSpec(
            name="j",
            max_nodes=nodes,
            output=OutputSpec(events=str(events or "")),
            recovery=recovery or RecoverySpec(),
            experiments=ExperimentSpec(allow_faults=allow_faults),
        )
        settings |= {"spec": msgspec.to_builtins(spec), "config": config or {}}
        self.log_path = folder / f"coordinator-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as log:
            self.process = WarmProcess(commands(), _SCRIPT, [json.dumps(settings)], output=subprocess.PIPE, errors=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.wait()
            raise EarlyEndError(code, self.log)
        self.entry = msgspec.json.decode(line, type=JobEntry)

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()

    @property
    def log(self) -> str:
        """The log output so far."""
        return self.log_path.read_text()

    def until_log(self, words: str) -> None:
        """Wait until the log contains these words."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.log:
            assert time.monotonic() < deadline, f"the log never contained {words!r}"
            time.sleep(0.01)

    def wait(self) -> int:
        """Wait for the coordinator to end and return its exit code."""
        code = self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def client(self) -> CoordinatorClient:
        """Return a client of the HTTP interface."""
        return CoordinatorClient(self.entry, timeout_s=PATIENCE_S)

    def until_event(self, kind: type[E]) -> E:
        """Wait for the first event of this kind."""
        with self.client() as client:
            return next(event for event in client.events(follow=True) if isinstance(event, kind))

    @contextlib.contextmanager
    def agent(self, token: str | None = None) -> Iterator[ClientConnection]:
        """Open an agent's connection without sending a message."""
        with connect(
            self.entry.url.replace("http", "ws", 1) + "/agent",
            additional_headers={"Authorization": f"Bearer {self.entry.token if token is None else token}"},
            compression=None,
            ping_interval=None,
            proxy=None,
            open_timeout=PATIENCE_S,
            close_timeout=PATIENCE_S,
        ) as connection:
            yield connection

    def raw_agent(self) -> socket.socket:
        """Open an agent's connection on a plain socket, which can break in any way; write to it with `frame`."""
        host, port = self.entry.url.removeprefix("http://").split(":")
        raw = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        raw.sendall(
            f"GET /agent HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Bearer {self.entry.token}\r\n\r\n".encode()
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += raw.recv(1)
        assert answer.startswith(b"HTTP/1.1 101 "), answer
        return raw


class EarlyEndError(Exception):
    """The coordinator ended before it was ready."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"exit code {code}: {log}")
        self.code = code
        self.log = log


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=holdfast"
    files = ["-keyout", str(key), "-out", str(cert), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=PATIENCE_S)
    return cert, key


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as a client's WebSocket frame."""
    return Frame(Opcode.BINARY, _wrapped(message)).serialize(mask=True)


def hello(node: str, **changes: Any) -> Hello:
    """Return the first message of a node with one worker."""
    fresh = Hello(protocol=PROTOCOL, job="j", node=node, session="0" * 16, term=0, agent_pid=1, workers=1, digest="d")
    return msgspec.structs.replace(fresh, **changes)


def attach(node: str) -> WorkerMessage:
    """Return the first message of a node's only worker."""
    return Attach(
        worker=worker_id(node, 0, "ab"),
        pid=2,
        host="127.0.0.1",
        state_port=1,
        config={"model": "m"},
        global_batch=8,
        micro_batches=4,
    )


def send_message(agent: ClientConnection, message: msgspec.Struct) -> None:
    """Send one message, with worker messages wrapped as an agent wraps them."""
    agent.send(_wrapped(message))


def receive_message(agent: ClientConnection) -> CoordinatorMessage:
    """Wait for the next message."""
    data = agent.recv(timeout=PATIENCE_S)
    assert isinstance(data, bytes)
    return _decoder.decode(data)


def _wrapped(message: msgspec.Struct) -> bytes:
    return _encoder.encode(FromWorker(message=message) if isinstance(message, WorkerMessage) else message)
