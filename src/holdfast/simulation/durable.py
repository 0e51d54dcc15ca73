"""What outlives a coordinator: the store, the journal, the checkpoint directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from random import Random

from holdfast.errors import SupersededError
from holdfast.protocol import events as ev
from holdfast.protocol.checkpoint_names import parse_name
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record


class SimStore:
    """One record with a version, replaced by compare-and-swap; `power_cut` takes what is not on disk."""

    def __init__(self) -> None:
        self.version = 0
        self.record: Record | None = None
        #: power cuts so far: what was on its way to the store then has never come
        self.cuts = 0
        self._on_disk: tuple[int, Record | None] = (0, None)

    def swap(self, record: Record, version: int) -> int:
        """Replace the record if it still has `version`, on disk; return the new version.

        Raises:
            SupersededError: it has not.
        """
        if version != self.version:
            raise SupersededError(f"version {version} is not {self.version}")
        self.version += 1
        self.record = record
        self.sync()
        return self.version

    def sync(self) -> None:
        """Have the record on disk."""
        self._on_disk = (self.version, self.record)

    def power_cut(self) -> None:
        """Go back to what is on disk."""
        self.version, self.record = self._on_disk
        self.cuts += 1


class SimJournal:
    """The job's events; fenced by its length, as the file is. `synced` are on disk; `edited`: `cut` was used."""

    def __init__(self) -> None:
        self.events: list[ev.AnyEvent] = []
        self.synced = 0
        self.edited = False

    def append(self, event: ev.AnyEvent, length: int) -> int:
        """Append an event if the journal still has `length`; return the new length.

        Raises:
            SupersededError: somebody else appended.
        """
        if length != len(self.events):
            raise SupersededError(f"length {length} is not {len(self.events)}")
        self.events.append(event)
        return length + 1

    def sync(self) -> None:
        """Have all events on disk."""
        self.synced = len(self.events)

    def power_cut(self, rng: Random) -> None:
        """Lose events that are not on disk, the newest ones first: as many as chance will have it."""
        del self.events[rng.randint(self.synced, len(self.events)) :]

    def position(self) -> Position:
        """Return what the events so far add up to."""
        return reduce(Position.after, self.events, Position())


@dataclass(slots=True)
class CheckpointFile:
    """One checkpoint: the state in it, and whether it can be read."""

    step: int
    state: int
    damaged: bool = False


@dataclass(slots=True)
class CheckpointDirectory:
    """The persistent tier, shared by all nodes."""

    files: dict[str, CheckpointFile] = field(default_factory=dict[str, CheckpointFile])

    def damage_newest(self) -> None:
        """Cut the newest intact checkpoint short that has its final name."""
        intact = {file: parse_name(file) for file in self.files if not self.files[file].damaged}
        kept = [name for file, name in intact.items() if name.final == file]
        if kept:
            self.files[max(kept).final].damaged = True
