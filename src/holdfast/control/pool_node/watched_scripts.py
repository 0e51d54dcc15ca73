"""Detects changes of scripts that were started on this node.

After a change, a job that did not accept this node may accept it.
"""

from __future__ import annotations

import os

#: the most scripts that are watched; the oldest are forgotten first
_KEPT = 256

_Fingerprint = tuple[int, int, int] | None


class WatchedScripts:
    """The state of scripts when a grant started them, whether or not that succeeded."""

    def __init__(self) -> None:
        self._known: dict[str, _Fingerprint] = {}

    def add(self, script: str) -> None:
        """Watch a script, which is about to be checked and started. Beyond `_KEPT` scripts, the one added first is
        forgotten.
        """
        self._known.pop(script, None)
        self._known[script] = _fingerprint(script)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def check_changed(self) -> bool:
        """Return whether any script has changed since the last call, or since it was added."""
        now = {script: _fingerprint(script) for script in self._known}
        before, self._known = self._known, now
        return now != before


def _fingerprint(script: str) -> _Fingerprint:
    """Return values that change with a file, or None if it cannot be read."""
    try:
        found = os.stat(script)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
