"""What outlives a coordinator: the store, the journal, the checkpoint directory, the memory of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from random import Random

from holdfast.errors import SupersededError
from holdfast.protocol import events as ev
from holdfast.protocol.checkpoints.names import CheckpointName, parse_name
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record
from holdfast.protocol.state import CheckpointSource, SnapshotPart, SnapshotSource, StateSource


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


@dataclass(frozen=True, slots=True)
class HandedPart:
    """A worker's part of a checkpoint, in its agent's hands."""

    worker: str
    name: CheckpointName
    part: int
    parts: int
    state: int


@dataclass(slots=True)
class CheckpointFile:
    """One checkpoint: the state in it, which parts and whether its manifest are there, and whether it can be read."""

    step: int
    state: int
    sealed: bool = False
    parts: set[int] = field(default_factory=set[int])
    damaged: bool = False


@dataclass(slots=True)
class MemoryPart:
    """One part of a snapshot: the state in it, and whether it can be read."""

    state: int
    damaged: bool = False


@dataclass(slots=True)
class NodeMemory:
    """What a node holds of snapshots: it outlives the workers, and perhaps the agent. `open`: it is given out."""

    parts: dict[SnapshotPart, MemoryPart] = field(default_factory=dict[SnapshotPart, MemoryPart])
    open: bool = False


@dataclass(slots=True)
class CheckpointDirectory:
    """The persistent tier, shared by all nodes."""

    files: dict[str, CheckpointFile] = field(default_factory=dict[str, CheckpointFile])

    def damage_newest(self) -> None:
        """Cut the newest intact checkpoint short that counts."""
        intact = [parse_name(name) for name, file in self.files.items() if file.sealed and not file.damaged]
        if intact:
            self.files[max(intact).folder].damaged = True


def wrong_source(
    source: StateSource | None,
    step: int,
    truth: Mapping[int, int],
    checkpoints: CheckpointDirectory,
    memory: Callable[[str], NodeMemory],
) -> str:
    """Return how a source of the state of `step` is not what it must be, "" where it is on the lineage.

    Args:
        truth: the state of each step on the lineage, as far as it is known. memory: of a node.
    """
    if isinstance(source, SnapshotSource):
        if source.step != step or not all(source.parts):
            return "leads to a snapshot that is not whole"
        for number, places in enumerate(source.parts):
            for keeper in (source.keepers[place] for place in places):
                part = memory(keeper.node).parts.get(source.part(number))  # (it may be gone since)
                if part is not None and truth.get(step, part.state) != part.state:
                    return f"leads to part {number} on {keeper.node}, which is not on the lineage"
        return ""
    file = checkpoints.files.get(source.name) if isinstance(source, CheckpointSource) else None
    wrong = file is None or truth.get(step, file.state) != file.state
    return f"leads to {file}, which is not on the lineage" if wrong else ""
