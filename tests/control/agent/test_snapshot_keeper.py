"""The folder of a node's snapshots: its owner, its contents, and its removal."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.snapshots import keeper as keeping
from holdfast.control.agent.snapshots.keeper import SnapshotKeeper, remove_snapshots, snapshot_folder
from holdfast.control.link.snapshots.files import PartWriter, part_path
from holdfast.control.owned_folders import lock_folder, remove_abandoned_folders
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec
from holdfast.protocol.state import SnapshotPart

DEADLINE_S = 60.0
PART = SnapshotPart(term=1, generation=1, step=10, part=0, parts=1, seal=b"s" * 16)


def settings(base: Path, *, every: int = 5, node: str = "a") -> AgentSettings:
    spec = JobSpec(name="job", checkpoint=CheckpointSpec(snapshot_every=every, snapshot_dir=str(base)))
    return AgentSettings(
        spec=spec, coordinator="http://127.0.0.1:1", token="t", node=node, folder=str(base), digest="d"
    )


def write(folder: Path) -> Path:
    file = PartWriter(folder, 4)
    file.body[:] = b"body"
    file.finish("job", PART, b"")
    return part_path(folder, PART)


def test_the_next_agent_of_the_node_finds_the_snapshots_until_the_job_ends(tmp_path: Path) -> None:
    async def lives() -> None:
        folder = Path(snapshot_folder(settings(tmp_path)))
        first = SnapshotKeeper(settings(tmp_path), lambda _: None)
        found = first.open()
        assert found is not None
        assert (found.host, found.parts) == ("127.0.0.1", ())
        write(folder)
        second = SnapshotKeeper(settings(tmp_path), lambda _: None)
        assert second.open() is None, "the owner of the first folder still runs"
        await second.close(remove=True)
        await first.close(remove=False)
        third = SnapshotKeeper(settings(tmp_path), lambda _: None)
        again = third.open()
        assert again is not None
        assert again.parts == (PART,)
        third.forget([PART])
        assert list(folder.iterdir()) == []
        await third.close(remove=True)
        assert not folder.exists()

    asyncio.run(lives())


def test_an_agent_waits_while_another_process_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal can happen between creation and lock; the node must not go without snapshots from then on."""
    folder = Path(snapshot_folder(settings(tmp_path)))
    folder.mkdir(mode=0o700)
    remover = lock_folder(str(folder))

    def remove_now(_: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(remover)
        monkeypatch.undo()

    async def lives() -> None:
        keeper = SnapshotKeeper(settings(tmp_path), lambda _: None)
        assert keeper.open() is not None
        with pytest.raises(BlockingIOError):
            lock_folder(str(folder))
        await keeper.close(remove=True)

    monkeypatch.setattr("holdfast.control.agent.snapshots.keeper.time.sleep", remove_now)
    asyncio.run(lives())
    assert not folder.exists()


def test_an_agent_does_not_wait_until_a_large_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing a gigabyte of shared memory takes longer than an agent waits for the lock."""
    folder = Path(snapshot_folder(settings(tmp_path)))
    folder.mkdir(mode=0o700)
    write(folder)
    removing, opened = threading.Event(), threading.Event()

    def remove_slowly(path: str, **_: bool) -> None:
        removing.set()
        assert opened.wait(DEADLINE_S)
        rmtree(path, ignore_errors=True)

    async def lives() -> None:
        keeper = SnapshotKeeper(settings(tmp_path), lambda _: None)
        found = keeper.open()
        opened.set()
        await asyncio.to_thread(remover.join)
        assert found is not None
        assert found.parts == ()
        assert list(tmp_path.iterdir()) == [folder]
        await keeper.close(remove=True)

    rmtree = shutil.rmtree
    monkeypatch.setattr("holdfast.control.owned_folders.shutil.rmtree", remove_slowly)
    remover = threading.Thread(target=remove_abandoned_folders, args=(f"{tmp_path}/*",))
    remover.start()
    assert removing.wait(DEADLINE_S)
    monkeypatch.undo()
    asyncio.run(lives())


@pytest.mark.parametrize("moment", ["before it is there", "before it is checked"])
def test_a_folder_removed_during_its_creation_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = Path(snapshot_folder(settings(tmp_path)))
    mkdir, lstat = Path.mkdir, Path.lstat

    def mkdir_late(path: Path, *arguments: Any, **options: Any) -> None:
        if path == folder and moment == "before it is there":
            monkeypatch.undo()
            raise FileExistsError(f"{path} was there, and is no more")
        mkdir(path, *arguments, **options)

    def lstat_late(path: Path) -> os.stat_result:
        if path == folder and moment == "before it is checked":
            monkeypatch.undo()
            folder.rmdir()
        return lstat(path)

    async def lives() -> None:
        keeper = SnapshotKeeper(settings(tmp_path), lambda _: None)
        assert keeper.open() is not None
        await keeper.close(remove=True)

    monkeypatch.setattr(Path, "mkdir", mkdir_late)
    monkeypatch.setattr(Path, "lstat", lstat_late)
    asyncio.run(lives())


def test_a_job_without_snapshots_creates_no_folder(tmp_path: Path) -> None:
    async def lives() -> None:
        keeper = SnapshotKeeper(settings(tmp_path, every=0), lambda _: None)
        assert keeper.open() is None
        await keeper.close(remove=True)

    asyncio.run(lives())
    remove_snapshots(settings(tmp_path, every=0))
    assert list(tmp_path.iterdir()) == []


def test_old_folders_of_killed_agents_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, used, fresh = (Path(snapshot_folder(settings(tmp_path, node=node))) for node in ("left", "used", "fresh"))

    async def lives() -> None:
        keeper = SnapshotKeeper(settings(tmp_path, node="used"), lambda _: None)
        keeper.open()
        for folder in (left, fresh):
            folder.mkdir(mode=0o700)
        for folder in (left, used):
            os.utime(folder, (1.0, 1.0))
        other = SnapshotKeeper(settings(tmp_path, node="other"), lambda _: None)
        other.open()
        assert [folder.exists() for folder in (left, used, fresh)] == [False, True, True]
        await keeper.close(remove=True)
        await other.close(remove=True)

    asyncio.run(lives())
    assert [entry.name for entry in tmp_path.iterdir()] == [fresh.name]
    remove_snapshots(settings(tmp_path, node="fresh"))
    assert keeping.LEFT_S > 3600
    assert list(tmp_path.iterdir()) == []
