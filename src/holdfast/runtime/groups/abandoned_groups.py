"""Destroys abandoned groups in the background, once their operations have ended.

Freeing a group with operations in progress would block (gloo joins its threads), or free memory that torch still writes
to. So the reaper keeps a group together with its operations and their buffers. It destroys the group (about 10 ms per
rank) once all operations ended, because the sockets were severed, or by their own timeout.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger(__name__)

#: seconds between two checks whether groups have ended, at first and at most
FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.05


class AbandonedGroup(Protocol):
    """A group together with the operations and buffers that it still needs."""

    def has_ended(self) -> bool:
        """Return whether all its operations have ended. Never blocks."""
        ...

    def destroy(self) -> None:
        """Free everything, which may take a while. Called once, after `has_ended`."""
        ...


class _Entry:
    __slots__ = ("group", "not_before")

    def __init__(self, group: AbandonedGroup, not_before: float) -> None:
        self.group = group
        #: on the monotonic clock, in seconds
        self.not_before = not_before

    def is_due(self) -> bool:
        return time.monotonic() >= self.not_before and self.group.has_ended()


class GroupReaper:
    """Owns the abandoned groups of one worker, and the thread that destroys them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self.added = 0

    @property
    def size(self) -> int:
        """The number of groups that are not destroyed yet."""
        with self._changed:
            return len(self._entries)

    def add(self, group: AbandonedGroup, *, linger_s: float = 0.0) -> None:
        """Take ownership of a group, and start the reaper's thread with the first one. Returns at once.

        The caller must drop its references. After `close`, the group is kept until the process ends, and never freed.

        Args:
            group: destroyed by the thread once all its operations have ended.
            linger_s: seconds to wait at least before it is destroyed; `close` ends this wait.
        """
        with self._changed:
            self.added += 1
            entry = _Entry(group, time.monotonic() + linger_s)
            self._entries.append(entry)
            if self._closing:
                _never_free(entry)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-reaper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until all groups are destroyed, at most `deadline_s` seconds; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout=deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Wait at most `deadline_s` seconds until all groups have ended and are destroyed, then end the thread. Return
        whether all are destroyed. `linger_s` no longer counts.

        Other groups are never freed: freeing them at interpreter exit would block until their operations time out.
        """
        with self._changed:
            for entry in self._entries:
                entry.not_before = 0.0
            self._changed.notify_all()
        self.wait_empty(deadline_s)
        with self._changed:
            self._closing = True
            for entry in self._entries:
                _never_free(entry)
            empty = not self._entries
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        return empty

    def _run(self) -> None:
        """Run the reaper's thread: destroy groups that are due, one after the other, until `close`. While none is due,
        wait longer and longer between checks; without groups, wait for `add`.
        """
        look = FIRST_POLL_S
        while True:
            with self._changed:
                if self._closing:
                    return
                if not self._entries:
                    look = FIRST_POLL_S
                    self._changed.wait()
                    continue
                due = next((entry for entry in self._entries if entry.is_due()), None)
                if due is None:
                    self._changed.wait(look)
                    look = min(look * 1.5, LONGEST_POLL_S)
                    continue
            self._destroy(due)
            # A reference here would keep the group alive through the next wait.
            del due
            look = FIRST_POLL_S

    def _destroy(self, entry: _Entry) -> None:
        """Destroy a group, remove its entry, and wake waiting threads. After the last one, return freed memory to the
        system.
        """
        started = time.monotonic()
        entry.group.destroy()
        with self._changed:
            last = len(self._entries) == 1
        if last:
            _trim_memory()
        with self._changed:
            self._entries.remove(entry)
            self._changed.notify_all()
        logger.debug("destroyed a retired group in %.1f ms", (time.monotonic() - started) * 1e3)


def _trim_memory() -> None:
    """Return freed memory to the system, if the C library can: the threads of each group leave holes, about 60 KB a
    group in the long run.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _never_free(thing: object) -> None:
    """Ensure that an object is never freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
