"""Where a job stands by its events: one sum, for the running coordinator, its record and whoever reads the journal."""

from __future__ import annotations

from math import nan

from msgspec.structs import replace

from holdfast.protocol.events import JournalRepaired, ReadEvent, RolledBack, StepCommitted
from holdfast.protocol.names import Struct


class Position(Struct, frozen=True, kw_only=True):
    """What all events up to `seq` add up to.

    `step` is the newest committed one that no roll-back undid, `samples` the sum over all of those. `step_time` (unix
    seconds) and `loss` are those of the step that was committed last, undone or not; `step_samples` is how many samples
    each step has, the same for all of a job, 0 before the first.
    """

    seq: int = 0
    step: int = 0
    step_time: float = 0.0
    samples: int = 0
    loss: float = 0.0
    step_samples: int = 0

    def after(self, event: ReadEvent) -> Position:
        """Return where the job stands after one more event."""
        match event:
            case StepCommitted():
                return Position(
                    seq=event.seq,
                    step=event.step,
                    step_time=event.time,
                    samples=self.samples + event.samples,
                    loss=nan if event.loss is None else event.loss,
                    step_samples=event.samples,
                )
            case RolledBack(to_step=step):
                # (It may go beyond the job's own first step, to a checkpoint of the one before, which never counted.)
                undone = max(0, self.step - step) * self.step_samples
                return replace(self, seq=event.seq, step=step, samples=max(0, self.samples - undone))
            case JournalRepaired():
                return Position(
                    seq=event.seq,
                    step=event.to_step,
                    step_time=event.step_time,
                    samples=event.samples,
                    loss=nan if event.loss is None else event.loss,
                    step_samples=event.step_samples,
                )
            case _:
                return replace(self, seq=event.seq)
