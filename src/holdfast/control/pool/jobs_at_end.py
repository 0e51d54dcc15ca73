"""Saves, stops or queues the jobs of a pool that a person ends.

That may take long, and the server may restart meanwhile, or wait for its store. So the requests are repeated.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast.errors import HoldfastError, RefusedError

#: seconds that saving all jobs may take, and queueing them again; seconds between two attempts
_SAVE_S = 60.0
_QUEUE_S = 60.0
_POLL_S = 0.1
_QUEUED = ("queued", "waiting")
_LEAVING = ("suspending", "stopping")
_SUSPENDED = ("suspended", "suspending")

_log = logging.getLogger("holdfast.pool")


class EndablePool(Protocol):
    """The methods of `PoolClient` that are used here."""

    def status(self) -> Mapping[str, Any]:
        """Return the nodes and jobs of the pool."""
        ...

    def suspend(self, name: str, *, force: bool = False) -> None:
        """Save a job, and release its nodes. With `force` also a job that keeps no checkpoints."""
        ...

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        """End a job."""
        ...

    def resume(self, name: str) -> None:
        """Resume a suspended job."""
        ...


class JobsAtEnd:
    """Ends the jobs of a pool, in a separate thread.

    Args:
        client: connects to the pool.
        hurried: returns whether to stop waiting.
        say: prints a line for the user.
    """

    def __init__(
        self,
        client: Callable[[], contextlib.AbstractContextManager[EndablePool]],
        hurried: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._hurried = hurried
        self._say = say
        #: jobs that were queued when the end of the pool was requested, by submission number
        self._queued: dict[int, str] = {}

    def end(self) -> None:
        """Suspend the jobs that keep checkpoints, and stop the other running ones.

        Suspend queued jobs first, so that they do not start. Return when all have ended, after `_SAVE_S` at the latest.
        """
        self._repeat_until(self._end_all, _SAVE_S, lambda why: self._say(f"holdfast: jobs cannot be saved yet: {why}"))

    def queue_again(self) -> None:
        """Queue the jobs that `end` has found queued, for the next pool of this store.

        Call it after the nodes have ended. It tries for `_QUEUE_S` seconds, and prints the first error of holdfast
        instead of raising it.
        """
        if self._queued:
            names = ", ".join(self._queued.values())
            prefix = f"holdfast: queued jobs ({names}) could not be queued again yet: "
            self._repeat_until(self._queue_all, _QUEUE_S, lambda why: self._say(f"{prefix}{why}"))

    def _repeat_until(self, done: Callable[[EndablePool], bool], within_s: float, say: Callable[[str], None]) -> None:
        """Call `done` with a client until it returns True, for at most `within_s`, or until the user is in a hurry.

        Print the first error of holdfast with `say`, and log later ones that differ.
        """
        until, reported = time.monotonic() + within_s, ""
        with self._client() as client:
            while time.monotonic() < until and not self._hurried():
                try:
                    if done(client):
                        return
                except HoldfastError as error:
                    if not reported:
                        say(str(error))
                    elif reported != str(error):
                        _log.warning("the pool's jobs: %s", error)
                    reported = str(error)
                time.sleep(_POLL_S)

    def _end_all(self, client: EndablePool) -> bool:
        """Suspend the queued jobs and remember them; suspend running jobs that save checkpoints, and stop the others.

        A job that has started after it was remembered is only suspended. Return whether no job was queued, running or
        ending when this was called.
        """
        jobs = client.status()["jobs"]
        waiting = [job for job in jobs if job["state"] in _QUEUED]
        for job in waiting:  # first, because otherwise they would start on the freed nodes
            self._queued[job["submission"]] = job["job"]  # a request without an answer in time may still take effect
            client.suspend(job["job"], force=True)
        admitted = [job for job in jobs if job["state"] == "admitted"]
        for job in admitted:
            if job["submission"] in self._queued:  # it has just started, so little work is lost
                client.suspend(job["job"], force=True)
            else:
                self._end_job(client, job["job"], saves=job["saves"])
        return not (waiting or admitted or any(job["state"] in _LEAVING for job in jobs))

    def _end_job(self, client: EndablePool, name: str, *, saves: bool) -> None:
        """Suspend a running job that saves checkpoints, or else stop it at once, and print that.

        Ignored if it has just ended.
        """
        with contextlib.suppress(RefusedError):  # the job has just ended
            if saves:
                client.suspend(name)
                self._say(f"holdfast: job {name} is being saved; `holdfast resume -j {name}` continues it")
            else:
                client.stop(name, now=True, why="its pool was ended, and it keeps no checkpoints")
                self._say(f"holdfast: job {name} keeps no checkpoints, and is stopped")

    def _queue_all(self, client: EndablePool) -> bool:
        """Resume the suspended jobs that were queued before, and return True.

        Jobs that were stopped meanwhile are left out.
        """
        for job in client.status()["jobs"]:
            if job["submission"] in self._queued and job["state"] in _SUSPENDED:
                client.resume(job["job"])
        return True
