"""A worker hands its checkpoint part to its agent in files that outlive it and say whether more will come."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.link.checkpoints.spool import PartSpool, claim_part
from holdfast.control.link.checkpoints.store import CheckpointStore, PartToWrite
from holdfast.control.link.framing import PartHanded
from holdfast.protocol.checkpoints.directory import find_checkpoints, seal
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.messages.worker import CheckpointUnwritten, CheckpointWritten
from holdfast.storage import LocalStorage

DEADLINE_S = 60.0
NAME = CheckpointName(term=1, generation=2, step=3, nonce="ab")
WORKER = "n0/1/aa"


class Records:
    """The callbacks' records."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    def next(self, kind: type[Any]) -> Any:
        message = self.messages.get(timeout=DEADLINE_S)
        assert isinstance(message, kind)
        return message


def part(content: bytes = b"the state") -> PartToWrite:
    files = {"part-00001-of-00002.safetensors": lambda: [content[:3], content[3:]], "samples.json": lambda: [b"{}"]}
    return PartToWrite(name=NAME, worker=WORKER, files=files, part=1, parts=2, stall_s=0.5)


def test_a_part_reaches_storage_after_its_worker_has_ended(tmp_path: Path) -> None:
    folder, records = tmp_path / "n0.parts", Records()
    folder.mkdir()
    spool = PartSpool(folder, WORKER, records.messages.put)
    assert spool.is_free
    spool.write(part())
    handed = records.next(PartHanded)
    assert (handed.part, handed.parts, handed.stall_s, handed.name) == (1, 2, 0.5, NAME.folder)
    spool.close()
    assert not spool.is_free
    taken = claim_part(handed, folder)
    assert not PartSpool(folder, "n0/1/bb", records.messages.put).is_free, "a follower must see this as well"
    assert PartSpool(folder, "n0/0/cc", records.messages.put).is_free
    storage = LocalStorage(tmp_path / "kept")
    store = CheckpointStore(storage, records.messages.put, worker="n0/0/0")
    store.write(taken)
    written = records.next(CheckpointWritten)
    assert (written.worker, written.part, written.parts) == (WORKER, 1, 2)
    assert [file.name for file in written.files] == ["part-00001-of-00002.safetensors", "samples.json"]
    assert list(folder.iterdir()) == []
    seal(storage, NAME, written.files)
    assert find_checkpoints(storage) == [NAME]
    assert storage.read(f"{NAME.folder}/part-00001-of-00002.safetensors", 99) == b"the state"
    store.close()


def test_partly_written_files_of_the_same_local_rank_are_removed(tmp_path: Path) -> None:
    (tmp_path / "writing-1-x").mkdir()
    (tmp_path / "writing-0-x").mkdir()
    assert PartSpool(tmp_path, WORKER, print).is_free
    assert [path.name for path in tmp_path.iterdir()] == ["writing-0-x"]


def test_an_unreported_part_of_a_dead_worker_is_removed(tmp_path: Path) -> None:
    records = Records()
    spool = PartSpool(tmp_path, WORKER, records.messages.put)
    spool.write(part())
    handed = records.next(PartHanded)
    spool.close()
    assert PartSpool(tmp_path, "n0/1/bb", records.messages.put).is_free, "the worker was killed before it could report"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        claim_part(handed, tmp_path)


def test_a_part_that_cannot_be_spooled_is_reported_as_unwritten(tmp_path: Path) -> None:
    records = Records()
    folder = tmp_path / "gone" / "file"
    folder.parent.write_text("in the way")
    spool = PartSpool(folder, WORKER, records.messages.put)
    spool.write(part())
    unwritten = records.next(CheckpointUnwritten)
    assert (unwritten.step, unwritten.name, unwritten.worker) == (3, NAME.folder, WORKER)
    spool.close()
    assert spool.is_free


def test_an_invalid_checkpoint_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        claim_part(PartHanded(worker=WORKER, name="../../etc", files=()), tmp_path)


def test_a_node_does_not_write_faster_than_its_rate_limit(tmp_path: Path) -> None:
    records = Records()
    store = CheckpointStore(LocalStorage(tmp_path), records.messages.put, worker="n0/0/0", rate=1e5)
    store.write(PartToWrite(name=NAME, worker=WORKER, files={"a": lambda: [b"x" * 10_000] * 3}))
    assert records.next(CheckpointWritten).seconds >= 0.3
    store.close()


def test_a_write_slowed_by_the_rate_limit_does_not_count_as_stalled(tmp_path: Path) -> None:
    records = Records()
    store = CheckpointStore(LocalStorage(tmp_path), records.messages.put, worker="n0/0/0", rate=1e4, stalled_s=1.0)
    store.write(PartToWrite(name=NAME, worker=WORKER, files={"a": lambda: [b"x" * 20_000]}))
    assert records.next(CheckpointWritten).seconds >= 2
    store.close()
