"""Answers questions in a separate process, which may use a whole core without slowing down this one.

Question and answer are in memory that both processes share as a file, so neither waits for a pipe.
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

#: niceness of these processes: agents and servers, which send heartbeats, take precedence
_NICE = 10

Q = TypeVar("Q")
A = TypeVar("A")


class BackgroundSolver(Generic[Q, A]):
    """Answers one question at a time in a process.

    A new question ends the previous one. Use it within an event loop.
    """

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
        """Start no process yet.

        Args:
            module: the module with a `main` that answers the question on standard input (`answer_in_this_process`).
            answer_type: type of the answers.
            answer: called with a question and its answer, unless another question was asked meanwhile. The answer is
                None if the process could not be started, died, or took too long.
            what: name of the computation in log lines.
            within_s: returns the time limit of a question in seconds.
            log: the log for warnings.
        """
        #: the code that the process runs
        self.code = f"from {module} import main; main()"
        self._decoder = msgspec.msgpack.Decoder(answer_type)
        self._answer = answer
        self._what = what
        self._within_s = within_s
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def start(self, question: Q) -> None:
        """Answer this question from now on."""
        before, self._task = self._task, None
        self._task = asyncio.get_running_loop().create_task(self._replace(before, question))

    async def close(self) -> None:
        """End the running process."""
        task, self._task = self._task, None
        await _cancel(task)

    async def _replace(self, before: asyncio.Task[None] | None, question: Q) -> None:
        await _cancel(before)
        self._answer(question, await self._compute(question))

    async def _compute(self, question: Q) -> A | None:
        """Start a process for a question, and return its answer.

        Return None, with a warning, if it cannot be started, fails, takes too long, or its answer cannot be read.
        """
        with _shared_file("question") as question_file, _shared_file("answer") as answer_file:
            question_file.write(msgspec.msgpack.encode(question))
            question_file.seek(0)
            command = [sys.executable, "-c", self.code, str(os.getpid()), str(answer_file.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            try:
                child = ChildProcess(
                    command, environment=environment, stdin=question_file, pass_fds=(answer_file.fileno(),)
                )
            except OSError as error:
                self._log.warning("%s cannot be started: %s", self._what, error)
                return None
            if not await self._wait_for_success(child, self._within_s(question)):
                return None
            answer_file.seek(0)
            try:
                return self._decoder.decode(answer_file.read())
            except msgspec.MsgspecError as error:
                self._log.warning("the result of %s cannot be read: %s", self._what, error)
                return None

    async def _wait_for_success(self, child: ChildProcess, within_s: float) -> bool:
        """Return whether a process ends in time and with exit code 0. If not, log a warning.

        It is killed after `within_s` seconds, or when this call is cancelled.
        """
        try:
            async with asyncio.timeout(within_s):
                code = await child.wait()
        except (TimeoutError, asyncio.CancelledError) as over:
            child.send_signal(signal.SIGKILL)
            child.reap()
            if isinstance(over, asyncio.CancelledError):
                raise
            self._log.warning("%s is killed, because it has taken more than %.0f s", self._what, within_s)
            return False
        if code:
            self._log.warning("%s has ended with %s", self._what, describe_exit(code))
        return not code


async def _cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, if any, and wait for its end. Its error is ignored."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _shared_file(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(f"holdfast-{name}"), "w+b")


def answer_in_this_process(question_type: Any, solve: Callable[[Any], object]) -> None:
    """Read the question from standard input, and write the answer of `solve` to a descriptor, both in msgpack.

    The arguments of this process are the pid of its parent, and the descriptor. It runs with low priority, and ends
    with its parent.
    """
    parent, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.nice(_NICE)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=question_type)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.msgpack.encode(solve(question)))
