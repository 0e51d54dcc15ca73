"""Nodes that are not connected, and are expected back within a lease.

Nodes that an earlier coordinator had in its plan are expected with the same workers: their state and their votes still
count. Nodes that were sent away to replace their workers are expected with new workers: nothing that the old workers
reported counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_DONE
from holdfast.protocol.messages.agent import Refused


class DisconnectedNodes:
    """The disconnected nodes that are expected back, and since when they are away."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        #: The nodes that are expected with the same workers, and since when, in seconds of the transaction's clock.
        self._returning: dict[str, float] = {}
        #: the nodes that are expected with new workers, and since when
        self._replacing: dict[str, float] = {}
        #: The nodes of `_replacing` that were never reported as joined.
        self._unannounced: set[str] = set()
        #: Reconnected nodes with new workers that have not all attached.
        self._starting: set[str] = set()
        #: when a node last came back with the same workers
        self._last_return = 0.0
        #: whether any node has connected to this coordinator
        self._any_connected = False

    @property
    def promised(self) -> Set[str]:
        """The nodes with workers that may still come back with their part of the state."""
        return self._returning.keys()

    @property
    def replacing(self) -> bool:
        """Whether a node is expected with new workers, or its new workers are starting."""
        return bool(self._starting or self._replacing)

    def count_unreached(self, lease_s: float) -> int:
        """Return how many nodes are expected for more than a lease, if none at all has connected since the start, else
        0.
        """
        if self._any_connected:
            return 0
        return sum(since < self._transaction.now - lease_s for since in self._returning.values())

    def expect(self, names: Iterable[str]) -> None:
        """Expect these nodes with the same workers."""
        self._returning.update(dict.fromkeys(names, self._transaction.now))

    def replace_workers(self, names: Iterable[str], why: str) -> None:
        """Send the connected ones of these nodes away to replace their workers, and expect them back with new ones.

        They are removed from the members until they reconnect. Nodes that are not connected are skipped.
        """
        transaction = self._transaction
        for name in dict.fromkeys(names):
            node = transaction.members.nodes.get(name)
            if node is None:
                continue
            if not (node.told or node.returning):
                self._unannounced.add(name)
            transaction.send(node.connection, Refused(why=why, exit_code=EXIT_DONE, retry=True))
            transaction.close(node.connection)
            transaction.members.remove(name)
            self._starting.discard(name)
            self._returning.pop(name, None)
            self._replacing[name] = transaction.now

    def on_node_connected(self) -> None:
        """Record that a node has connected. After the first one, all others have a lease from now."""
        if not self._any_connected:
            self._any_connected = True
            self.pause_over()

    def is_expected(self, name: str) -> bool:
        """Return whether a node is expected back."""
        return name in self._returning or name in self._replacing

    def is_known(self, name: str) -> bool:
        """Return whether a node is expected back, and its joining was reported to users before."""
        return self.is_expected(name) and name not in self._unannounced

    def on_node_returned(self, node: Node) -> None:
        """Record that a node is connected again, after its whole Hello was handled. It is no longer expected.

        If its workers were replaced, it is starting until all of them have attached; a standby or retained node is not.
        """
        if self._returning.pop(node.name, None) is not None:
            self._last_return = self._transaction.now
        self._unannounced.discard(node.name)
        replaces = self._replacing.pop(node.name, None) is not None
        if replaces and not (node.complete or node.aside):  # The job does not wait for a standby.
            self._starting.add(node.name)

    def on_worker_attached(self, node: Node) -> bool:
        """Record that a worker has attached. Return whether its node was starting or replacing its workers.

        The node is no longer starting once all of its workers have attached.
        """

        expected = node.name in self._starting or node.name in self._replacing
        if node.complete:
            self._starting.discard(node.name)
        return expected

    def stop_expecting(self, name: str) -> None:
        """Stop expecting a node, because it has left the job."""
        self._starting.discard(name)
        self._unannounced.discard(name)
        self._returning.pop(name, None)
        self._replacing.pop(name, None)

    def pause_over(self) -> None:
        """Restart the time of all expected nodes, because this process was paused or the first node has connected."""
        for away in (self._returning, self._replacing):
            away.update(dict.fromkeys(away, self._transaction.now))

    def overdue(
        self, lease_s: float, needed: Collection[str] = (), needed_s: float = 0.0, *, ends: bool = False
    ) -> list[tuple[str, float]]:
        """Return the nodes that have not come back within a lease, each with the time since when it is away.

        Nodes with the same workers are never overdue while others still come back: after an outage, a thousand nodes
        may connect at once, and one coordinator handles them one by one. They are not overdue either if no node at all
        has connected: this coordinator may listen at an address that the agents do not know, and the job may still
        train. If the job `ends`, they are overdue.

        Args:
            lease_s: the seconds that a node may be away.
            needed: the nodes without which state is lost.
            needed_s: the seconds that a needed node has to come back with new workers.
            ends: whether the job is about to end.
        """
        before = self._transaction.now - lease_s
        gives_up = (self._any_connected or ends) and self._last_return < before
        returning = self._returning.items() if gives_up else ()
        replacing = (
            (name, since)
            for name, since in self._replacing.items()
            if name not in needed or since < self._transaction.now - needed_s
        )
        return [(name, since) for name, since in (*returning, *replacing) if since < before]
