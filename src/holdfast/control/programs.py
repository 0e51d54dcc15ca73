"""The user's own programs, run beside a job: without a shell, in a session of their own, and none of our secrets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process

from holdfast.environment import for_workers
from holdfast.errors import BadInputError

#: of what a program complains, so much is kept
_MOST_SAID = 500


class ProgramError(Exception):
    """A program has failed; the message says how."""


def check_program(option: str, command: str, *, instead: str = "") -> None:
    """Refuse what could never be run.

    Args:
        instead: what else could be given, for the complaint.

    Raises:
        BadInputError: naming the option or key, and the value.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInputError(f"{option} is {command!r}: {error}; write a program and its arguments") from None
    if not words or "\0" in command or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        raise BadInputError(f"{option} is {command!r}: there is no program {name!r}; give its path{instead}")


async def run_program(command: str, data: bytes = b"") -> None:
    """Run a program and its arguments to its end, with `data` on stdin; who gives it up ends all that it has started.

    Raises:
        ProgramError: it ended with another code than 0. OSError: it cannot be run.
    """
    words = shlex.split(command)
    process = await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=for_workers(os.environ), start_new_session=True
    )
    try:
        _, said = await asyncio.gather(_write(process, data), _read(process))
        code = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if code:
        raise ProgramError(f"{words[0]} ended with {code}: {said or 'it said nothing'}")


async def _write(process: Process, data: bytes) -> None:
    """Write what a program may or may not read."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: Process) -> str:
    """Read all that a program complains; return the end of it, on one line."""
    assert process.stderr is not None
    said = b""
    while chunk := await process.stderr.read(4096):
        said = (said + chunk)[-_MOST_SAID:]
    return " ".join(said.decode(errors="replace").split())
