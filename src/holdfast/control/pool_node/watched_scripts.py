"""Scripts for which this node was of no use to a job: once one has changed here, the node may do for it."""

from __future__ import annotations

import os

#: of so many scripts is known how they were; those that were refused first are forgotten first
_KEPT = 256

Looks = tuple[int, int, int] | None


def looks(script: str) -> Looks:
    """Return what changes where a file does; None: it cannot be looked at."""
    try:
        found = os.stat(script)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class WatchedScripts:
    """How scripts were when this node was refused by them."""

    def __init__(self) -> None:
        self._were: dict[str, Looks] = {}

    def refused(self, script: str, looked: Looks) -> None:
        """A job has found this node of no use; its script looked so before."""
        self._were.pop(script, None)
        self._were[script] = looked
        while len(self._were) > _KEPT:
            del self._were[next(iter(self._were))]

    def changed(self) -> bool:
        """Tell whether any has changed; each change is told once."""
        changed = [script for script, looked in self._were.items() if looks(script) != looked]
        for script in changed:
            del self._were[script]
        return bool(changed)
