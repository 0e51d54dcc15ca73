"""Which checkpoints count: those of members, of steps that every member has applied, on the decided lineage."""

from __future__ import annotations

from holdfast.coordination.turn import Turn
from holdfast.protocol.events import CheckpointRejected, CheckpointSaved
from holdfast.protocol.orders import AcceptCheckpoint
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.worker import CheckpointDamaged, CheckpointKept, CheckpointWritten

#: how many names the record remembers; the writers keep fewer on disk
REMEMBERED = 16


class CheckpointBook:
    """Accepts what members have written; messages of others never get here."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._written: list[CheckpointWritten] = []

    def take(self, message: CheckpointWritten | CheckpointKept | CheckpointDamaged, committed: int) -> bool:
        """Take in a member's message; True where the epoch cannot go on (its checkpoint is damaged)."""
        if isinstance(message, CheckpointDamaged):
            return self._damaged(message)
        if isinstance(message, CheckpointKept):
            self._kept(message)
        else:
            self._written_by_member(message)
            self.accept(committed)
        return False

    def accept(self, committed: int) -> None:
        """Accept those of steps up to `committed`."""
        ripe = [written for written in self._written if written.step <= committed]
        self._written = [written for written in self._written if written.step > committed]
        for written in ripe:
            self._turn.change()  # a checkpoint that counts says that its step is committed
            self._turn.order(written.worker, AcceptCheckpoint(step=written.step, name=written.name))

    def rolled_back(self) -> None:
        """What was written of the abandoned steps never counts."""
        self._written = []

    def _written_by_member(self, message: CheckpointWritten) -> None:
        """A member has written a checkpoint under a temporary name."""
        record = self._turn.record
        if record.lineage <= message.epoch <= record.epoch:
            self._written.append(message)

    def _kept(self, message: CheckpointKept) -> None:
        """An accepted checkpoint has its final name."""
        turn = self._turn
        if any(known.name == message.name for known in turn.record.checkpoints):
            return
        known = KnownCheckpoint(step=message.step, name=message.name)
        turn.change(checkpoints=(*turn.record.checkpoints, known)[-REMEMBERED:])
        turn.emit(CheckpointSaved, step=message.step, seconds=message.seconds, bytes=message.bytes)

    def _damaged(self, message: CheckpointDamaged) -> bool:
        """Strike out a checkpoint that cannot be read; True where it was one that counted."""
        turn = self._turn
        remaining = tuple(known for known in turn.record.checkpoints if known.name != message.name)
        if len(remaining) == len(turn.record.checkpoints):
            return False
        turn.change(checkpoints=remaining)
        turn.emit(CheckpointRejected, name=message.name, why=message.why)
        return True
