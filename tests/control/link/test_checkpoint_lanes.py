"""A requested save does not wait for a save that is still being written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.control.link.checkpoints.lanes import CheckpointLanes
from holdfast.control.link.checkpoints.store import CheckpointStore, PartToWrite
from holdfast.protocol.checkpoints.directory import find_checkpoints
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointKept, CheckpointWritten
from holdfast.storage import LocalStorage

DEADLINE_S = 60.0
WORKER = "n0/0/aa"


def name_of(step: int) -> CheckpointName:
    return CheckpointName(term=1, generation=1, step=step, nonce="ab")


class Lanes:
    """Two write lanes, and a part of step 1 that is written as slowly as the test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: queue.Queue[Any] = queue.Queue()
        self.storage = LocalStorage(folder)
        first, second = (CheckpointStore(self.storage, self.messages.put, worker=WORKER) for _ in range(2))
        self.lanes = CheckpointLanes(first, second)
        self.begun, self.release, self.done = threading.Event(), threading.Event(), threading.Event()
        self.lanes.write(
            PartToWrite(name=name_of(1), worker=WORKER, files={"a": lambda: self._slowly()}, done=self.done.set)
        )
        assert self.begun.wait(DEADLINE_S)

    def next(self, kind: type[Any]) -> Any:
        message = self.messages.get(timeout=DEADLINE_S)
        assert isinstance(message, kind), message
        return message

    def write(self, step: int, content: Iterable[bytes] = (b"new",)) -> CheckpointWritten:
        self.lanes.write(PartToWrite(name=name_of(step), worker=WORKER, files={"a": lambda: content}))
        return self.next(CheckpointWritten)

    def order(self, step: int, written: CheckpointWritten | None = None) -> AcceptCheckpoint:
        files = written.files if written is not None else ()
        return AcceptCheckpoint(term=1, generation=1, step=step, name=name_of(step).folder, files=files)

    def left(self) -> list[str]:
        """Return all existing files, including partly written ones."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def _slowly(self) -> Iterator[bytes]:
        yield b"one "
        self.begun.set()
        assert self.release.wait(DEADLINE_S)
        yield b"two"


def test_a_requested_save_is_written_and_sealed_next_to_a_slow_one(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    written = lanes.write(2)
    lanes.lanes.execute(lanes.order(2, written))
    assert lanes.next(CheckpointKept).step == 2
    assert find_checkpoints(lanes.storage) == [name_of(2)]
    lanes.release.set()
    lanes.lanes.close()
    assert lanes.done.is_set()


def test_a_part_overtaken_by_a_newer_checkpoint_is_dropped_and_not_reported(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    written = lanes.write(2)
    lanes.lanes.execute(lanes.order(2, written))
    lanes.next(CheckpointKept)
    lanes.lanes.execute(lanes.order(2))
    lanes.release.set()
    assert lanes.done.wait(DEADLINE_S), "the files of the part must be removed from memory"
    lanes.lanes.close()
    assert lanes.messages.empty()
    assert not [path for path in lanes.left() if path.startswith(name_of(1).folder)]
    assert lanes.lanes.is_free


def test_all_parts_of_an_overtaken_checkpoint_are_removed(tmp_path: Path) -> None:
    """Two workers of a node write to it. No seal removes it, because it belongs to the same generation."""
    lanes = Lanes(tmp_path)
    lanes.lanes.write(PartToWrite(name=name_of(1), worker="n0/1/bb", files={"b": lambda: [b"x"], "c": lambda: [b"x"]}))
    (tmp_path / name_of(1).folder / "whole").write_bytes(b"the part of another node")
    written = lanes.write(2)
    lanes.lanes.execute(lanes.order(2, written))
    lanes.next(CheckpointKept)
    lanes.lanes.execute(lanes.order(2))
    lanes.release.set()
    lanes.lanes.close()
    assert lanes.messages.empty()
    assert [path.name for path in tmp_path.iterdir()] == [name_of(2).folder]


def test_a_newer_part_that_is_not_accepted_yet_overtakes_no_part(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    lanes.write(2)
    lanes.lanes.execute(lanes.order(1))
    lanes.release.set()
    assert lanes.next(CheckpointWritten).step == 1
    lanes.lanes.close()


def test_parts_of_the_same_checkpoint_are_written_in_order(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    lanes.lanes.write(PartToWrite(name=name_of(1), worker="n0/1/bb", files={"b": lambda: [b"x"]}))
    lanes.write(2)
    assert lanes.left() == [path for path in lanes.left() if not path.endswith("/b")]
    lanes.release.set()
    assert [lanes.next(CheckpointWritten).worker for _ in range(2)] == [WORKER, "n0/1/bb"]
    lanes.lanes.close()


def test_a_pruned_checkpoint_is_removed_after_its_part_is_written(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    lanes.write(2)
    lanes.lanes.execute(PruneCheckpoints(term=1, names=(name_of(1).folder, name_of(2).folder)))
    lanes.release.set()
    lanes.next(CheckpointWritten)
    lanes.lanes.close()
    assert lanes.left() == []


def test_an_invalid_checkpoint_name_is_ignored(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    lanes.lanes.execute(AcceptCheckpoint(term=1, generation=1, step=1, name="../../etc"))
    lanes.lanes.execute(PruneCheckpoints(term=1, names=("../../etc",)))
    lanes.release.set()
    assert lanes.next(CheckpointWritten).step == 1
    lanes.lanes.close()
