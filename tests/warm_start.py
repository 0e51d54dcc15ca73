"""Scripts as processes of their own, forked from one that has imported what is heavy: no cold start for each."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from holdfast.control.link.forking import PRELOAD, Exited, Fork, Streams, ZygoteReply, start_zygote
from holdfast.control.link.framing import FrameDecoder, encode_frame
from holdfast.control.processes import end_all

#: a whole undisturbed run on a busy machine takes a minute or two
_DEADLINE_S = 300.0


@contextmanager
def zygote(preload: Sequence[str] = PRELOAD) -> Generator[str]:
    """Keep a zygote that has imported these modules; yields its socket."""
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
    """Run a script in a zygote's child, whose environment this adds to; return how it ended and what it said."""
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
