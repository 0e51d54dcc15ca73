"""How many standbys a launched job is short of: where one has taken a place or died, another is started.

Not for ever: those that die before any is warm are started a few times only, and one that says itself that it is of no
use, or was asked to leave, is not replaced.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE
from holdfast.protocol.events import JobFinished, NodesJoined, ReadEvent, StandbyReady

#: so often each standby is started again while none gets warm
_MAX_TRIES = 3


class Refilling:
    """Who of a launcher's nodes waits, by what the job's events say and by which agents have ended."""

    def __init__(self, standbys: Collection[str], nodes: int) -> None:
        """Begin with these standbys beside so many nodes."""
        self._waiting = set(standbys)
        self._wanted = len(standbys)
        #: so many nodes there are, standbys included: a node that waits in another's stead is no loss
        self._all = nodes + len(standbys)
        self._tries = 0
        self._over = False

    def take(self, event: ReadEvent) -> None:
        """Hear of an event of the job."""
        match event:
            case NodesJoined():
                self._waiting.difference_update(event.names)
            case StandbyReady():
                self._waiting.add(event.node)
                self._tries = 0
            case JobFinished():
                self._over = True
            case _:
                pass

    def ended(self, node: str, exit_code: int) -> None:
        """A node's agent has ended."""
        if node not in self._waiting:
            return
        self._waiting.discard(node)
        if exit_code in (EXIT_DONE, EXIT_BAD_INPUT):
            self._wanted -= 1

    def missing(self, alive: int) -> int:
        """Return how many standbys are to be started now, where the agents of so many nodes run."""
        short = 0 if self._over else min(self._wanted - len(self._waiting), self._all - alive)
        return max(0, min(short, _MAX_TRIES * self._wanted - self._tries))

    @property
    def given_up(self) -> bool:
        """True where one is missing and none is started any more."""
        return not self._over and len(self._waiting) < self._wanted and self._tries >= _MAX_TRIES * self._wanted

    def started(self, node: str) -> None:
        """Another standby was started."""
        self._waiting.add(node)
        self._tries += 1
