"""Questions that are answered in a process of their own: they may take all of a core, and who asks none of it.

What they are told and answer lies in memory that both processes have as a file: nobody waits for a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from holdfast.control.processes import ChildProcess, describe_exit, die_with_parent

#: Whoever keeps an agent's heartbeat waits less than such a process.
_NICE = 10

Q = TypeVar("Q")
A = TypeVar("A")


class Aside(Generic[Q, A]):
    """Answers one question at a time; a new one ends the one before. Use within a loop."""

    def __init__(
        self,
        module: str,
        answer_type: Any,
        answer: Callable[[Q, A | None], None],
        *,
        what: str,
        within_s: Callable[[Q], float],
        log: logging.Logger,
    ) -> None:
        """Do nothing yet.

        Args:
            module: whose `main` answers the question on standard input (`answer_in_this_process`). answer: called with
                what comes of a question, unless another was asked meanwhile; None: the process could not be started,
                died, or took too long. what: it is called so where that is told. within_s: so long it may take.
        """
        #: what the process runs
        self.code = f"from {module} import main; main()"
        self._decoder = msgspec.msgpack.Decoder(answer_type)
        self._answer = answer
        self._what = what
        self._within_s = within_s
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def begin(self, question: Q) -> None:
        """Answer this question from now on."""
        before, self._task = self._task, None
        self._task = asyncio.get_running_loop().create_task(self._after(before, question))

    async def close(self) -> None:
        """End what is under way."""
        task, self._task = self._task, None
        await _ended(task)

    async def _after(self, before: asyncio.Task[None] | None, question: Q) -> None:
        await _ended(before)
        self._answer(question, await self._answered(question))

    async def _answered(self, question: Q) -> A | None:
        with _shared("question") as asked, _shared("answer") as answered:
            asked.write(msgspec.msgpack.encode(question))
            asked.seek(0)
            command = [sys.executable, "-c", self.code, str(os.getpid()), str(answered.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            try:
                child = ChildProcess(command, environment=environment, stdin=asked, pass_fds=(answered.fileno(),))
            except OSError as error:
                self._log.warning("%s cannot be made: %s", self._what, error)
                return None
            if not await self._ends_well(child, self._within_s(question)):
                return None
            answered.seek(0)
            try:
                return self._decoder.decode(answered.read())
            except msgspec.MsgspecError as error:
                self._log.warning("what %s has found cannot be read: %s", self._what, error)
                return None

    async def _ends_well(self, child: ChildProcess, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                code = await child.wait()
        except (TimeoutError, asyncio.CancelledError) as over:
            child.send_signal(signal.SIGKILL)
            child.reap()
            if isinstance(over, asyncio.CancelledError):
                raise
            self._log.warning("%s is ended: it has taken %.0f s", self._what, within_s)
            return False
        if code:
            self._log.warning("%s has ended with %s", self._what, describe_exit(code))
        return not code


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _shared(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(f"holdfast-{name}"), "w+b")


def answer_in_this_process(question_type: Any, solve: Callable[[Any], object]) -> None:
    """Answer the question on standard input: the arguments are the parent's pid, and where to answer."""
    parent, answer = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.nice(_NICE)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=question_type)
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.msgpack.encode(solve(question)))
