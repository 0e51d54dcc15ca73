"""The zygote of a node's next grant: it has imported what workers need by the time that the node is a job's.

It is that grant's alone, and ends with it like all that comes of it. What has imported is the node's mould, which has
nothing of any grant in it, and outlives them: it is the only process below the node's agent that may. It forks a zygote
only when it is told to, which is once everything of the grant before is gone, and says when it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket

from holdfast.control.mould import CHANGED, FORKED, READY, ZYGOTE, start_mould
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.processes import ChildProcess, is_stopped

#: a mould that takes longer than this to fork does not answer any more; another has to import everything again, which
#: takes longer still where the machine is loaded
_PATIENCE_S = 30.0
_MOST_BYTES = 64

_log = logging.getLogger("holdfast.agent")


class NextZygote:
    """Begun anew once everything of a grant is gone."""

    def __init__(self, settings: PoolNodeSettings) -> None:
        self._settings = settings
        self._mould: ChildProcess | None = None
        self._requests: socket.socket | None = None
        #: the mould has imported everything; it was asked for a zygote, and has not answered
        self._ready = self._asked = False
        self._answered = asyncio.Event()
        self._asked_at = 0.0
        #: what the next one is to begin with, until it has; and our end of its lifeline
        self._listener: socket.socket | None = None
        self._its_end = self._our_end = -1
        self._count = 0
        #: its socket, "" where there is none: then the job's agent starts one of its own
        self.path = ""

    @property
    def kept(self) -> tuple[int, ...]:
        """The pid of the process that is no grant's: a child that is waited for here."""
        return (self._mould.pid,) if self._mould is not None else ()

    def begin(self) -> None:
        """Have one; the one before has ended with its grant."""
        self._count += 1
        path = os.path.join(self._settings.folder, f"next-{self._count}.sock")
        try:
            self._offer(path)
            self._ask()
        except OSError as error:
            _log.warning("no zygote waits for the next job: %s", error)
            self._drop()
            self._end_lifeline()

    def look(self) -> None:
        """Let nobody wait for a mould that does not go on; called every now and then.

        One that is stopped goes on. One that does not answer is lost: the job's agent starts a zygote of its own.
        """
        if self._mould is None:
            return
        if is_stopped(self._mould.pid):
            self._mould.send_signal(signal.SIGCONT)
        if self._asked and asyncio.get_running_loop().time() - self._asked_at > _PATIENCE_S:
            _log.warning("the process that forks zygotes has not answered for %g s: it is given up", _PATIENCE_S)
            self._lose()

    async def end(self) -> None:
        """End it, and return once none can come any more: what it has forked is for whoever asks to end."""
        if self._asked:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), _PATIENCE_S)
            if self._asked:
                self._lose()
        self._drop()
        self._end_lifeline()

    async def close(self) -> None:
        """End the mould, and it."""
        self._lose()
        await self.end()

    def _offer(self, path: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(128)
            self._its_end, self._our_end = os.pipe()
        except OSError:
            listener.close()
            raise
        self._listener, self.path = listener, path

    def _ask(self) -> None:
        """Ask the mould, one that is started now where there is none, as soon as it can be asked.

        Raises:
            OSError: none can be started.
        """
        if self._mould is None:
            self._mould, self._requests = start_mould(self._settings.environment, self._settings.preload)
            asyncio.get_running_loop().add_reader(self._requests, self._hear)
        if not self._ready or self._listener is None:
            return
        assert self._requests is not None
        self._mould.send_signal(signal.SIGCONT)
        self._asked, self._asked_at = True, asyncio.get_running_loop().time()
        self._answered.clear()
        try:
            socket.send_fds(self._requests, [ZYGOTE], [self._listener.fileno(), self._its_end])
        except OSError:
            self._lose()

    def _hear(self) -> None:
        assert self._requests is not None
        try:
            word = self._requests.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == READY:
            self._ready = True
            self._ask()
        elif word == FORKED:
            self._asked = False
            self._drop()
            self._answered.set()
        else:
            wanted = word == CHANGED and self._listener
            self._lose(for_another=bool(wanted))

    def _lose(self, *, for_another: bool = False) -> None:
        """The mould is of no use any more; unless another is to come, whoever waits for a zygote hears of it."""
        if self._requests is not None:
            asyncio.get_running_loop().remove_reader(self._requests)
            self._requests.close()
        if self._mould is not None:
            self._mould.send_signal(signal.SIGKILL)
            self._mould.reap()
        self._mould = self._requests = None
        self._ready = self._asked = False
        self._answered.set()
        if for_another:
            with contextlib.suppress(OSError):
                self._ask()
                return
        self._drop()

    def _drop(self) -> None:
        """Let go of what a zygote begins with: it has it, or none is to."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            os.close(self._its_end)

    def _end_lifeline(self) -> None:
        path, self.path = self.path, ""
        if path:
            os.close(self._our_end)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
