"""Temporary folders that their owners lock, and the removal of folders without an owner."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control import owned_folders
from holdfast.control.owned_folders import lock_folder, owned_folder, remove_abandoned_folders
from holdfast.errors import BadInputError

#: Creates a folder, prints its name, and waits to be killed.
OWNER = """
import sys, time
from holdfast.control.owned_folders import owned_folder
with owned_folder("test") as folder:
    print(folder, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's temporary folder; its path is short enough for sockets, unlike pytest's paths."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_a_folder_is_private_locked_and_removed_at_the_end(temporary: Path) -> None:
    with owned_folder("test") as folder:
        assert Path(folder).parent == temporary
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        with pytest.raises(BlockingIOError):
            lock_folder(folder)
    assert list(temporary.iterdir()) == []


def test_the_next_owner_of_the_same_kind_removes_a_killed_owners_folder(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with owned_folder("test"):
            assert left.exists(), "the owner of this folder still runs"
        owner.kill()
    assert left.exists()
    with owned_folder("other"):
        assert left.exists(), "this folder is of another kind"
    with owned_folder("test"):
        assert not left.exists()


def test_an_interrupted_removal_is_completed_by_the_next_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x-node.example-1.run").mkdir()
    monkeypatch.setattr("holdfast.control.owned_folders.shutil.rmtree", lambda path, **_: None)
    remove_abandoned_folders(f"{tmp_path}/x-*.run")
    assert not (tmp_path / "x-node.example-1.run").exists()
    monkeypatch.undo()
    remove_abandoned_folders(f"{tmp_path}/x-*.run")
    assert list(tmp_path.iterdir()) == []


def test_only_unlocked_old_folders_that_match_the_pattern_are_removed(tmp_path: Path) -> None:
    for name in ("x-locked", "x-free", "x-new", "y-free"):
        (tmp_path / name).mkdir()
    (tmp_path / "x-file").write_text("")
    (tmp_path / "x-link").symlink_to(tmp_path / "y-free")
    held = lock_folder(str(tmp_path / "x-locked"))
    for name in ("x-locked", "x-free"):
        os.utime(tmp_path / name, (1.0, 1.0))
    remove_abandoned_folders(f"{tmp_path}/x-*", older_s=60.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-file", "x-link", "x-locked", "x-new", "y-free"]
    remove_abandoned_folders(f"{tmp_path}/x-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-file", "x-link", "x-locked", "y-free"]
    os.close(held)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder away")
def test_folders_of_other_users_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "x-theirs").mkdir()
    os.chown(tmp_path / "x-theirs", 4242, 4242)
    remove_abandoned_folders(f"{tmp_path}/x-*")
    assert (tmp_path / "x-theirs").exists()


def test_locking_a_removed_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_folder(str(tmp_path / "gone"))


def test_sockets_are_placed_elsewhere_if_tmpdir_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with owned_folder("test", len("standby-0.sock")) as folder:
        assert len(f"{folder}/standby-0.sock") <= 107
        assert Path(folder).stat().st_mode & 0o777 == 0o700


def test_socket_paths_of_a_node_fit_for_any_length_of_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    for length in range(60, 107):
        base = Path(f"{tmp_path}/{'x' * 120}"[:length])
        base.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(base))
        monkeypatch.setattr(tempfile, "tempdir", None)
        with owned_folder("node", len("a.sock")) as folder:
            assert len(f"{folder}/zygote-1.sock") <= 107


def test_the_error_shows_tmpdir_if_no_folder_can_be_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_folders, "_OTHER_BASES", ())
    with pytest.raises(BadInputError, match=f"is '{temporary}': .*at most 13 "), owned_folder("test", 70):
        pass
