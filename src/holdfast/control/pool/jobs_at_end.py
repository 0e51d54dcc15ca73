"""What becomes of the jobs of a pool that a person ends: saved, stopped, or in the queue of the next one of its store.

It may take a while, and the server may be started again meanwhile, or have its store away: so it is asked until done.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast.errors import HoldfastError, RefusedError

#: how long it may take to save the jobs, and to queue those again that were queued; how often is looked
_SAVE_S = 60.0
_QUEUE_S = 60.0
_LOOK_S = 0.1
_QUEUED = ("queued", "waiting")
_LEAVING = ("suspending", "stopping")
_SUSPENDED = ("suspended", "suspending")

_log = logging.getLogger("holdfast.pool")


class Asked(Protocol):
    """What is asked of the pool; `PoolClient`'s, and as there."""

    def status(self) -> Mapping[str, Any]:
        """Return its nodes and jobs."""
        ...

    def suspend(self, name: str, *, force: bool = False) -> None:
        """Have a job saved, and leave its nodes; `force`: one that keeps no checkpoints, too."""
        ...

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        """End a job."""
        ...

    def resume(self, name: str) -> None:
        """Let a suspended job go on."""
        ...


class JobsAtEnd:
    """Asks for the jobs' ends, in a thread of its own.

    Args:
        client: speaks with the pool. hurried: whether nobody wants to wait any longer. say: prints a line for the user.
    """

    def __init__(
        self,
        client: Callable[[], contextlib.AbstractContextManager[Asked]],
        hurried: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._hurried = hurried
        self._say = say
        #: jobs that were queued when the pool was told to end, by their submission's number
        self._queued: dict[int, str] = {}

    def end(self) -> None:
        """Suspend the jobs that keep checkpoints, and stop the others that run; those that are queued do not begin."""
        self._until(self._all_end, _SAVE_S, lambda why: self._say(f"holdfast: jobs cannot be saved yet: {why}"))

    def queue_again(self) -> None:
        """Once there is no node any more, those that were queued are so again: for the next pool of this store."""
        if self._queued:
            names = ", ".join(self._queued.values())
            said = f"holdfast: what was queued ({names}) is not so again yet: "
            self._until(self._all_queued, _QUEUE_S, lambda why: self._say(f"{said}{why}"))

    def _until(self, done: Callable[[Asked], bool], within_s: float, say: Callable[[str], None]) -> None:
        """Ask until it is done, for so long at the most; the first reason why it is not yet is said."""
        until, said = time.monotonic() + within_s, ""
        with self._client() as client:
            while time.monotonic() < until and not self._hurried():
                try:
                    if done(client):
                        return
                except HoldfastError as error:
                    if not said:
                        say(str(error))
                    elif said != str(error):
                        _log.warning("the pool's jobs: %s", error)
                    said = str(error)
                time.sleep(_LOOK_S)

    def _all_end(self, client: Asked) -> bool:
        """Ask for the end of what has not been asked yet; return whether there is nothing left to wait for."""
        jobs = client.status()["jobs"]
        waiting = [job for job in jobs if job["state"] in _QUEUED]
        for job in waiting:  # (before anybody leaves a node: they would begin on it)
            self._queued[job["submission"]] = job["job"]  # (what is not answered in time may be done all the same)
            client.suspend(job["job"], force=True)
        admitted = [job for job in jobs if job["state"] == "admitted"]
        for job in admitted:
            if job["submission"] in self._queued:  # it has begun just then: what little it has done is begun anew
                client.suspend(job["job"], force=True)
            else:
                self._end_job(client, job["job"], saves=job["saves"])
        return not (waiting or admitted or any(job["state"] in _LEAVING for job in jobs))

    def _end_job(self, client: Asked, name: str, *, saves: bool) -> None:
        with contextlib.suppress(RefusedError):  # (it has just ended by itself)
            if saves:
                client.suspend(name)
                self._say(f"holdfast: job {name} is being saved; `holdfast resume -j {name}` takes it up")
            else:
                client.stop(name, now=True, why="its pool was ended, and it keeps no checkpoints")
                self._say(f"holdfast: job {name} keeps no checkpoints, and is stopped")

    def _all_queued(self, client: Asked) -> bool:
        """Queue what is suspended by now of what was queued; what somebody has stopped meanwhile keeps nobody out."""
        for job in client.status()["jobs"]:
            if job["submission"] in self._queued and job["state"] in _SUSPENDED:
                client.resume(job["job"])
        return True
