"""The lock of a checkpoint directory: refusals, stale locks, and running jobs that must never end because of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.control.checkpoint_lock import LOCK_NAME, CheckpointLock, LockOwner, locked_directory
from holdfast.errors import BadInputError
from holdfast.storage import LocalStorage, RemoteStorage

RENEW_S, WATCH_S = 0.02, 0.3


class Locks:
    """Creates locks of one directory, and releases all of them at the end."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.printed: list[str] = []
        self._stack = contextlib.ExitStack()

    def __call__(self, job: str, identity: str | None = None) -> CheckpointLock:
        owner = LockOwner(job=job, identity=identity or job, host="here", pid=7)
        lock = CheckpointLock(self.place, owner, self.printed.append, renew_s=RENEW_S, watch_s=WATCH_S)
        self._stack.callback(lock.release)
        return lock

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(params=["folder", "memory"])
def locks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Locks]:
    made = Locks(str(tmp_path / "ck") if request.param == "folder" else f"memory://{tmp_path.name}/ck")
    yield made
    made.close()


def test_a_second_job_is_refused_with_the_name_of_the_first_job(locks: Locks) -> None:
    locks("one").acquire()
    with pytest.raises(BadInputError, match=r"is used by job 'one' \(process 7 on here\), which runs: give another"):
        locks("two").acquire()


def test_a_restart_or_failover_of_the_same_job_takes_the_lock_immediately(locks: Locks) -> None:
    locks("one", "id").acquire()
    begun = time.monotonic()
    assert locks("one", "id").acquire() is None
    assert time.monotonic() - begun < WATCH_S


def test_a_job_with_the_same_name_but_another_identity_is_refused(locks: Locks) -> None:
    locks("one", "first").acquire()
    with pytest.raises(BadInputError, match="is used by job 'one'"):
        locks("one", "second").acquire()


def test_a_lock_that_is_not_renewed_is_stale_despite_a_future_timestamp(tmp_path: Path) -> None:
    left = LockOwner(job="gone", identity="gone", events="/e.jsonl")
    path = tmp_path / LOCK_NAME
    path.write_bytes(msgspec.json.encode(left))
    os.utime(path, (2e9, 2e9))  # A time in the future.
    locks = Locks(str(tmp_path))
    begun = time.monotonic()
    assert locks("two").acquire() == left
    assert time.monotonic() - begun >= WATCH_S
    locks.close()
    assert not path.exists()


def test_a_lock_released_while_it_is_watched_can_be_acquired(locks: Locks) -> None:
    first = locks("one")
    first.acquire()
    first._renew_s = 60.0  # pyright: ignore[reportPrivateUsage] - it is about to end
    time.sleep(2 * RENEW_S)
    first.release()
    assert locks("two").acquire() is None


@pytest.mark.parametrize("content", [b"notes", b"", b"{}", b"\xff", b"x" * 20_000])
def test_an_unreadable_lock_file_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    locks = Locks(str(tmp_path))
    with pytest.raises(BadInputError, match=r"cannot be read: .*if no other job uses this directory, remove the file"):
        locks("two").acquire()
    assert (tmp_path / LOCK_NAME).read_bytes() == content


def test_a_folder_at_the_path_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(BadInputError, match="cannot be read"):
        Locks(str(tmp_path))("two").acquire()


def test_a_dangling_symlink_at_the_path_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    """The name exists but there is no file to read, so retrying would never end."""
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "missing")
    with pytest.raises(BadInputError, match=r"exists, but nothing can be read .*remove the file"):
        Locks(str(tmp_path))("two").acquire()


def test_a_running_job_continues_if_its_lock_file_is_invalid(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(b"notes")
    printed: list[str] = []
    with locked_directory(str(tmp_path), LockOwner(job="j", identity="j"), printed.append, running=True) as stale:
        assert stale is None
    assert "this job trains already, and goes on" in printed[-1]
    with (
        pytest.raises(BadInputError),
        locked_directory(str(tmp_path), LockOwner(job="j", identity="j"), printed.append),
    ):
        pass


def test_a_job_that_loses_its_lock_logs_it_and_keeps_the_new_lock(tmp_path: Path) -> None:
    locks = Locks(str(tmp_path))
    lock = locks("one")
    lock.acquire()
    other = msgspec.json.encode(LockOwner(job="two", identity="two"))
    LocalStorage(tmp_path).write(LOCK_NAME, [other])
    until = time.monotonic() + 20.0
    while not any("job 'two' has taken the lock" in line for line in locks.printed):
        if (tmp_path / LOCK_NAME).read_bytes() != other:  # The other job was renewing its lock at this moment.
            LocalStorage(tmp_path).write(LOCK_NAME, [other])
        assert time.monotonic() < until
        time.sleep(RENEW_S)
    locks.close()
    assert (tmp_path / LOCK_NAME).read_bytes() == other


def test_a_remote_store_without_conditional_writes_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(self: RemoteStorage, path: str, data: bytes) -> bool:
        self.write(path, [data])
        return True

    monkeypatch.setattr(RemoteStorage, "_create_exclusively", always)
    locks = Locks(f"memory://{tmp_path.name}/plain")
    locks("one").acquire()
    assert any("cannot create a file only if it does not exist" in line for line in locks.printed)
    with pytest.raises(BadInputError, match="is used by job 'one'"):
        locks("two").acquire()
    locks.close()


def test_a_job_that_has_moved_to_another_host_keeps_its_lock(tmp_path: Path) -> None:
    """In containers, the coordinators of both hosts may have process id 1."""
    owner = LockOwner(job="one", identity="one", host="here", pid=1)
    moved = LockOwner(job="one", identity="one", host="there", pid=1)
    before, after = (CheckpointLock(str(tmp_path), who, print, renew_s=1000.0, watch_s=0.1) for who in (owner, moved))
    before.acquire()
    after.acquire()
    before.release()
    assert msgspec.json.decode((tmp_path / LOCK_NAME).read_bytes(), type=LockOwner).host == "there"
    after.release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_job_without_a_checkpoint_directory_needs_no_lock() -> None:
    with locked_directory("", LockOwner(job="j", identity="j"), print) as stale:
        assert stale is None
