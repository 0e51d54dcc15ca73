"""The number of missing standbys of a launched job: one that replaced a node or died is replaced.

There are limits. If standbys die before any is warm, they are started only a few times. A standby that was drained, or
that found itself unfit, is not replaced.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE
from holdfast.protocol.events import JobFinished, NodesJoined, ReadEvent, StandbyReady

#: most restarts of each standby while none gets warm
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
        """Update which standbys wait: nodes that have joined do not, ready standbys do.

        A ready standby resets the number of tries. After the job has finished, no standby counts as missing.
        """
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
        """Note that the agent of a standby has ended.

        It is replaced, unless it was drained or found itself unfit. Other nodes are ignored.
        """
        if node not in self._waiting:
            return
        self._waiting.discard(node)
        if exit_code in (EXIT_DONE, EXIT_BAD_INPUT):
            self._wanted -= 1

    def count_missing(self, alive: int) -> int:
        """Return how many standbys to start now, given the number of running agents.

        Return 0 if the job is over, or if the tries are used up.
        """
        short = 0 if self._over else min(self._wanted - len(self._waiting), self._all - alive)
        return max(0, min(short, _MAX_TRIES * self._wanted - self._tries))

    @property
    def has_given_up(self) -> bool:
        """Whether a standby is missing and will not be started again."""
        return not self._over and len(self._waiting) < self._wanted and self._tries >= _MAX_TRIES * self._wanted

    def on_standby_started(self, node: str) -> None:
        """Note that another standby was started. It counts as a try until one gets warm."""
        self._waiting.add(node)
        self._tries += 1
