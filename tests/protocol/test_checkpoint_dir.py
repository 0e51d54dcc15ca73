from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.names import CheckpointName, StoredFile, newest_lineage
from holdfast.storage import LocalStorage

FILES = {"a.bin": b"a" * 1000, "b.bin": b"b" * 10, "empty": b""}


def write(directory: Path, step: int, nonce: str = "ab", *, term: int = 1, generation: int = 1) -> CheckpointName:
    """Write all of a checkpoint but its manifest."""
    name = CheckpointName(term=term, generation=generation, step=step, nonce=nonce)
    for file, content in FILES.items():
        checkpoint_dir.write_file(LocalStorage(directory), name.folder, file, [content])
    return name


def files_of(directory: Path, name: CheckpointName) -> list[StoredFile]:
    return [
        StoredFile(name=file, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for file, content in FILES.items()
    ]


def seal(directory: Path, name: CheckpointName) -> None:
    checkpoint_dir.seal(LocalStorage(directory), name, files_of(directory, name))


def kept(directory: Path, step: int, *, term: int = 1, generation: int = 1) -> Path:
    name = write(directory, step, term=term, generation=generation)
    seal(directory, name)
    return directory / name.folder


def find(directory: Path) -> list[CheckpointName]:
    return checkpoint_dir.find_checkpoints(LocalStorage(directory))


def verify(path: Path) -> int:
    return checkpoint_dir.verify(LocalStorage(path.parent), path.name)


def of_today(directory: Path, step: int) -> None:
    """A kept checkpoint under the name that versions without terms gave it."""
    os.replace(kept(directory, step), directory / f"step-{step:08d}")


def test_a_checkpoint_counts_only_with_its_manifest(tmp_path: Path) -> None:
    name = write(tmp_path, 12)
    assert find(tmp_path) == []
    seal(tmp_path, name)
    assert find(tmp_path) == [name]
    assert verify(tmp_path / "step-00000012-t1-g1-ab") == 12
    seal(tmp_path, name)  # told twice


def test_writers_of_two_lineages_never_change_each_others_files(tmp_path: Path) -> None:
    """Reproducer fence.py: an expelled writer wakes up and seals its checkpoint of the abandoned lineage."""
    abandoned, decided = write(tmp_path, 20, generation=1), write(tmp_path, 20, generation=2)
    seal(tmp_path, decided)
    before = {path: path.read_bytes() for path in (tmp_path / decided.folder).rglob("*") if path.is_file()}
    seal(tmp_path, abandoned)
    checkpoint_dir.remove_unfinished(LocalStorage(tmp_path), abandoned)
    assert {path: path.read_bytes() for path in (tmp_path / decided.folder).rglob("*") if path.is_file()} == before
    assert checkpoint_dir.find_usable_checkpoints(LocalStorage(tmp_path), pytest.fail) == [decided]


def test_a_file_damaged_before_the_seal_is_reported(tmp_path: Path) -> None:
    name = write(tmp_path, 12)
    (tmp_path / name.folder / "a.bin").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="cut short"):
        seal(tmp_path, name)


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert find(tmp_path / "none") == []


def test_checkpoints_are_in_the_order_of_their_lineages(tmp_path: Path) -> None:
    for step, generation in ((100_000_000, 3), (5, 1), (99, 3)):
        kept(tmp_path, step, generation=generation)
    of_today(tmp_path, 7000)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    found = find(tmp_path)
    assert [(name.generation, name.step) for name in found] == [(0, 7000), (1, 5), (3, 99), (3, 100_000_000)]


def test_checkpoints_of_earlier_versions_are_found(tmp_path: Path) -> None:
    for step in (10, 20):
        of_today(tmp_path, step)
    found = checkpoint_dir.find_usable_checkpoints(LocalStorage(tmp_path), pytest.fail)
    assert [name.folder for name in found] == ["step-00000010", "step-00000020"]


def test_damaged_checkpoints_are_reported_and_skipped(tmp_path: Path) -> None:
    """Reproducer prune.py: two damaged ones with higher numbers."""
    for term, step in ((1, 10), (1, 20), (2, 90), (3, 100)):
        path = kept(tmp_path, step, term=term)
        if step > 50:
            os.truncate(path / "a.bin", 10)
    told: list[DamagedCheckpointError] = []
    assert [name.step for name in checkpoint_dir.find_usable_checkpoints(LocalStorage(tmp_path), told.append)] == [
        10,
        20,
    ]
    assert ["step-00000100" in str(error) for error in told] == [True, False]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("[" * 100_000, "no manifest"),
        ('{"format": 2, "step": 1e999, "files": {}}', "no manifest"),
        ('{"format": 2, "step": 9, "files": {"a\\u0000b": {"bytes": 1, "sha256": ""}}}', "names a file that no"),
        ('{"format": 2, "step": 9, "files": {"\\ud800": {"bytes": 1, "sha256": ""}}}', "names a file that no"),
    ],
)
def test_an_invalid_manifest_makes_the_checkpoint_damaged(tmp_path: Path, manifest: str, words: str) -> None:
    checkpoint = kept(tmp_path, 9)
    (checkpoint / "manifest.json").write_text(manifest)
    with pytest.raises(DamagedCheckpointError, match=words):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["manifest.json", "a.bin"])
