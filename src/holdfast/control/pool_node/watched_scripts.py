"""Scripts that were to run on this node: once one has changed here, it may do for a job that would not take it."""

from __future__ import annotations

import os

#: of so many scripts is known how they were; those that were looked at first are forgotten first
_KEPT = 256

_Looks = tuple[int, int, int] | None


class WatchedScripts:
    """How scripts were when a grant began by which they were to run, whatever has become of that."""

    def __init__(self) -> None:
        self._were: dict[str, _Looks] = {}

    def looked_at(self, script: str) -> None:
        """A script is about to be looked at, and to run if it can."""
        self._were.pop(script, None)
        self._were[script] = _looks(script)
        while len(self._were) > _KEPT:
            del self._were[next(iter(self._were))]

    def changed(self) -> bool:
        """Tell whether any has changed; each change is told once."""
        now = {script: _looks(script) for script in self._were}
        before, self._were = self._were, now
        return now != before


def _looks(script: str) -> _Looks:
    """Return what changes where a file does; None: it cannot be looked at."""
    try:
        found = os.stat(script)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
