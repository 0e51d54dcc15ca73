"""What outlives a coordinator: the store, the journal, the checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan

from holdfast.coordination.inputs import JournalTail
from holdfast.protocol import events as ev
from holdfast.protocol.record import Record


class SupersededError(Exception):
    """Another coordinator leads the job: this one must stop at once."""


class MemoryStore:
    """One record with a version, replaced by compare-and-swap."""

    def __init__(self) -> None:
        self.version = 0
        self.record: Record | None = None

    def swap(self, record: Record, version: int) -> int:
        """Replace the record if it still has `version`; return the new version.

        Raises:
            SupersededError: it has not.
        """
        if version != self.version:
            raise SupersededError(f"version {version} is not {self.version}")
        self.version += 1
        self.record = record
        return self.version


class MemoryJournal:
    """The job's events; fenced by its length, as the file is."""

    def __init__(self) -> None:
        self.events: list[ev.AnyEvent] = []

    def append(self, event: ev.AnyEvent, length: int) -> int:
        """Append an event if the journal still has `length`; return the new length.

        Raises:
            SupersededError: somebody else appended.
        """
        if length != len(self.events):
            raise SupersededError(f"length {length} is not {len(self.events)}")
        self.events.append(event)
        return length + 1

    def tail(self) -> JournalTail:
        """Return what a coordinator must know of the events so far."""
        return tail_of(self.events)


def tail_of(events: Iterable[ev.AnyEvent]) -> JournalTail:
    """Sum up events as the journal's file does."""
    seq = step = samples = announced = 0
    step_time = loss = 0.0
    history: dict[int, tuple[float, float, int]] = {}
    for event in events:
        seq = event.seq
        if isinstance(event, ev.StepCommitted):
            samples += event.samples
            step, step_time = event.step, event.time
            loss = nan if event.loss is None else event.loss
            history[step] = (step_time, loss, samples)
        elif isinstance(event, ev.RolledBack):
            step = event.to_step
            _, loss, samples = history.get(step, (0.0, 0.0, 0))
        elif isinstance(event, ev.EpochStarted):
            announced = event.epoch
    return JournalTail(seq=seq, step=step, step_time=step_time, samples=samples, loss=loss, epoch_announced=announced)


@dataclass(slots=True)
class CheckpointFile:
    """One checkpoint: the state in it, and whether it can be read."""

    step: int
    state: int
    epoch: int
    final: bool = False
    damaged: bool = False


@dataclass(slots=True)
class CheckpointDirectory:
    """The persistent tier, shared by all nodes."""

    files: dict[str, CheckpointFile] = field(default_factory=dict[str, CheckpointFile])

    def damage_newest(self) -> None:
        """Cut the newest intact checkpoint short."""
        intact = [file for file in self.files.values() if file.final and not file.damaged]
        if intact:
            max(intact, key=lambda file: file.step).damaged = True
