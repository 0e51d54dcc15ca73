"""Lineage of a job by its events: its position, proven steps, and possible roll-back targets."""

from __future__ import annotations

from holdfast.protocol.events import (
    CheckpointSaved,
    CoordinatorRestarted,
    JournalRepaired,
    ReadEvent,
    RolledBack,
    SnapshotSaved,
    StepCommitted,
)
from holdfast.protocol.position import Position


class Lineage:
    """The committed steps that no roll-back undid."""

    def __init__(self) -> None:
        """Start before the first event."""
        self.position = Position()
        #: Whether a step was committed, or the step to continue from is known.
        self.begun = False
        #: Number of steps that were rolled back.
        self.undone = 0
        #: For each step of this journal: whether its samples are proven.
        self._proofs: list[bool] = []
        self._proves = False
        self._saved: set[int] = set()
        #: The step at which this journal starts. Its checkpoint may be in an earlier journal.
        self._from = 0
        self._all_known = True
        #: The newest step before a coordinator restart. Up to it, checkpoints without an event may exist.
        self._last_before_kill = 0

    @property
    def counted(self) -> int:
        """Number of steps on the lineage in this journal."""
        return len(self._proofs)

    @property
    def proven(self) -> int:
        """Number of these steps that are proven."""
        return sum(self._proofs)

    def mark_next_step_proven(self) -> None:
        """Mark the next step as proven."""
        self._proves = True

    def may_go_back_to(self, step: int) -> bool:
        """Return whether a checkpoint or snapshot of a step may exist, by the events so far.

        True also if events are missing: before the first step, for steps before this journal, after a repair, or if the
        coordinator was killed before it could report the checkpoint.
        """
        unannounced = max(self._saved, default=0) < step <= self._last_before_kill
        return not self.begun or step <= self._from or step in self._saved or unannounced or not self._all_known

    def add_event(self, event: ReadEvent) -> None:
        """Update the position from the next event; also the proofs, undone steps and saved steps.

        A step counts as proven only if `mark_next_step_proven` was called since the previous event. Steps that a
        repaired journal has lost are not proven.
        """
        before, self.position = self.position, self.position.after(event)
        match event:
            case StepCommitted():
                self._proofs.append(self._proves)
                self.begun = True
                self._last_before_kill = 0
            case CoordinatorRestarted():
                self._last_before_kill = self.position.step
            case RolledBack(to_step=step):
                self._go_back(before.step, step)
            case JournalRepaired(to_step=step):
                self._all_known = False
                self._go_back(before.step, min(step, before.step), undone=False)
                self._proofs += [False] * max(0, step - before.step)
                self.begun = True
            case CheckpointSaved(step=step) | SnapshotSaved(step=step):
                self._saved.add(step)
            case _:
                pass
        self._proves = False

    def _go_back(self, now: int, step: int, *, undone: bool = True) -> None:
        """Remove the steps after `step`, up to `now`, and the saved steps among them.

        Before the first step, nothing is removed, and `step` is the one that the journal continues from.

        Args:
            now: the newest step before.
            undone: whether the removed steps count as undone.
        """
        if not self.begun:
            self._from = step
            self.begun = step > 0
            return
        gone = min(max(0, now - step), len(self._proofs))
        del self._proofs[len(self._proofs) - gone :]
        self.undone += gone if undone else 0
        self._saved = {saved for saved in self._saved if saved <= step}
