from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import checkpoint_dir
from holdfast.checkpoint_dir import DamagedCheckpointError
from holdfast.errors import BadInputError

FILES = {"a.bin": b"a" * 1000, "sub/b.bin": b"b" * 10, "empty": b""}


def write(directory: Path, step: int, nonce: str = "ab") -> str:
    name = checkpoint_dir.writing_name(step, nonce)
    for path, content in FILES.items():
        (directory / name / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / name / path).write_bytes(content)
    assert checkpoint_dir.write_manifest(directory / name, step) == 1010
    return name


def kept(directory: Path, step: int) -> Path:
    return directory / checkpoint_dir.keep(directory, write(directory, step), step)


def test_a_checkpoint_counts_only_under_its_final_name(tmp_path: Path) -> None:
    name = write(tmp_path, 12)
    assert checkpoint_dir.find_checkpoints(tmp_path) == []
    assert checkpoint_dir.keep(tmp_path, name, 12) == "step-00000012"
    found = checkpoint_dir.find_checkpoints(tmp_path)
    assert [(checkpoint.step, checkpoint.name) for checkpoint in found] == [(12, "step-00000012")]
    assert checkpoint_dir.verify(tmp_path / "step-00000012") == 12
    assert checkpoint_dir.keep(tmp_path, name, 12) == "step-00000012"


def test_a_step_that_was_written_again_replaces_the_older_one(tmp_path: Path) -> None:
    kept(tmp_path, 12)
    name = write(tmp_path, 12, "cd")
    (tmp_path / name / "new").write_bytes(b"new")
    checkpoint_dir.write_manifest(tmp_path / name, 12)
    checkpoint_dir.keep(tmp_path, name, 12)
    assert (tmp_path / "step-00000012" / "new").exists()


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoint_dir.find_checkpoints(tmp_path / "none") == []


def test_checkpoints_are_in_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 99):
        kept(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    assert [found.step for found in checkpoint_dir.find_checkpoints(tmp_path)] == [5, 99, 100_000_000]


def test_old_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 3, "aa")
    write(tmp_path, 30, "bb")
    for step in (1, 2, 4):
        kept(tmp_path, step)
    (tmp_path / "mine.txt").write_text("the user's")
    checkpoint_dir.prune(tmp_path, newest=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".writing-00000030-bb", "mine.txt", "step-00000002", "step-00000004"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from([*FILES, checkpoint_dir.MANIFEST]), st.data())
def test_any_file_that_is_cut_short_or_altered_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    checkpoint = kept(tmp_path_factory.mktemp("checkpoint"), 3)
    content = (checkpoint / name).read_bytes()
    how = data.draw(
        st.sampled_from(["cut", "missing", "longer"] if not content else ["cut", "missing", "longer", "bit"])
    )
    if how == "missing" or (how == "cut" and not content):
        (checkpoint / name).unlink()
    elif how == "cut":
        (checkpoint / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif how == "longer":
        (checkpoint / name).write_bytes(content + b"x")
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        (checkpoint / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    if name == checkpoint_dir.MANIFEST and how in ("bit", "longer"):
        # The manifest has no checksum of its own: a change that leaves it readable may go unnoticed.
        return
    with pytest.raises(DamagedCheckpointError):
        checkpoint_dir.verify(checkpoint)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../b"])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    checkpoint = kept(tmp_path, 3)
    manifest = json.loads((checkpoint / checkpoint_dir.MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    (checkpoint / checkpoint_dir.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match="outside"):
        checkpoint_dir.verify(checkpoint)


@pytest.mark.parametrize("name", ["../x", "step-1", "step-00000001/..", "", ".writing-00000001-", "/tmp"])
def test_names_from_elsewhere_are_never_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        checkpoint_dir.keep(tmp_path, name, 1)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadInputError, match="cannot be made"):
        checkpoint_dir.make_directory(file / "below")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(BadInputError, match="not writable"):
            checkpoint_dir.make_directory(tmp_path)
