"""Nodes that are not here and expected back within a lease.

Those that a coordinator before this one had in its plan come back as they are: what their workers have promised is
awaited. Those that were sent away to replace their workers (they wait with an old state, or all are started again)
come back with fresh ones, so that nothing that the old ones said can count.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from holdfast.coordination.nodes.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_DONE
from holdfast.protocol.messages.agent import Refused


@dataclass(slots=True)
class _Absence:
    since: float
    fresh: bool


class Absences:
    """Who is on the way back, and since when."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._away: dict[str, _Absence] = {}
        #: here again, with fresh workers still to come
        self._starting: set[str] = set()

    @property
    def promised(self) -> Set[str]:
        """The nodes whose workers may still come back with their part of the state."""
        return {name for name, absence in self._away.items() if not absence.fresh}

    @property
    def replacing(self) -> bool:
        """True while somebody is about to come with fresh workers."""
        return bool(self._starting) or any(absence.fresh for absence in self._away.values())

    def expect(self, names: Iterable[str]) -> None:
        """Expect these nodes as they were."""
        for name in names:
            self._away[name] = _Absence(self._turn.now, fresh=False)

    def replace_workers(self, names: Iterable[str], why: str) -> None:
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
            self._away[name] = _Absence(turn.now, fresh=True)

    def knows(self, name: str) -> bool:
        """True where a node that connects was expected."""
        return name in self._away

    def back(self, node: Node) -> None:
        """A node is here, and has said all that its workers had to say."""
        absence = self._away.pop(node.name, None)
        if absence is not None and absence.fresh and not node.complete:
            self._starting.add(node.name)

    def attached(self, node: Node) -> bool:
        """A worker of a node attached: True where it was awaited."""
        awaited = node.name in self._starting or self._is_fresh(node.name)
        if node.complete:
            self._starting.discard(node.name)
        return awaited

    def lost(self, name: str) -> None:
        """A node has left the job."""
        self._starting.discard(name)
        self._away.pop(name, None)

    def pause_over(self) -> None:
        """This process was away: everybody is given the full time again."""
        for absence in self._away.values():
            absence.since = self._turn.now

    def overdue(self, lease_s: float) -> list[tuple[str, float]]:
        """Return those that have not come back within a lease, with the time since when they are away."""
        late = ((name, absence.since) for name, absence in self._away.items())
        return [(name, since) for name, since in late if self._turn.now - since > lease_s]

    def _is_fresh(self, name: str) -> bool:
        absence = self._away.get(name)
        return absence is not None and absence.fresh
