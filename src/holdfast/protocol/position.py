"""The position of a job, computed from its events by coordinator and readers alike; and workers that a job awaits."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from msgspec.structs import replace

from holdfast.protocol.events import JournalRepaired, ReadEvent, RolledBack, StepCommitted
from holdfast.protocol.names import Struct


class Position(Struct, frozen=True, kw_only=True, tag="Position"):
    """The sum of all events up to `seq`: how far the job is."""

    seq: int = 0
    #: newest committed step that was not rolled back
    step: int = 0
    #: time of the last committed step, rolled back or not, in unix seconds
    step_time: float = 0.0
    #: samples of all steps up to `step`
    samples: int = 0
    #: loss of the last committed step
    loss: float = 0.0
    #: samples of each step, or 0 before the first
    step_samples: int = 0
    #: newest steps that were skipped in a row, except for steps that a loss scale explains
    skipped_in_a_row: int = 0

    def after(self, event: ReadEvent) -> Position:
        """Return the position after one more event.

        A committed step sets the step, loss and time, and adds samples. A roll-back goes back to its step, and
        subtracts samples by the size of the last step. A journal repair replaces everything. Other events change only
        `seq`.
        """
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
                # A roll-back can go to a step before this run, which this sum does not contain.
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
    """A worker or node that the job waits for."""

    #: its name
    who: str
    #: the action that it has not completed
    what: str
    #: seconds of waiting, or None if unknown
    since_s: float | None = None
    #: activity, step and micro-batch of its training thread, or ""
    at: str = ""
    #: workers that wait for it, if known
    for_whom: tuple[str, ...] = ()
    #: its Python frames, the innermost last, if known
    stack: tuple[str, ...] = ()
