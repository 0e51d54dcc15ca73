"""What outlives a coordinator: the store, the journal, the checkpoint directory, the memory of nodes."""

from __future__ import annotations

from collections.abc import Callable
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
    """One record with a version, replaced by compare-and-swap; `power_cut` takes what is not on disk.

    `backups`: the last record of each generation. While one of them is in the place of the newest, `outdated` is true.
    """

    def __init__(self) -> None:
        self.backups: list[Record] = []
        self._newest: Record | None = None
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
        if not self.outdated and self.record is not None and self.record.generation < record.generation:
            self.backups.append(self.record)
        self.record = record
        self.sync()
        return self.version

    @property
    def outdated(self) -> bool:
        """Whether a backup is in the place of the newest record."""
        return self._newest is not None

    def restore_backup(self, number: int) -> None:
        """Put a backup in the place of the newest record."""
        self._newest, self.record = self.record, self.backups[number % len(self.backups)]
        self.version += 1
        self.sync()

    def put_back(self) -> None:
        """Put the newest record in its place again."""
        self._newest, self.record = None, self._newest
        self.version += 1
        self.sync()

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
    places: int
    state: int


@dataclass(slots=True)
class CheckpointFile:
    """One checkpoint: each role's state in it, of so many roles, which parts and whether its manifest are there, and
    whether it can be read."""

    step: int
    places: int = 1
    states: dict[int, int] = field(default_factory=dict[int, int])
    sealed: bool = False
    parts: set[int] = field(default_factory=set[int])
    damaged: bool = False


@dataclass(slots=True)
class MemoryPart:
    """One part of a snapshot: the state in it, of which step each of its experts is, and whether it can be read."""

    state: int
    damaged: bool = False
    experts: tuple[int, ...] = ()


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


class Truth:
    """The decided lineage: the state that each step must have led to, by role, of so many places."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int, int], int] = {}

    def right(self, step: int, place: int, places: int, state: int) -> bool:
        """Tell whether this is the state of a step for a role, as far as that is known."""
        return self._states.get((step, place, places), state) == state

    def all_right(self, step: int, file: CheckpointFile) -> bool:
        """The same of all roles in a checkpoint."""
        return all(self.right(step, place, file.places, state) for place, state in file.states.items())

    def hold(self, step: int, place: int, places: int, state: int) -> bool:
        """A worker that counts has the state of a step; tell whether that is right."""
        return self._states.setdefault((step, place, places), state) == state

    def knows(self, step: int) -> bool:
        """Tell whether anybody has ever had the state of a step."""
        return any(at == step for at, _, _ in self._states)

    def forget_after(self, step: int) -> None:
        """What came after a step never counted."""
        self._states = {key: state for key, state in self._states.items() if key[0] <= step}


class Relaid:
    """States under one layout made of those under another, and back: what is put away loses nothing."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[int, ...]] = {}

    def under(self, states: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Return the states of so many places that are the same whole state as these."""
        if len(states) == places:
            return states
        before = self._made.get(states, states)
        if len(before) == places:
            return before
        made = tuple(hash((29, before, places, place)) for place in range(places))
        self._made[made] = before
        return made


def wrong_source(
    source: StateSource | None,
    step: int,
    truth: Truth,
    checkpoints: CheckpointDirectory,
    memory: Callable[[str], NodeMemory],
    places: int,
) -> str:
    """Return how a source of the state of `step` is not what it must be, "" where it is on the lineage.

    Args:
        memory: of a node. places: of a unit, under the layout in force.
    """
    if isinstance(source, SnapshotSource):
        dense = source.parts[: source.dense]
        if source.step != step or not all(dense):
            return "leads to a snapshot that is not whole"
        roles = len(dense) if source.everywhere else places  # (ranks follow each other by places)
        for number, keepers in enumerate(dense):
            for keeper in (source.keepers[place] for place in keepers):
                part = memory(keeper.node).parts.get(source.part(number))  # (it may be gone since)
                if part is not None and not truth.right(step, number % roles, roles, part.state):
                    return f"leads to part {number} on {keeper.node}, which is not on the lineage"
        return ""
    file = checkpoints.files.get(source.name) if isinstance(source, CheckpointSource) else None
    wrong = file is None or not truth.all_right(step, file)
    return f"leads to {file}, which is not on the lineage" if wrong else ""
