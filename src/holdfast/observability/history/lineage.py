"""The steps of a job's lineage by its events: how far it has come, which of them are proven, what it may go back to."""

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
    """The committed steps that no roll-back has undone.

    `position`: what all events so far add up to. `begun`: a step was committed, or the first one to go on from is
    known. `undone`: steps that were rolled back.
    """

    def __init__(self) -> None:
        """Stand before the first event."""
        self.position = Position()
        self.begun = False
        self.undone = 0
        #: of each step since the first one counted here: whether its samples are proven
        self._proofs: list[bool] = []
        self._proves = False
        self._saved: set[int] = set()
        #: the step with which this journal began, whose checkpoint another one may tell of
        self._from = 0
        self._all_known = True
        #: the newest step before the coordinator was killed: a newer checkpoint than those that it announced may exist
        self._last_before_kill = 0

    @property
    def counted(self) -> int:
        """How many steps there are, on the lineage, in this journal."""
        return len(self._proofs)

    @property
    def proven(self) -> int:
        """How many of them are proven."""
        return sum(self._proofs)

    def prove(self) -> None:
        """The step that is taken in next has its samples, each exactly once."""
        self._proves = True

    def may_go_back_to(self, step: int) -> bool:
        """Tell whether there may be a checkpoint or a snapshot of a step, as far as the events say."""
        unannounced = max(self._saved, default=0) < step <= self._last_before_kill
        return not self.begun or step <= self._from or step in self._saved or unannounced or not self._all_known

    def take(self, event: ReadEvent) -> None:
        """Take in the next event."""
        before, self.position = self.position, self.position.after(event)
        match event:
            case StepCommitted():
                self._proofs.append(self._proves)
                self.begun = True
                self._last_before_kill = 0
            case CoordinatorRestarted():
                self._last_before_kill = self.position.step
            case RolledBack(to_step=step):
                self._back(before.step, step)
            case JournalRepaired(to_step=step):
                self._all_known = False
                self._back(before.step, min(step, before.step), undone=False)
                self._proofs += [False] * max(0, step - before.step)
                self.begun = True
            case CheckpointSaved(step=step) | SnapshotSaved(step=step):
                self._saved.add(step)
            case _:
                pass
        self._proves = False

    def _back(self, now: int, step: int, *, undone: bool = True) -> None:
        if not self.begun:
            self._from = step
            self.begun = step > 0
            return
        gone = min(max(0, now - step), len(self._proofs))
        del self._proofs[len(self._proofs) - gone :]
        self.undone += gone if undone else 0
        self._saved = {saved for saved in self._saved if saved <= step}
