"""Where given-up groups wait for their operations to end, and are destroyed out of the training thread's way.

Freeing a group whose operations are still under way would block (gloo joins its threads) or free memory that is still
being written to. So a group is buried together with its operations and their buffers, and destroyed (about 10 ms per
rank) once they have all ended: because the sockets were severed, or by the operation's own timeout.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger(__name__)

FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.05


class AbandonedGroup(Protocol):
    """A group with what it still needs."""

    def has_ended(self) -> bool:
        """Return whether all its operations have ended; never blocks."""
        ...

    def destroy(self) -> None:
        """Free everything. May take a while. Called once, after `ended`."""
        ...


class _Entry:
    __slots__ = ("group", "not_before")

    def __init__(self, remains: AbandonedGroup, not_before: float) -> None:
        self.group = remains
        #: on the monotonic clock, seconds
        self.not_before = not_before

    def is_due(self) -> bool:
        return time.monotonic() >= self.not_before and self.group.has_ended()


class GroupReaper:
    """Owns the retired groups of one worker, and the thread that destroys them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self.added = 0

    @property
    def size(self) -> int:
        """How many groups are not destroyed yet."""
        with self._changed:
            return len(self._entries)

    def add(self, remains: AbandonedGroup, *, linger_s: float = 0.0) -> None:
        """Take over a group; returns at once. The caller must drop its own references. After `close`: kept for ever.

        Args:
            remains: what to destroy once it has ended.
            linger_s: but not before this time (seconds) has passed, or `close` is called.
        """
        with self._changed:
            self.added += 1
            grave = _Entry(remains, time.monotonic() + linger_s)
            self._entries.append(grave)
            if self._closing:
                _never_free(grave)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-reaper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until everything is destroyed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout=deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Destroy what has ended within the deadline (seconds), end the thread, and return whether nothing is left.

        What is left is never freed: freeing it at interpreter exit would block until its operations time out.
        """
        with self._changed:
            for grave in self._entries:
                grave.not_before = 0.0
            self._changed.notify_all()
        self.wait_empty(deadline_s)
        with self._changed:
            self._closing = True
            for grave in self._entries:
                _never_free(grave)
            empty = not self._entries
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        return empty

    def _run(self) -> None:
        look = FIRST_POLL_S
        while True:
            with self._changed:
                if self._closing:
                    return
                if not self._entries:
                    look = FIRST_POLL_S
                    self._changed.wait()
                    continue
                due = next((grave for grave in self._entries if grave.is_due()), None)
                if due is None:
                    self._changed.wait(look)
                    look = min(look * 1.5, LONGEST_POLL_S)
                    continue
            self._destroy(due)
            # It would keep the group alive through the next wait.
            del due
            look = FIRST_POLL_S

    def _destroy(self, grave: _Entry) -> None:
        started = time.monotonic()
        grave.group.destroy()
        with self._changed:
            last = len(self._entries) == 1
        if last:
            _trim_memory()
        with self._changed:
            self._entries.remove(grave)
            self._changed.notify_all()
        logger.debug("a retired group is destroyed, in %.1f ms", (time.monotonic() - started) * 1e3)


def _trim_memory() -> None:
    """Let glibc return freed memory: the threads of each group leave holes, about 60 KB a group in the long run."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _never_free(thing: object) -> None:
    """Make sure that an object is never freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