def test_a_pipe_in_a_checkpoint_is_not_read(tmp_path: Path, name: str) -> None:
    """A pipe without a writer blocked the start of the job forever."""
    checkpoint = kept(tmp_path, 9)
    if name != "manifest.json":
        manifest = checkpoint / "manifest.json"
        value = json.loads(manifest.read_text())
        value["files"][name]["bytes"] = 0  # as large as a pipe is
        manifest.write_text(json.dumps(value))
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        verify(checkpoint)


def test_steps_that_a_later_generation_rolled_back_are_abandoned() -> None:
    def name(generation: int, step: int) -> CheckpointName:
        return CheckpointName(term=1, generation=generation, step=step)

    names = [name(1, 10), name(1, 20), name(1, 30), name(2, 20), name(2, 25), name(3, 40)]
    assert newest_lineage(names) == [name(1, 10), name(2, 20), name(2, 25), name(3, 40)]


def test_only_named_and_older_unfinished_checkpoints_are_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(tmp_path, 3, "aa")
    write(tmp_path, 3, "bb", generation=2)
    write(tmp_path, 3, "cc", generation=3)
    for step in (1, 2):
        kept(tmp_path, step)
    kept(tmp_path, 4, generation=2)
    (tmp_path / "mine.txt").write_text("the user's")
    checkpoint_dir.remove(storage, ["step-00000001-t1-g1-ab", "step-00000009-t1-g1-ab"])
    checkpoint_dir.remove_unfinished(storage, CheckpointName(term=1, generation=2, step=4))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        "mine.txt",
        "step-00000002-t1-g1-ab",
        "step-00000003-t1-g2-bb",
        "step-00000003-t1-g3-cc",
        "step-00000004-t1-g2-ab",
    ]


def test_a_checkpoint_sealed_during_a_cleanup_stays_complete(tmp_path: Path) -> None:
    """An older checkpoint may be sealed after a newer one of its generation: by another thread, or on another node."""

    class Racing(LocalStorage):
        def remove(self, path: str) -> None:
            if not sealed:
                sealed.append(path)
                seal(tmp_path, older)
            super().remove(path)

    sealed: list[str] = []
    older = write(tmp_path, 2, generation=2)
    kept(tmp_path, 4, generation=2)
    write(tmp_path, 1)
    checkpoint_dir.remove_unfinished(Racing(tmp_path), CheckpointName(term=1, generation=2, step=4))
    assert sealed == ["step-00000001-t1-g1-ab"]
    assert [name.step for name in checkpoint_dir.find_usable_checkpoints(LocalStorage(tmp_path), pytest.fail)] == [2, 4]


class FullOfDirectories(LocalStorage):
    """Cannot remove folders, as where the power fails in between, or a file system refuses."""

    def remove(self, path: str) -> None:
        if (self.folder / path).is_dir():
            raise OSError(5, "Input/output error")
        super().remove(path)


def test_a_partly_removed_checkpoint_does_not_count(tmp_path: Path) -> None:
    storage = FullOfDirectories(tmp_path)
    gone, stays = kept(tmp_path, 1), kept(tmp_path, 2)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint_dir.remove(storage, [gone.name])
    assert [name.folder for name in checkpoint_dir.find_checkpoints(storage)] == [stays.name]


def test_a_folder_removed_by_another_node_during_a_cleanup_is_not_an_error(tmp_path: Path) -> None:
    """Two nodes clean up at the same time: one removes a folder that the other has just listed."""

    class Racing(LocalStorage):
        def entries(self, path: str = "") -> list[str]:
            found = super().entries(path)
            if not path:
                LocalStorage(tmp_path).remove(unfinished.folder)
            return found

    unfinished = write(tmp_path, 1)
    newest = kept(tmp_path, 2, generation=2)
    checkpoint_dir.remove_unfinished(Racing(tmp_path), CheckpointName(term=1, generation=2, step=2, nonce="ab"))
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from([*FILES, checkpoint_dir.MANIFEST]), st.data())
def test_every_shortened_or_altered_file_is_detected(
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
        verify(checkpoint)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../b", "a/b", ".hidden"])
def test_a_manifest_cannot_name_files_outside_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = kept(tmp_path, 3)
    manifest = json.loads((checkpoint / checkpoint_dir.MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (checkpoint / checkpoint_dir.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match="names a file that no checkpoint has"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "name",
    ["../x", "step-1", "step-00000001/..", "", ".writing-00000001-ab", "/tmp", "step-000000001", "step-00000001\n"],
)
def test_invalid_names_are_never_used_as_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        checkpoint_dir.remove(LocalStorage(tmp_path), [name])


def test_an_unusable_checkpoint_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadInputError, match="cannot be made"):
        LocalStorage(file / "below").check()
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(BadInputError, match="not writable"):
            LocalStorage(tmp_path).check()
