"""Nodes that are not here and expected back within a lease.

Those that a coordinator before this one had in its plan come back as they are: what their workers have promised is
awaited. Those that were sent away to replace their workers (they wait with an old state, or all are started again)
come back with fresh ones, so that nothing that the old ones said can count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from holdfast.coordination.nodes.membership import Node
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_DONE
from holdfast.protocol.messages.agent import Refused


class Absences:
    """Who is on the way back, and since when."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        #: since when they are away, by whether they come back as they were, or with fresh workers
        self._as_they_were: dict[str, float] = {}
        self._fresh: dict[str, float] = {}
        #: of those that are to come with fresh workers, the ones that nobody was told of yet
        self._untold: set[str] = set()
        #: when one came back as it was: who comes later may only have stood behind it in the queue
        self._last_back = 0.0
        #: here again, with fresh workers still to come
        self._starting: set[str] = set()
        #: whether any node has come to this coordinator
        self._any_node_came = False

    @property
    def promised(self) -> Set[str]:
        """The nodes whose workers may still come back with their part of the state."""
        return self._as_they_were.keys()

    def unheard(self, lease_s: float) -> int:
        """Return how many nodes are awaited if none at all has come to this coordinator within a lease, else 0."""
        late = [name for name, since in self._as_they_were.items() if since < self._turn.now - lease_s]
        return 0 if self._any_node_came else len(late)

    @property
    def replacing(self) -> bool:
        """True while somebody is about to come with fresh workers."""
        return bool(self._starting or self._fresh)

    def expect(self, names: Iterable[str]) -> None:
        """Expect these nodes as they were."""
        for name in names:
            self._as_they_were[name] = self._turn.now

    def replace_workers(self, names: Iterable[str], why: str) -> None:
        """Have those of these nodes that are connected replace their workers."""
        turn = self._turn
        for name in dict.fromkeys(names):
            node = turn.members.nodes.get(name)
            if node is None:
                continue
            if not (node.told or node.returning):
                self._untold.add(name)
            turn.send(node.connection, Refused(why=why, exit_code=EXIT_DONE, retry=True))
            turn.close(node.connection)
            turn.members.remove(name)
            self._starting.discard(name)
            self._as_they_were.pop(name, None)
            self._fresh[name] = turn.now

    def came(self) -> None:
        """A node has connected. All others have a lease from the time when the first one has."""
        if not self._any_node_came:
            self._any_node_came = True
            self.pause_over()

    def knows(self, name: str) -> bool:
        """True where a node that connects was expected."""
        return name in self._as_they_were or name in self._fresh

    def returns(self, name: str) -> bool:
        """True where a node that connects was expected, and was told of before."""
        return self.knows(name) and name not in self._untold

    def back(self, node: Node) -> None:
        """A node is here, and has said all that its workers had to say."""
        if self._as_they_were.pop(node.name, None) is not None:
            self._last_back = self._turn.now
        self._untold.discard(node.name)
        fresh = self._fresh.pop(node.name, None) is not None
        if fresh and not (node.complete or node.aside):  # (for a standby nobody waits)
            self._starting.add(node.name)

    def attached(self, node: Node) -> bool:
        """A worker of a node attached: True where it was awaited."""
        awaited = node.name in self._starting or node.name in self._fresh
        if node.complete:
            self._starting.discard(node.name)
        return awaited

    def lost(self, name: str) -> None:
        """A node has left the job."""
        self._starting.discard(name)
        self._untold.discard(name)
        self._as_they_were.pop(name, None)
        self._fresh.pop(name, None)

    def pause_over(self) -> None:
        """This process was away: everybody is given the full time again."""
        for away in (self._as_they_were, self._fresh):
            away.update(dict.fromkeys(away, self._turn.now))

    def overdue(
        self, lease_s: float, needed: Collection[str] = (), needed_s: float = 0.0, *, ends: bool = False
    ) -> list[tuple[str, float]]:
        """Return those that have not come back within a lease, with the time since when they are away.

        Those that are `needed` have `needed_s` seconds to come with fresh workers: without them something is lost.

        After an outage a thousand come at once, and one coordinator takes them in: as long as any of them come, nobody
        knows whether the others are gone or wait for their turn.

        If no node at all has come, this coordinator may listen at an address that the agents do not know. To give up
        the job would destroy it, and nothing can be done without nodes, unless the job `ends`.
        """
        before = self._turn.now - lease_s
        gives_up = (self._any_node_came or ends) and self._last_back < before
        late = self._as_they_were.items() if gives_up else ()
        fresh = (
            (name, since)
            for name, since in self._fresh.items()
            if name not in needed or since < self._turn.now - needed_s
        )
        return [(name, since) for name, since in (*late, *fresh) if since < before]
