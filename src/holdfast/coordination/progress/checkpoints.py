"""Which checkpoints count: those of members, of steps that every member has applied, on the decided lineage."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordination.turn import Turn
from holdfast.errors import BadInputError
from holdfast.protocol.events import CheckpointRejected, CheckpointSaved
from holdfast.protocol.messages.orders import MAX_PRUNED, AcceptCheckpoint, AskCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointDamaged, CheckpointKept, CheckpointWritten
from holdfast.protocol.record import KnownCheckpoint

#: how many stay: one more than the newest, which may be damaged after it was kept
KEPT = 2


def retained(checkpoints: Iterable[KnownCheckpoint]) -> tuple[tuple[KnownCheckpoint, ...], tuple[str, ...]]:
    """Return those that stay, oldest first, and the names of those that newer ones supersede."""
    ordered = sorted(checkpoints, key=lambda known: (known.term, known.generation, known.step))
    return tuple(ordered[-KEPT:]), tuple(known.name for known in ordered[:-KEPT])


class CheckpointBook:
    """Accepts what members have written; messages of others never get here."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._written: list[CheckpointWritten] = []
        #: somebody wants one of a later step than this; None: nobody does
        self._wanted: int | None = None
        #: the generation whose first member was asked for that
        self._asked = 0

    def take(self, message: CheckpointWritten | CheckpointKept | CheckpointDamaged, committed: int) -> bool:
        """Take in a member's message; True where the generation cannot go on (its checkpoint is damaged)."""
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
            self._answer(written)
        plan = self._turn.record.plan
        if self._wanted is not None and plan is not None and plan.generation != self._asked:
            self._asked = plan.generation
            self._turn.order(plan.workers[0], AskCheckpoint())

    def want(self, committed: int) -> None:
        """A person asks for a checkpoint of a step after this one; of several generations, each is asked once.

        Raises:
            BadInputError: the job keeps none.
        """
        if not self._turn.record.saves:
            raise BadInputError("the job keeps no checkpoints: start it with --checkpoint-dir DIR")
        self._wanted, self._asked = committed, 0

    def rolled_back(self) -> None:
        """What was written of the abandoned steps never counts."""
        abandoned, self._written = self._written, []
        for written in abandoned:
            self._prune(written.worker, (written.name,))

    def _written_by_member(self, message: CheckpointWritten) -> None:
        """A member has written a checkpoint under a temporary name."""
        if self._on_lineage(message):
            self._written.append(message)
        else:
            self._prune(message.worker, (message.name,))

    def _answer(self, written: CheckpointWritten) -> None:
        """Its step is committed: it is kept, unless a newer one was in the meantime."""
        turn, known = self._turn, self._turn.record.checkpoints
        if any(_origin(one) == _origin(written) for one in known) or not turn.is_member(written.worker):
            return
        if known and written.step <= known[-1].step:
            self._prune(written.worker, (written.name,))
            return
        turn.change()  # a checkpoint that counts says that its step is committed
        order = AcceptCheckpoint(term=written.term, generation=written.generation, step=written.step, name=written.name)
        turn.order(written.worker, order)

    def _kept(self, message: CheckpointKept) -> None:
        """An accepted checkpoint has its final name."""
        turn, record = self._turn, self._turn.record
        known = KnownCheckpoint(step=message.step, name=message.name, term=message.term, generation=message.generation)
        if known in record.checkpoints or known.name in record.superseded:
            return
        if not self._on_lineage(message):
            # It was accepted before a decision that has abandoned its step: to be removed, with the next that are.
            turn.change(superseded=(*record.superseded, known.name)[-MAX_PRUNED:])
            return
        checkpoints, old = retained((*record.checkpoints, known))
        superseded = (*record.superseded, *old)[-MAX_PRUNED:]
        turn.change(checkpoints=checkpoints, superseded=superseded)
        if known in checkpoints:
            self._wanted = None if self._wanted is not None and message.step > self._wanted else self._wanted
            turn.emit(
                CheckpointSaved,
                step=message.step,
                save_s=message.seconds,
                saved_bytes=message.bytes,
                stall_s=message.stall_s,
            )
        if superseded:
            self._prune(message.worker, superseded)

    def _damaged(self, message: CheckpointDamaged) -> bool:
        """Strike out a checkpoint that cannot be read; True where it was one that counted."""
        turn = self._turn
        remaining = tuple(known for known in turn.record.checkpoints if known.name != message.name)
        if len(remaining) == len(turn.record.checkpoints):
            return False
        turn.change(checkpoints=remaining, unreadable=turn.record.unreadable + 1)
        turn.emit(CheckpointRejected, name=message.name, why=message.why)
        return True

    def _on_lineage(self, message: CheckpointWritten | CheckpointKept) -> bool:
        record = self._turn.record
        return message.term <= record.term and record.lineage <= message.generation <= record.generation

    def _prune(self, worker: str, names: tuple[str, ...]) -> None:
        self._turn.order(worker, PruneCheckpoints(term=self._turn.record.term, names=names))


def _origin(checkpoint: KnownCheckpoint | CheckpointWritten) -> tuple[int, int, int]:
    return checkpoint.term, checkpoint.generation, checkpoint.step
