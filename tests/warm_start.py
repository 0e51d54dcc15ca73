"""Scripts as separate processes, forked from a process with the expensive imports, without cold starts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from holdfast.control.link.forking import PRELOAD, Exited, Fork, Forked, Streams, ZygoteReply, start_zygote
from holdfast.control.link.framing import FrameDecoder, encode_frame
from holdfast.control.processes import ProcessHandle, end_all

#: A whole undisturbed run on a busy machine takes a minute or two.
_DEADLINE_S = 300.0

#: The imports of commands, servers, and the processes that they start, except workers; the first ones are lazy imports.
COMMANDS = (
    "anyio._backends._asyncio",
    "httpcore",
    "pydantic.type_adapter",
    "uvicorn.lifespan.off",
    "holdfast.cli",
    "holdfast.control.agent.node_agent",
    "holdfast.control.coordinator.placement_search_process",
    "holdfast.control.coordinator.server",
    "holdfast.control.launch.children",
    "holdfast.control.pool.pool_server",
)


@contextmanager
def zygote(preload: Sequence[str] = PRELOAD) -> Generator[str]:
    """Run a zygote that has imported these modules; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path = f"{folder}/zygote.sock"
        child = start_zygote(path, environment={**os.environ, "OMP_NUM_THREADS": "1"}, preload=preload)
        yield path
        assert child.stdin is not None
        child.stdin.close()
        asyncio.run(end_all([child], grace_s=5.0))
        child.reap()


def run_warm(
    socket_path: str, script: Path, *args: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in a zygote's child with additional environment variables; return its exit code and output."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.settimeout(_DEADLINE_S)
        connection.connect(socket_path)
        socket.send_fds(connection, [encode_frame(Streams())], [out.fileno(), err.fileno()])
        fork = Fork(request=1, script=str(script), args=args, env=dict(environment or {}), cwd=os.getcwd())
        connection.sendall(encode_frame(fork))
        code = _exit_code(connection)
        return subprocess.CompletedProcess(args, code, _whole(out), _whole(err))


def _exit_code(connection: socket.socket) -> int:
    decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)
    while data := connection.recv(4096):
        for reply in decoder.feed(data):
            if isinstance(reply, Exited):
                return reply.code
    raise AssertionError("the zygote is gone")


def _whole(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


class WarmProcess:
    """A script in a zygote's child, with the subprocess.Popen interface that tests use; it ends with this process."""

    def __init__(
        self,
        socket_path: str,
        script: Path,
        args: Sequence[str],
        *,
        output: IO[bytes] | int,
        errors: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start the script.

        Args:
            output: its stdout; with subprocess.PIPE, the attribute `stdout`.
            errors: its stderr; None for the same as stdout.
            environment: variables in addition to the zygote's.
            cwd: its working directory; None for this process's own.
        """
        if isinstance(output, int):
            ours, its = os.pipe()
            self.stdout: IO[bytes] | None = os.fdopen(ours, "rb")
        else:
            self.stdout, its = None, os.dup(output.fileno())
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_DEADLINE_S)
        self._connection.connect(socket_path)
        streams = [its, its if errors is None else errors.fileno()]
        socket.send_fds(self._connection, [encode_frame(Streams())], streams)
        os.close(its)
        where = os.getcwd() if cwd is None else str(cwd)
        fork = Fork(request=1, script=str(script), args=tuple(args), env=dict(environment or {}), cwd=where)
        self._connection.sendall(encode_frame(fork))
        first, *more = self._heard()
        assert isinstance(first, Forked), first
        self.pid = first.pid
        self._handle = ProcessHandle(self.pid)
        threading.Thread(target=self._hear, args=(more,), name="warm process", daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code, or None while the script runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the script has ended.

        Raises:
            subprocess.TimeoutExpired: the script has not ended within the timeout.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        assert self.returncode is not None, "the zygote is gone"
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the script still runs."""
        self._handle.send_signal(number)

    def kill(self) -> None:
        """Kill the script immediately."""
        self.send_signal(signal.SIGKILL)

    def _heard(self) -> list[ZygoteReply]:
        data = self._connection.recv(4096)
        assert data, "the zygote is gone"
        return list(self._decoder.feed(data))

    def _hear(self, replies: Sequence[ZygoteReply]) -> None:
        self._connection.settimeout(None)
        try:
            while not (ended := [reply for reply in replies if isinstance(reply, Exited)]):
                replies = self._heard()
            self.returncode = ended[0].code
        finally:
            self._ended.set()
            self._connection.close()
