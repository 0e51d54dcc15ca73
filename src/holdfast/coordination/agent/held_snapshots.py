"""The parts of snapshots that a node holds: its workers' own, and copies of other nodes'; of each the two newest."""

from __future__ import annotations

from holdfast.coordination.agent.instructions import FetchParts, ForgetParts, OpenMemory, SnapshotWork
from holdfast.protocol.layouts.group_messages import JoinUnit, UnitWord
from holdfast.protocol.messages.agent import MAX_HELD_PARTS, DropSnapshots, KeepSnapshots, NodeSnapshots
from holdfast.protocol.state import SnapshotPart

#: snapshots of which parts stay: while the newest is not complete everywhere, the one before still serves
GENERATIONS = 2


class HeldSnapshots:
    """What one node holds. What this lets go of is for the shell to remove."""

    def __init__(self) -> None:
        """Keep none: this node has no room for any, or nobody has asked for them."""
        self._at: NodeSnapshots | None = None
        self._asked = False
        #: in the order in which they came
        self._own: list[SnapshotPart] = []
        self._copies: list[SnapshotPart] = []

    @property
    def told(self) -> NodeSnapshots | None:
        """What the coordinator is told of them; None where none are kept."""
        if self._at is None:
            return None
        parts = tuple(dict.fromkeys((*self._own, *self._copies)))
        return NodeSnapshots(host=self._at.host, port=self._at.port, parts=parts[:MAX_HELD_PARTS])

    def begin(self, found: NodeSnapshots | None) -> None:
        """Hold what was found from before; None: keep none."""
        self._at = found
        self._own = list(found.parts) if found is not None else []

    def needed_by(self, word: UnitWord) -> list[SnapshotWork]:
        """A worker comes to be in a unit: where its job may change the layout there is to be room, asked for once."""
        if not (isinstance(word, JoinUnit) and word.layouts) or self._at is not None or self._asked:
            return []
        self._asked = True
        return [OpenMemory()]

    def taken(self, part: SnapshotPart) -> list[SnapshotWork]:
        """A worker has written its part."""
        return self._add(self._own, part)

    def fetched(self, part: SnapshotPart) -> list[SnapshotWork]:
        """A copy has come."""
        return self._add(self._copies, part)

    def obey(self, order: KeepSnapshots | DropSnapshots) -> SnapshotWork:
        """Keep, or let go of, what the coordinator says."""
        if isinstance(order, KeepSnapshots):
            here = {*self._own, *self._copies}
            return FetchParts(tuple(one for one in order.wanted if one.snapshot not in here))
        for mine in (self._own, self._copies):
            mine[:] = [part for part in mine if part not in order.parts]
        return ForgetParts(order.parts, order.why)

    def _add(self, mine: list[SnapshotPart], part: SnapshotPart) -> list[SnapshotWork]:
        if part not in mine:
            mine.append(part)
        newest = sorted({one.key for one in mine})[-GENERATIONS:]
        old = [one for one in mine if one.key not in newest]
        mine[:] = [one for one in mine if one.key in newest]
        here = {*self._own, *self._copies}
        gone = tuple(one for one in old if one not in here)
        return [ForgetParts(gone)] if gone else []
