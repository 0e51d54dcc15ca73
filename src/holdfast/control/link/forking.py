"""The requests to a zygote (control.agent.zygote) for processes, and the start of a zygote.

An agent requests workers, and a worker requests its loader workers. The requester keeps the connection open: when it
ends, the zygote ends the processes that were requested over it.
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

#: modules that a worker needs; the runtime's own modules come last and may be missing
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
    """The first message of a requester.

    With its first byte come the stdout and stderr for its processes, as descriptors.

    A third descriptor, if any, is for the first process that it requests, and for no other.
    """


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a process that runs a script (a worker), or a module."""

    request: int
    script: Text = ""
    args: tuple[Text, ...] = ()
    #: environment variables in addition to the zygote's
    env: dict[str, Text] = {}
    cwd: Text = "/"
    #: file or pipe for stdout, or "" for the requester's
    output: Text = ""
    #: file or pipe for stderr, or "" for that of `output`
    errors: Text = ""
    #: name under which the script is found as a module, or "" if it is a file
    as_module: Text = ""
    #: if not "": run `main(descriptor)` of this module, with the requester's third descriptor, instead of a script
    module: Text = ""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Fork."""

    request: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Fork if the system cannot create another process."""

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
    """Start a zygote that listens at once; requests wait until its imports are done. It ends when its stdin is closed.

    Args:
        socket_path: its socket; the folder must be private.
        environment: the whole environment of the zygote, and so of the workers.
        remove: a folder that it removes when its stdin is closed.
        abandoned: with `remove`, the pattern of other folders that it removes then too, if their lock is free.
        preload: names of the modules to import.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path)
        listener.listen(128)
        number = str(listener.fileno())
        command = [sys.executable, "-P", "-m", "holdfast.control.agent.zygote", "--listen-fd", number]
        command += ["--preload", ",".join(preload), "--remove", remove, "--abandoned", abandoned]
        return ChildProcess(command, environment=environment, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),))


class ForkedProcess:
    """A process that a zygote forks for this one, and kills when this one ends or calls `close`."""

    def __init__(self, socket_path: str, module: str, channel: socket.socket) -> None:
        """Request the process. It starts once the zygote has done its imports.

        Args:
            module: its `main(descriptor)` is run.
            channel: the process's end of the connection to it; the process gets a copy.

        Raises:
            OSError: no zygote listens there.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)
        frames = encode_frame(Streams()) + encode_frame(Fork(request=1, module=module))
        try:
            self._connection.connect(socket_path)
            socket.send_fds(self._connection, [frames], [1, 2, channel.fileno()])
        except OSError:
            self._connection.close()
            raise

    def describe_end(self, timeout_s: float) -> str:
        """Describe how the process ended: by exit code or signal, that its zygote is gone, or why it was not forked.

        Wait at most `timeout_s` for the message of the zygote; without one, say that it is not known.
        """
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
        return "it is not known how"

    def close(self) -> None:
        """End the process if it still runs."""
        self._connection.close()


class ProcessForker:
    """Requests processes from an existing zygote, or else starts its own zygote."""

    def __init__(self, socket_path: str, preload: Sequence[str]) -> None:
        """Start no process yet.

        Args:
            socket_path: socket of an existing zygote, or "" without one.
            preload: names of the modules that an own zygote imports.
        """
        self._path = socket_path
        self._preload = tuple(preload)
        self._own: ChildProcess | None = None
        self._folder = ""

    def fork(self, module: str, channel: socket.socket) -> ForkedProcess:
        """Request a process that runs `main(descriptor)` of a module, and return it.

        If there is no zygote, or it is gone, start an own one in a temporary folder first.

        Args:
            module: name of the module.
            channel: the process's end of a connection to it; `descriptor` is a copy of it.

        Raises:
            OSError: no zygote can be started.
        """
        if self._path:
            with contextlib.suppress(OSError):  # that zygote is gone, so start an own one
                return ForkedProcess(self._path, module, channel)
        self.close()
        self._folder = tempfile.mkdtemp(prefix="holdfast-", dir=temporary_base(len("zygote.sock"), len("holdfast-")))
        self._path = f"{self._folder}/zygote.sock"
        environment = for_workers(os.environ)
        self._own = start_zygote(self._path, environment=environment, remove=self._folder, preload=self._preload)
        return ForkedProcess(self._path, module, channel)

    def close(self) -> None:
        """Kill the own zygote and the processes that it has forked, and remove its folder. Another zygote goes on."""
        own, self._own = self._own, None
        if own is not None:
            own.send_signal(signal.SIGKILL)
            own.reap()
            shutil.rmtree(self._folder, ignore_errors=True)
