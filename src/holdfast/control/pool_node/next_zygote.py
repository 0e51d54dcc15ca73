"""The zygote of a node's next grant. It has imported the modules of workers before the node is granted to a job.

It belongs to that grant alone, and ends with it like all its processes. The imports are done by the node's process
template, which contains nothing of any grant and outlives them. It is the only process below the node's agent that may.
It forks a zygote only on request, after all processes of the previous grant have ended, and reports when it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket

from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.process_template import CHANGED, FORKED, READY, ZYGOTE, start_template
from holdfast.control.processes import ChildProcess, is_stopped

#: seconds after which a process template that has not forked counts as hung. A new one repeats all imports, which takes
#: longer still on a loaded machine
_FORK_TIMEOUT_S = 30.0
_MOST_BYTES = 64

_log = logging.getLogger("holdfast.agent")


class NextZygote:
    """The zygote for the next grant. A new one is created once all processes of a grant have ended."""

    def __init__(self, settings: PoolNodeSettings) -> None:
        self._settings = settings
        self._template: ChildProcess | None = None
        self._channel: socket.socket | None = None
        #: whether the template has done its imports, and whether it has an unanswered request
        self._ready = self._requested = False
        self._answered = asyncio.Event()
        self._requested_at = 0.0
        #: the listener and the lifeline for the next zygote, until it has them; and our end of the lifeline
        self._listener: socket.socket | None = None
        self._zygote_lifeline = self._own_lifeline = -1
        self._count = 0
        #: path of its socket, or "" without one: then the job's agent starts its own zygote
        self.path = ""

    @property
    def template_pids(self) -> tuple[int, ...]:
        """The pid of the template, which belongs to no grant and is awaited here."""
        return (self._template.pid,) if self._template is not None else ()

    def prepare(self) -> None:
        """Open a new socket, and request a zygote that listens there. The previous one has ended with its grant.

        If that fails, warn; `path` is then "".
        """
        self._count += 1
        path = os.path.join(self._settings.folder, f"next-{self._count}.sock")
        try:
            self._open_listener(path)
            self._request()
        except OSError as error:
            _log.warning("no zygote could be prepared for the next job, which will start more slowly: %s", error)
            self._close_listener()
            self._end_lifeline()

    def check(self) -> None:
        """Continue a stopped template, and kill one that has not forked for `_FORK_TIMEOUT_S`. Called periodically."""
        if self._template is None:
            return
        if is_stopped(self._template.pid):
            self._template.send_signal(signal.SIGCONT)
        if self._requested and asyncio.get_running_loop().time() - self._requested_at > _FORK_TIMEOUT_S:
            _log.warning("the process template has not forked a zygote for %g s, so it is killed", _FORK_TIMEOUT_S)
            self._drop_template()

    async def end(self) -> None:
        """End the zygote and remove its socket. The caller ends the processes that it has forked.

        First wait for the answer to a pending request; after `_FORK_TIMEOUT_S`, kill the template, so that no zygote
        can start later.
        """
        if self._requested:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), _FORK_TIMEOUT_S)
            if self._requested:
                self._drop_template()
        self._close_listener()
        self._end_lifeline()

    async def close(self) -> None:
        """End the template, and the zygote."""
        self._drop_template()
        await self.end()

    def _open_listener(self, path: str) -> None:
        """Listen at a path for the next zygote, and create its lifeline. Raises OSError if that fails."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(128)
            self._zygote_lifeline, self._own_lifeline = os.pipe()
        except OSError:
            listener.close()
            raise
        self._listener, self.path = listener, path

    def _request(self) -> None:
        """Start a template if there is none. If it is ready and a listener is open, request a zygote from it.

        If the request cannot be sent, the template is dropped.

        Raises:
            OSError: no template can be started.
        """
        if self._template is None:
            self._template, self._channel = start_template(self._settings.environment, self._settings.preload)
            asyncio.get_running_loop().add_reader(self._channel, self._on_message)
        if not self._ready or self._listener is None:
            return
        assert self._channel is not None
        self._template.send_signal(signal.SIGCONT)
        self._requested, self._requested_at = True, asyncio.get_running_loop().time()
        self._answered.clear()
        try:
            socket.send_fds(self._channel, [ZYGOTE], [self._listener.fileno(), self._zygote_lifeline])
        except OSError:
            self._drop_template()

    def _on_message(self) -> None:
        """Read a message of the template. `READY`: send a pending request. `FORKED`: the zygote has started.

        Anything else, also the end of the connection: drop the template. After `CHANGED`, another template is started
        if a zygote is wanted.
        """
        assert self._channel is not None
        try:
            message = self._channel.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message == READY:
            self._ready = True
            self._request()
        elif message == FORKED:
            self._requested = False
            self._close_listener()
            self._answered.set()
        else:
            wanted = message == CHANGED and self._listener
            self._drop_template(for_another=bool(wanted))

    def _drop_template(self, *, for_another: bool = False) -> None:
        """Kill the process template, and release those who wait for its answer. A zygote that it has forked lives on.

        The listener of the next zygote is closed, unless `for_another` and a new template can be started.

        Args:
            for_another: whether to start a new template for the pending request.
        """
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
        if self._template is not None:
            self._template.send_signal(signal.SIGKILL)
            self._template.reap()
        self._template = self._channel = None
        self._ready = self._requested = False
        self._answered.set()
        if for_another:
            with contextlib.suppress(OSError):
                self._request()
                return
        self._close_listener()

    def _close_listener(self) -> None:
        """Close the listener and lifeline for a zygote: it has its copies, or none will start."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            os.close(self._zygote_lifeline)

    def _end_lifeline(self) -> None:
        """End the zygote by closing our end of its lifeline, and remove its socket. Ignored if there is none."""
        path, self.path = self.path, ""
        if path:
            os.close(self._own_lifeline)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
