"""The snapshot parts that a node holds: its own workers' parts, and copies of other nodes' parts."""

from __future__ import annotations

from holdfast.coordination.agent.instructions import DropParts, FetchParts, OpenSnapshotMemory, SnapshotWork
from holdfast.protocol.layouts.group_messages import JoinUnit, UnitWord
from holdfast.protocol.messages.agent import MAX_HELD_PARTS, DropSnapshots, KeepSnapshots, NodeSnapshots
from holdfast.protocol.state import SnapshotPart

#: The number of newest snapshots whose parts are kept. Until the newest is complete on all nodes, the previous one is
#: the last usable one.
KEPT_SNAPSHOTS = 2


class HeldSnapshots:
    """The snapshot parts of one node. The shell frees the memory of the parts that this class drops."""

    def __init__(self) -> None:
        """Start without snapshots: the node has no room for any, or none were requested."""
        self._at: NodeSnapshots | None = None
        self._asked = False
        #: in order of arrival
        self._own: list[SnapshotPart] = []
        self._copies: list[SnapshotPart] = []

    @property
    def held_parts(self) -> NodeSnapshots | None:
        """The message that tells the coordinator where to fetch snapshots and which parts are held, at most
        `MAX_HELD_PARTS`.

        None if this node has no memory for snapshots.
        """
        if self._at is None:
            return None
        parts = tuple(dict.fromkeys((*self._own, *self._copies)))
        return NodeSnapshots(host=self._at.host, port=self._at.port, parts=parts[:MAX_HELD_PARTS])

    def reset(self, found: NodeSnapshots | None) -> None:
        """Start with the parts that were found in memory, or without snapshots if `found` is None."""
        self._at = found
        self._own = list(found.parts) if found is not None else []

    def open_if_needed(self, word: UnitWord) -> list[SnapshotWork]:
        """Request memory for snapshot parts, once, when a worker of a job that can change layouts joins.

        Return an empty list for other messages, or if there is such memory already.
        """
        if not (isinstance(word, JoinUnit) and word.layouts) or self._at is not None or self._asked:
            return []
        self._asked = True
        return [OpenSnapshotMemory()]

    def add_own(self, part: SnapshotPart) -> list[SnapshotWork]:
        """Add a part that a worker of this node has written."""
        return self._add(self._own, part)

    def add_copy(self, part: SnapshotPart) -> list[SnapshotWork]:
        """Add a copy of another node's part."""
        return self._add(self._copies, part)

    def on_order(self, order: KeepSnapshots | DropSnapshots) -> SnapshotWork:
        """Return the instruction to fetch the wanted copies that are not held here, or to drop the parts that the order
        names.

        Dropped parts are forgotten at once, fetched ones are added with `add_copy`.
        """
        if isinstance(order, KeepSnapshots):
            here = {*self._own, *self._copies}
            return FetchParts(tuple(one for one in order.wanted if one.snapshot not in here))
        for mine in (self._own, self._copies):
            mine[:] = [part for part in mine if part not in order.parts]
        return DropParts(order.parts, order.why)

    def _add(self, mine: list[SnapshotPart], part: SnapshotPart) -> list[SnapshotWork]:
        """Add a part to one of the two lists, and keep only the parts of its `KEPT_SNAPSHOTS` newest snapshots.

        Return an instruction to free the others, except parts that the other list still has.
        """
        if part not in mine:
            mine.append(part)
        newest = sorted({one.key for one in mine})[-KEPT_SNAPSHOTS:]
        old = [one for one in mine if one.key not in newest]
        mine[:] = [one for one in mine if one.key in newest]
        here = {*self._own, *self._copies}
        dropped = tuple(one for one in old if one not in here)
        return [DropParts(dropped)] if dropped else []
