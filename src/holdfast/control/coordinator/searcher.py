"""Searches for placements, in a process of their own: they may take all of a core, and the coordinator none of it.

What they are told and answer lies in memory that both processes have as a file: nobody waits for a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from holdfast.control.processes import ChildProcess, describe_exit, die_with_parent
from holdfast.coordination.experts.searching import Found, Search
from holdfast.coordination.inputs import Planned

_log = logging.getLogger("holdfast.coordinator")

#: Whoever keeps an agent's heartbeat waits less than a search.
_NICE = 10
_MAIN = "from holdfast.control.coordinator.searcher import main; main()"


class Searcher:
    """Makes one search at a time; a new one ends the one before. Use within a loop."""

    def __init__(self, answer: Callable[[Planned], None]) -> None:
        """Do nothing yet.

        Args:
            answer: called with what comes of a search, unless another one was begun meanwhile.
        """
        self._answer = answer
        self._task: asyncio.Task[None] | None = None

    def begin(self, search: Search) -> None:
        """Make this search from now on."""
        before, self._task = self._task, None
        self._task = asyncio.get_running_loop().create_task(self._after(before, search))

    async def close(self) -> None:
        """End the search that is under way."""
        task, self._task = self._task, None
        await _ended(task)

    async def _after(self, before: asyncio.Task[None] | None, search: Search) -> None:
        await _ended(before)
        found = await _found_in_a_process(search)
        self._answer(Planned(search.generation, found))


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _found_in_a_process(search: Search) -> Found | None:
    """Return what a process of its own makes of a search; None where it cannot be started, dies, or never ends."""
    with _shared("question") as question, _shared("answer") as answer:
        question.write(msgspec.msgpack.encode(search))
        question.seek(0)
        command = [sys.executable, "-c", _MAIN, str(os.getpid()), str(answer.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            child = ChildProcess(command, environment=environment, stdin=question, pass_fds=(answer.fileno(),))
        except OSError as error:
            _log.warning("no search for a placement of the experts can be made: %s", error)
            return None
        try:
            async with asyncio.timeout(search.within_s):
                code = await child.wait()
        except (TimeoutError, asyncio.CancelledError) as over:
            child.send_signal(signal.SIGKILL)
            child.reap()
            if isinstance(over, asyncio.CancelledError):
                raise
            _log.warning("the search for a placement of the experts is ended: it has taken %.0f s", search.within_s)
            return None
        if code:
            _log.warning("the search for a placement of the experts has ended with %s", describe_exit(code))
            return None
        answer.seek(0)
        try:
            return msgspec.msgpack.decode(answer.read(), type=Found | None)
        except msgspec.MsgspecError as error:
            _log.warning("what the search for a placement of the experts has found cannot be read: %s", error)
            return None


def _shared(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(f"holdfast-{name}"), "w+b")


def main() -> None:
    """Make the search on standard input, in a process of its own: its parent's pid, and where to answer."""
    parent, answer = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.nice(_NICE)
    search = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Search)
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.msgpack.encode(search.solve()))
