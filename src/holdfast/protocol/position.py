"""Where a job stands by its events, one sum for its coordinator, its record and readers; and who holds it up."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from msgspec.structs import replace

from holdfast.protocol.events import JournalRepaired, ReadEvent, RolledBack, StepCommitted
from holdfast.protocol.names import Struct


class Position(Struct, frozen=True, kw_only=True, tag="Position"):
    """What all events up to `seq` add up to.

    `step` is the newest committed one that no roll-back undid, `samples` the sum over all of those. `step_time` (unix
    seconds) and `loss` are those of the step that was committed last, undone or not; `step_samples` is how many samples
    each step has, the same for all of a job, 0 before the first. `skipped_in_a_row` counts the newest steps that were
    skipped without a good one between them, but for those that a loss scale explains.
    """

    seq: int = 0
    step: int = 0
    step_time: float = 0.0
    samples: int = 0
    loss: float = 0.0
    step_samples: int = 0
    skipped_in_a_row: int = 0

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
                    skipped_in_a_row=self.skipped_in_a_row + (not event.overflow) if event.skipped else 0,
                )
            case RolledBack(to_step=step):
                # (It may go beyond the job's own first step, to a checkpoint of the one before, which never counted.)
                undone = max(0, self.step - step) * self.step_samples
                samples = max(0, self.samples - undone)
                return replace(self, seq=event.seq, step=step, samples=samples, skipped_in_a_row=0)
            case JournalRepaired():
                return Position(
                    seq=event.seq,
                    step=event.to_step,
                    step_time=event.step_time,
                    samples=event.samples,
                    loss=nan if event.loss is None else event.loss,
                    step_samples=event.step_samples,
                    skipped_in_a_row=event.skipped_in_a_row,
                )
            case _:
                return replace(self, seq=event.seq)


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """Who is waited for. `who`: a worker or a node, as people name it; `what`: what it is to do.

    since_s: for how long; None: not known. at: where its training thread is (activity, step, micro-batch); for_whom:
    who waits for it; stack: its Python frames, the innermost last. These three are empty where nobody has told.
    """

    who: str
    what: str
    since_s: float | None = None
    at: str = ""
    for_whom: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
