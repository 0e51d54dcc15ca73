"""The zygote of a node's next grant: it has imported what workers need by the time that the node is a job's.

It is that grant's alone, and ends with it like all that comes of it: so the fence needs no exception.
"""

from __future__ import annotations

import contextlib
import logging
import os

from holdfast.control.link.forking import start_zygote
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.processes import ChildProcess, end_all

_log = logging.getLogger("holdfast.agent")


class NextZygote:
    """Begun anew once everything of a grant is gone."""

    def __init__(self, settings: PoolNodeSettings) -> None:
        self._settings = settings
        self._process: ChildProcess | None = None
        self._count = 0
        #: its socket, "" where there is none: then the job's agent starts one of its own
        self.path = ""

    @property
    def awaited(self) -> tuple[int, ...]:
        """The pid of a child that is waited for here."""
        return (self._process.pid,) if self._process is not None else ()

    def begin(self) -> None:
        """Start one; the one before has ended with its grant."""
        if self._process is not None:
            self._process.reap()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self._count += 1
        path = os.path.join(self._settings.folder, f"next-{self._count}.sock")
        try:
            self._process, self.path = start_zygote(path, environment=self._settings.environment), path
        except OSError as error:
            _log.warning("no zygote waits for the next job: %s", error)
            self._process, self.path = None, ""

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            await end_all([self._process], grace_s=1.0)
            self._process.reap()
            self._process = None
