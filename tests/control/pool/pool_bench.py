"""A pool's server in its own process, and scripted nodes and clients."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import server_bench
from websockets.sync.client import ClientConnection, connect

from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import JobEntry
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import FromNode, NodeGrant, PoolHello, PoolRefusal
from places import CONTROL_SCRIPTS
from warm_start import WarmProcess

#: Timeout for conditions that may take long on a loaded machine; no measurement depends on it.
PATIENCE_S = 60.0

_SCRIPT = CONTROL_SCRIPTS / "pool.py"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeGrant | PoolRefusal)


class PoolProcess:
    """Runs one pool's server, as a context manager that leaves no process behind.

    Attributes:
        entry: the address and token of the pool.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.journals = folder / "journals"
        given = {"store": f"sqlite:{folder}/pool.db", "folder": str(self.journals), **settings}
        self.log_path = folder / f"pool-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as log:
            self.process = WarmProcess(
                server_bench.commands(),
                _SCRIPT,
                [json.dumps(given)],
                output=subprocess.PIPE,
                errors=log,
                cwd=folder,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise AssertionError(self.log)
        self.entry = msgspec.json.decode(line, type=JobEntry)

    def __enter__(self) -> PoolProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def log(self) -> str:
        """The log output so far."""
        return self.log_path.read_text()

    def client(self) -> PoolClient:
        """Return a client of the HTTP interface."""
        return PoolClient(self.entry, timeout_s=PATIENCE_S)

    def ask(self, method: str, path: str, body: object = None, *, token: str | None = None) -> httpx.Response:
        """Make a raw HTTP request, which may be invalid."""
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        shown = self.entry.token if token is None else token
        headers = {"Authorization": f"Bearer {shown}"} if shown else {}
        with httpx.Client(base_url=self.entry.url, trust_env=False, timeout=PATIENCE_S) as client:
            return client.request(method, path, content=data, headers=headers)

    def token_of(self, job: str) -> str:
        """Return the token that a job's nodes show its coordinator."""
        return self.ask("GET", f"/jobs/{job}/launch").json()["token"]

    @contextlib.contextmanager
    def node(self, *, path: str = "/agent", token: str | None = None) -> Generator[ClientConnection]:
        """Open a node's connection without sending a message."""
        with connect(
            self.entry.url.replace("http", "ws", 1) + path,
            additional_headers={"Authorization": f"Bearer {self.entry.token if token is None else token}"},
            compression=None,
            ping_interval=None,
            proxy=None,
            open_timeout=PATIENCE_S,
            close_timeout=PATIENCE_S,
        ) as connection:
            yield connection

    def connection(self) -> socket.socket:
        """Open a connection without sending anything."""
        host, port = self.entry.url.split("//")[1].split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def check_serves(self) -> None:
        """Check that the server runs, and accepts nodes and jobs as before."""
        assert self.process.poll() is None, self.log
        name = f"well-{time.monotonic_ns()}"
        with self.node() as node, self.client() as client:
            send_message(node, hello(name))
            assert isinstance(receive_message(node), NodeGrant)
            client.submit(msgspec.convert(a_job(name, max_nodes=1), JobSpec))
            assert client.job(name)["state"] in ("admitted", "queued")
            client.stop(name)
        assert "Traceback" not in self.log, self.log


def a_job(name: str, **keys: object) -> Mapping[str, object]:
    """Return the specification of a job as submitted."""
    return {"name": name, "script": "/nowhere/train.py", "min_nodes": 1, "max_nodes": 1, **keys}


def hello(node: str, session: str = "a", **changes: Any) -> PoolHello:
    """Return a node's first message."""
    return PoolHello(node=node, session=session, **changes)


def send_message(node: ClientConnection, message: FromNode) -> None:
    """Send one message."""
    node.send(_encoder.encode(message))


def receive_message(node: ClientConnection) -> NodeGrant | PoolRefusal:
    """Wait for the next message."""
    data = node.recv(timeout=PATIENCE_S)
    assert isinstance(data, bytes)
    return _decoder.decode(data)
