"""The simulated data that outlives a coordinator: store, journal, checkpoints and node memory."""

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
    """A record with a version, replaced by compare-and-swap; `power_cut` discards unsynced data.

    `backups` has the last record of each generation. `outdated` is true while a backup replaces the newest record.
    """

    def __init__(self) -> None:
        self.backups: list[Record] = []
        self._newest: Record | None = None
        self.version = 0
        self.record: Record | None = None
        #: The number of power cuts; a write in progress during one is lost.
        self.cuts = 0
        self._on_disk: tuple[int, Record | None] = (0, None)

    def swap(self, record: Record, version: int) -> int:
        """Replace and sync the record if it still has `version`; return the new version.

        Raises:
            SupersededError: The record has another version.
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
        """Whether a backup replaces the newest record."""
        return self._newest is not None

    def restore_backup(self, number: int) -> None:
        """Replace the newest record by a backup."""
        self._newest, self.record = self.record, self.backups[number % len(self.backups)]
        self.version += 1
        self.sync()

    def put_back(self) -> None:
        """Restore the newest record."""
        self._newest, self.record = None, self._newest
        self.version += 1
        self.sync()

    def sync(self) -> None:
        """Sync the record to disk."""
        self._on_disk = (self.version, self.record)

    def power_cut(self) -> None:
        """Restore the record on disk."""
        self.version, self.record = self._on_disk
        self.cuts += 1


class SimJournal:
    """The job's events, fenced by their number like the real file; the first `synced` events are on disk."""

    def __init__(self) -> None:
        self.events: list[ev.AnyEvent] = []
        self.synced = 0
        self.edited = False

    def append(self, event: ev.AnyEvent, length: int) -> int:
        """Append an event if the journal still has `length`; return the new length.

        Raises:
            SupersededError: Another process has appended an event.
        """
        if length != len(self.events):
            raise SupersededError(f"length {length} is not {len(self.events)}")
        self.events.append(event)
        return length + 1

    def sync(self) -> None:
        """Sync all events to disk."""
        self.synced = len(self.events)

    def power_cut(self, rng: Random) -> None:
        """Lose a random number of the newest unsynced events."""
        del self.events[rng.randint(self.synced, len(self.events)) :]

    def position(self) -> Position:
        """Return the position after all events so far."""
        return reduce(Position.after, self.events, Position())


@dataclass(frozen=True, slots=True)
class HandedPart:
    """A worker's checkpoint part, handed to its agent."""

    worker: str
    name: CheckpointName
    part: int
    parts: int
    places: int
    state: int


@dataclass(slots=True)
class CheckpointFile:
    """One checkpoint: the state of each of `places` roles, the written parts, the seal and damage."""

    step: int
    places: int = 1
    states: dict[int, int] = field(default_factory=dict[int, int])
    sealed: bool = False
    parts: set[int] = field(default_factory=set[int])
    damaged: bool = False


@dataclass(slots=True)
class MemoryPart:
    """One snapshot part: its state, the step of each expert, and whether it is damaged."""

    state: int
    damaged: bool = False
    experts: tuple[int, ...] = ()


@dataclass(slots=True)
class NodeMemory:
    """A node's snapshot parts, which outlive the workers and perhaps the agent; other nodes can read if `open`."""

    parts: dict[SnapshotPart, MemoryPart] = field(default_factory=dict[SnapshotPart, MemoryPart])
    open: bool = False


@dataclass(slots=True)
class CheckpointDirectory:
    """The persistent tier, shared by all nodes."""

    files: dict[str, CheckpointFile] = field(default_factory=dict[str, CheckpointFile])

    def damage_newest(self) -> None:
        """Truncate the newest intact sealed checkpoint."""
        intact = [parse_name(name) for name, file in self.files.items() if file.sealed and not file.damaged]
        if intact:
            self.files[max(intact).folder].damaged = True


class Truth:
    """The decided lineage: the correct state after each step, by role and number of roles."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int, int], int] = {}

    def right(self, step: int, place: int, places: int, state: int) -> bool:
        """Return whether this is the correct state of a role after a step, or the correct state is unknown."""
        return self._states.get((step, place, places), state) == state

    def all_right(self, step: int, file: CheckpointFile) -> bool:
        """Return whether the states of all roles in a checkpoint are correct, as far as known."""
        return all(self.right(step, place, file.places, state) for place, state in file.states.items())

    def hold(self, step: int, place: int, places: int, state: int) -> bool:
        """Record a member's state after a step; return whether it is correct."""
        return self._states.setdefault((step, place, places), state) == state

    def knows(self, step: int) -> bool:
        """Return whether any worker has had the state of a step."""
        return any(at == step for at, _, _ in self._states)

    def forget_after(self, step: int) -> None:
        """Forget the states of later steps, which have been undone."""
        self._states = {key: state for key, state in self._states.items() if key[0] <= step}


class Relaid:
    """Converts states between layouts without loss."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[int, ...]] = {}

    def under(self, states: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Return the same complete state, divided into `places` parts."""
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
    """Return the error of a source of the state of `step`, or "" if it is on the lineage.

    Args:
        source: The source to check.
        step: The step that the source must have.
        truth: The decided lineage.
        checkpoints: The checkpoint directory.
        memory: Returns the memory of a node.
        places: The number of workers of a replica group under the current layout.
    """
    if isinstance(source, SnapshotSource):
        dense = source.parts[: source.dense]
        if source.step != step or not all(dense):
            return "leads to an incomplete snapshot"
        # Otherwise consecutive ranks have consecutive roles.
        roles = len(dense) if source.everywhere else places
        for number, keepers in enumerate(dense):
            for keeper in (source.keepers[place] for place in keepers):
                # The part may have been lost since.
                part = memory(keeper.node).parts.get(source.part(number))
                if part is not None and not truth.right(step, number % roles, roles, part.state):
                    return f"leads to part {number} on {keeper.node}, which is not on the lineage"
        return ""
    file = checkpoints.files.get(source.name) if isinstance(source, CheckpointSource) else None
    wrong = file is None or not truth.all_right(step, file)
    return f"leads to {file}, which is not on the lineage" if wrong else ""
