"""An accepted checkpoint is on disk: each test fails if one sync is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import storage as module
from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.storage import LocalStorage, storage_at
from synced_disk import Disk

NAME = parse_name("step-00000005-t1-g1-ab")
FILES = {"part-00000-of-00001.safetensors": b"x" * 100, "state.msgpack": b"y" * 10}


def test_a_sealed_checkpoint_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new folder's own entry in the checkpoint directory must be synced too."""
    disk = Disk(tmp_path, monkeypatch)
    storage = storage_at(str(tmp_path / "above" / "checkpoints"))
    storage.check()
    assert disk.last_sync(".") >= 0, "the new folder above the checkpoint directory must be synced"
    assert disk.last_sync("above") >= 0, "the new checkpoint directory must be synced"
    root, folder = "above/checkpoints", f"above/checkpoints/{NAME.folder}"
    written = [directory.write_file(storage, NAME.folder, name, [content]) for name, content in FILES.items()]
    for name, content in FILES.items():
        named = disk.check_named(f"{folder}/{name}", len(content))
        assert disk.last_sync(folder) > named, "a reported part must be on disk under its name"
    assert disk.last_sync(root) > disk.check_named(f"{folder}/state.msgpack", 10), (
        "the folder of a reported part must be on disk"
    )
    before = len(disk.done)
    directory.seal(storage, NAME, written)
    sealed = disk.check_named(f"{folder}/manifest.json", storage.size(f"{NAME.folder}/manifest.json"))
    assert before <= sealed < min(disk.last_sync(folder), disk.last_sync(root))


def test_a_folder_made_by_another_process_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    disk = Disk(tmp_path, monkeypatch)
    LocalStorage(tmp_path).write("a/b/file", [b"x"])
    assert all(disk.last_sync(path) > disk.check_named("a/b/file", 1) for path in (".", "a", "a/b"))


@pytest.mark.parametrize("linked", [True, False])
def test_a_copied_file_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, linked: bool) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/file", [b"content"])
    disk = Disk(tmp_path, monkeypatch)
    if linked:
        storage.copy("a/file", "best/file")
        named = disk.named_at("best/file")
    else:

        def refuse(*_: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        storage.copy("a/file", "best/file")
        named = disk.check_named("best/file", 7)
    assert storage.read("best/file", 99) == b"content"
    assert min(disk.last_sync("best"), disk.last_sync(".")) > named


def test_a_large_file_is_synced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a slow disk would look like a hanging one."""
    monkeypatch.setattr(module, "_SYNC_BYTES", 10)
    disk = Disk(tmp_path, monkeypatch)
    LocalStorage(tmp_path).write("file", [b"x" * 6] * 5)
    assert [size for what, path, size in disk.done if what == "sync" and path != "."] == [12, 24, 30]
