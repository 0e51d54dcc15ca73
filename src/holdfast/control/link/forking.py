"""How a zygote (control.agent.zygote) is asked for processes, and how one is started.

An agent asks for workers, a worker for its loader workers. Whoever asks keeps the connection: when it ends, so do the
processes that were asked for over it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.control.link.framing import FrameDecoder, FrameError, encode_frame
from holdfast.control.owned_folders import temporary_base
from holdfast.control.processes import ChildProcess, describe_exit
from holdfast.environment import for_workers
from holdfast.protocol.names import Text

#: what a worker needs; the runtime's own modules come last and may be missing
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # an optimizer's first use imports it: 1 s
    "torch.utils.data",
    "holdfast.runtime.session.job",
)
_CHUNK = 1 << 12


class Streams(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A requester's first words. With their first byte come its stdout and stderr, as descriptors: its processes' too.

    A third descriptor is for the first process that it asks for, and for nobody else.
    """


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a process that runs a script: a worker.

    env: what its environment has beyond the zygote's. output: file or pipe for stdout, "" for the requester's; errors:
    for stderr, "" for the same. as_module: the name under which the script is found, "" where it is just a file.
    module: where not "", no script is run but this module's `main(descriptor)`, with the requester's third one.
    """

    request: int
    script: Text = ""
    args: tuple[Text, ...] = ()
    env: dict[str, Text] = {}
    cwd: Text = "/"
    output: Text = ""
    errors: Text = ""
    as_module: Text = ""
    module: Text = ""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Fork."""

    request: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Fork where the system has no process left to give."""

    request: int
    why: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process of this requester ended; a negative code is a signal."""

    pid: int
    code: int


ZygoteReply = Forked | ForkFailed | Exited


def start_zygote(
    socket_path: str,
    *,
    environment: Mapping[str, str],
    remove: str = "",
    abandoned: str = "",
    preload: Sequence[str] = PRELOAD,
) -> ChildProcess:
    """Start a zygote that listens at once; requests wait there until its imports are done.

    Args:
        socket_path: where it listens; the folder must be private.
        environment: the whole environment of the zygote, and so of the workers.
        remove: a folder that it removes when whoever holds its stdin has gone.
        abandoned: with `remove`, the pattern of folders that it removes then, too, if their lock is free.
        preload: names of modules to import.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path)
        listener.listen(128)
        number = str(listener.fileno())
        command = [sys.executable, "-P", "-m", "holdfast.control.agent.zygote", "--listen-fd", number]
        command += ["--preload", ",".join(preload), "--remove", remove, "--abandoned", abandoned]
        return ChildProcess(command, environment=environment, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),))


class ForkedProcess:
    """A process that a zygote forks for this one, and kills when this one ends, or closes it."""

    def __init__(self, socket_path: str, module: str, channel: socket.socket) -> None:
        """Ask for it; it comes once the zygote has imported what it is to import.

        Args:
            module: its `main(descriptor)` is run.
            channel: the process's end of the connection to it; it gets a copy.

        Raises:
            OSError: no zygote listens there.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)
        words = encode_frame(Streams()) + encode_frame(Fork(request=1, module=module))
        try:
            self._connection.connect(socket_path)
            socket.send_fds(self._connection, [words], [1, 2, channel.fileno()])
        except OSError:
            self._connection.close()
            raise

    def how_it_ended(self, timeout_s: float) -> str:
        """Say how it has ended, waiting for the zygote's word for so long at the most."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError, FrameError):
            while select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                data = self._connection.recv(_CHUNK)
                if not data:
                    return "its zygote is gone"
                for reply in self._decoder.feed(data):
                    if isinstance(reply, Exited):
                        return describe_exit(reply.code)
                    if isinstance(reply, ForkFailed):
                        return f"it could not be forked: {reply.why}"
        return "nobody knows how"

    def close(self) -> None:
        """End it, where it has not ended."""
        self._connection.close()


class ProcessSupply:
    """Has processes forked: by the zygote that is there, or, without one, by one of its own."""

    def __init__(self, socket_path: str, preload: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            socket_path: of the zygote that is there, "" for none.
            preload: names of modules that one of its own imports.
        """
        self._path = socket_path
        self._preload = tuple(preload)
        self._own: ChildProcess | None = None
        self._folder = ""

    def fork(self, module: str, channel: socket.socket) -> ForkedProcess:
        """As `ForkedProcess`, whose arguments these are.

        Raises:
            OSError: no zygote can be started.
        """
        if self._path:
            with contextlib.suppress(OSError):  # that zygote is gone
                return ForkedProcess(self._path, module, channel)
        self.close()
        self._folder = tempfile.mkdtemp(prefix="holdfast-", dir=temporary_base(len("zygote.sock"), len("holdfast-")))
        self._path = f"{self._folder}/zygote.sock"
        environment = for_workers(os.environ)
        self._own = start_zygote(self._path, environment=environment, remove=self._folder, preload=self._preload)
        return ForkedProcess(self._path, module, channel)

    def close(self) -> None:
        """End the zygote of its own, and with it what that has forked."""
        own, self._own = self._own, None
        if own is not None:
            own.send_signal(signal.SIGKILL)
            own.reap()
            shutil.rmtree(self._folder, ignore_errors=True)
