"""The number of missing standbys of a launched job: one that replaced a node or died is replaced.

There are limits. If standbys die before any is warm, they are started only a few times. A standby that was drained, or
that found itself unfit, is not replaced.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE
from holdfast.protocol.events import JobFinished, NodesJoined, ReadEvent, StandbyReady

#: restarts of each standby while none gets warm
_MAX_TRIES = 3


class StandbyRefill:
    """The standbys of a launcher, from the job's events and the ends of agents."""

    def __init__(self, standbys: Collection[str], nodes: int) -> None:
        """Begin with these standbys next to this number of nodes."""
        self._waiting = set(standbys)
        self._wanted = len(standbys)
        #: nodes with standbys; a node that waits in place of another is not missing
        self._all = nodes + len(standbys)
        self._tries = 0
        self._over = False

    def on_event(self, event: ReadEvent) -> None:
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

    def on_agent_ended(self, node: str, exit_code: int) -> None:
        """A node's agent has ended."""
        if node not in self._waiting:
            return
        self._waiting.discard(node)
        if exit_code in (EXIT_DONE, EXIT_BAD_INPUT):
            self._wanted -= 1

    def missing(self, alive: int) -> int:
        """Return how many standbys to start now, given the number of running agents."""
        short = 0 if self._over else min(self._wanted - len(self._waiting), self._all - alive)
        return max(0, min(short, _MAX_TRIES * self._wanted - self._tries))

    @property
    def has_given_up(self) -> bool:
        """Whether a standby is missing and will not be started again."""
        return not self._over and len(self._waiting) < self._wanted and self._tries >= _MAX_TRIES * self._wanted

    def on_standby_started(self, node: str) -> None:
        """Another standby was started."""
        self._waiting.add(node)
        self._tries += 1
