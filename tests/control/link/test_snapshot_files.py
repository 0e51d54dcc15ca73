"""Parts of snapshots as files: they read back as written, and altered files are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.control.link.snapshots import files
from holdfast.control.link.snapshots.files import (
    CHUNK_BYTES,
    DamagedPartError,
    PartWriter,
    StoredPart,
    find_parts,
    make_folder,
    part_path,
    read_body,
    remove_abandoned,
)
from holdfast.protocol.state import SnapshotPart

PART = SnapshotPart(term=1, generation=2, step=30, part=1, parts=3, seal=b"s" * 16)
MANIFEST = b"what it is"


def write(folder: Path, body: bytes, part: SnapshotPart = PART, job: str = "job") -> Path:
    file = PartWriter(folder, len(body))
    file.body[:] = body
    file.finish(job, part, MANIFEST)
    return part_path(folder, part)


def read(path: Path) -> bytes:
    stored = StoredPart(path, "job")
    try:
        assert stored.header.snapshot == PART
        assert stored.manifest == MANIFEST
        found = bytearray(stored.header.body_bytes)
        read_body(stored, lambda start, length: [memoryview(found)[start : start + length]])
        return bytes(found)
    finally:
        stored.close()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_a_part_reads_back_as_written(tmp_path: Path, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    path = write(tmp_path, body[:size])
    assert read(path) == body[:size]
    assert find_parts(tmp_path, "job", lambda *_: pytest.fail("the part is complete")) == [PART]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "the failed write must leave no files"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_part_with_a_flipped_bit_is_refused(tmp_path: Path, place: int, bit: int) -> None:
    path = write(tmp_path, b"0123456789" * 40)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(DamagedPartError):
        read(path)


def test_truncated_and_foreign_parts_are_removed_and_reported(tmp_path: Path) -> None:
    whole = write(tmp_path, b"x" * 100)
    short = write(tmp_path, b"x" * 100, SnapshotPart(term=1, generation=2, step=30, part=0, parts=3, seal=b"s" * 16))
    short.write_bytes(short.read_bytes()[:-9])
    other = SnapshotPart(term=1, generation=2, step=30, part=2, parts=3, seal=b"s" * 16)
    foreign = write(tmp_path, b"y", other, job="other")
    unfinished = tmp_path / f"{files.WRITING}7-x"
    unfinished.write_bytes(b"half")
    (tmp_path / "of-somebody-else").mkdir()
    reasons: dict[str, str] = {}
    assert find_parts(tmp_path, "job", lambda path, why: reasons.__setitem__(path.name, why)) == [PART]
    assert {short.name, foreign.name, unfinished.name} <= reasons.keys()
    assert "of the job other" in reasons[foreign.name]
    assert whole.exists()
    assert not any(path.exists() for path in (short, foreign, unfinished))


def test_a_write_without_enough_disk_space_fails_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=files.SPARE_BYTES + 99))
    with pytest.raises(OSError, match="no room for 100 bytes: 99 are free for use"):
        PartWriter(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []
    file = PartWriter(tmp_path, 99)
    file.abandon()
    file.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "deep" / "mine"
    make_folder(mine)
    make_folder(mine)
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o755)
    with pytest.raises(OSError, match="no other user may open"):
        make_folder(mine)
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    with pytest.raises(OSError, match="no other user may open"):
        make_folder(tmp_path / "link")


def test_unfinished_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"{files.WRITING}{dead.pid}-{PART.name}"
    left.write_bytes(b"half")
    under_way = PartWriter(tmp_path, 8)
    remove_abandoned(tmp_path)
    assert not left.exists()
    under_way.finish("job", PART, MANIFEST)
    assert find_parts(tmp_path, "job", lambda *_: pytest.fail("the part is complete")) == [PART]
