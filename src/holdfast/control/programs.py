"""The user's own programs, run beside a job: without a shell, in a session of their own, and none of our secrets."""

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

#: of what a program complains, so much is kept
_MOST_SAID = 500
#: a pipe holds no more: all that was said before a program ended is read at once
_PIPE_BYTES = 1 << 20


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

    What it leaves running may hold its stdin and stderr open: only its own end is waited for, so both are ours, not
    asyncio's, which waits for the ends of pipes, too.

    Raises:
        ProgramError: it ended with another code than 0. OSError: it cannot be run.
    """
    words = shlex.split(command)
    with os.fdopen(os.memfd_create("holdfast-program"), "w+b") as given, _Complaints() as complaints:
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
        complaints.begin()
        try:
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        said = complaints.end()
    if code:
        raise ProgramError(f"{words[0]} ended with {code}: {said or 'it said nothing'}")


class _Complaints:
    """The end of what a program writes to its stderr; a context manager that closes both ends of the pipe."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._said = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)

    def begin(self) -> None:
        """Read on whenever there is something, so that the program never waits for us."""
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def end(self) -> str:
        """Return the end of all that was said, on one line."""
        self._read()
        return " ".join(self._said.decode(errors="replace").split())

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):  # (nothing is there)
            self._said = (self._said + os.read(self._ours, _PIPE_BYTES))[-_MOST_SAID:]
