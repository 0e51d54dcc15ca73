"""Nodes that stay in the job but replace their workers: those that wait with an old state, and all at a restart.

Such a node is sent away to come back at once with fresh processes, so that nothing that the old ones said can count.
Until it has, it is awaited; if it does not come within a lease, it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_DONE
from holdfast.protocol.agent import Refused
from holdfast.protocol.events import FailureDetected, NodeLeft


class Renewing:
    """Who is on the way back, and since when."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        #: nodes that are away; and those that are here again, with workers still to come
        self._away: dict[str, float] = {}
        self._starting: set[str] = set()

    @property
    def awaited(self) -> bool:
        """True while somebody is on the way back."""
        return bool(self._away or self._starting)

    def renew(self, names: Iterable[str], why: str) -> None:
        """Have those of these nodes that are connected replace their workers."""
        turn = self._turn
        for name in dict.fromkeys(names):
            node = turn.members.nodes.get(name)
            if node is None:
                continue
            turn.send(node.connection, Refused(why=why, exit_code=EXIT_DONE, retry=True))
            turn.close(node.connection)
            turn.members.remove(name)
            self._starting.discard(name)
            self._away[name] = turn.now

    def back(self, name: str) -> bool:
        """A node connects: True where it was awaited."""
        if self._away.pop(name, None) is None:
            return False
        self._starting.add(name)
        return True

    def attached(self, node: Node) -> bool:
        """A worker of a node attached: True where the node was awaited."""
        if node.name not in self._starting:
            return False
        if node.complete:
            self._starting.discard(node.name)
        return True

    def lost(self, name: str) -> None:
        """A connected node has left the job."""
        self._starting.discard(name)

    def pause_over(self) -> None:
        """This process was away: everybody is given the full time again."""
        self._away = dict.fromkeys(self._away, self._turn.now)

    def give_up(self, lease_s: float) -> None:
        """Count those as gone that have not come back within a lease."""
        turn = self._turn
        for name, since in list(self._away.items()):
            if turn.now - since > lease_s:
                del self._away[name]
                turn.emit(FailureDetected, node=name, kind="lease_expired", after_s=turn.now - since)
                turn.emit(NodeLeft, node=name, reason="failed")
