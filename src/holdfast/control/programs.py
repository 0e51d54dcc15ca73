"""Runs the user's own programs, without a shell, in a separate session, and without holdfast's secrets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from asyncio.subprocess import DEVNULL
from typing import Self

from holdfast.environment import for_workers
from holdfast.errors import BadInputError

#: the most bytes of stderr that are kept
_MOST_SAID = 500
#: the most bytes in a pipe, so that one read gets all output of an ended program
_PIPE_BYTES = 1 << 20


class ProgramError(Exception):
    """A program has failed. The message says how."""


def check_program(option: str, command: str, *, instead: str = "") -> None:
    """Check that a command can be run.

    Args:
        option: the option or key, for the error.
        command: a program and its arguments.
        instead: an alternative to a program, for the error.

    Raises:
        BadInputError: it cannot. The message contains the option and the value.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInputError(f"{option} is {command!r}: {error}; write a program and its arguments") from None
    if not words or "\0" in command or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        raise BadInputError(f"{option} is {command!r}: there is no program {name!r}; give its path{instead}")


async def run_program(command: str, data: bytes = b"") -> None:
    """Run a program to its end, with `data` on stdin, and discard its stdout.

    If the caller is cancelled, kill its process group. A program may leave processes that hold its stdin and stderr
    open. So only its own end is awaited. asyncio's pipes would wait for the ends of the pipes, too, so both are created
    here.

    Raises:
        ProgramError: it ended with an exit code other than 0. The message contains the end of its stderr.
        OSError: it cannot be run.
    """
    words = shlex.split(command)
    with os.fdopen(os.memfd_create("holdfast-program"), "w+b") as given, _Stderr() as complaints:
        given.write(data)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=given,
            stdout=DEVNULL,
            stderr=complaints.theirs,
            env=for_workers(os.environ),
            start_new_session=True,
        )
        complaints.start_reading()
        try:
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        stderr = complaints.end()
    if code:
        raise ProgramError(f"{words[0]} ended with {code}: {stderr or 'it printed no error'}")


class _Stderr:
    """The last part of a program's stderr. A context manager that closes both ends of the pipe."""

    def __init__(self) -> None:
        self._read_end, self.theirs = os.pipe()
        os.set_blocking(self._read_end, False)
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self.theirs)

    def start_reading(self) -> None:
        """Read whenever data arrives, so that the program is never blocked."""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def end(self) -> str:
        """Return the last part of the output, on one line."""
        self._read()
        return " ".join(self._text.decode(errors="replace").split())

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no data
            self._text = (self._text + os.read(self._read_end, _PIPE_BYTES))[-_MOST_SAID:]
