"""What an earlier version wrote can be read, with the same values: messages, records and journals.

The files are never written again (`write_golden.py` adds new kinds alone). A test that fails here means that the next
version could not read stores and journals of this one, or talk to its agents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from formats import LINES, MESSAGES, examples_of

from holdfast.cli.spec_options import collect_job, job_spec
from holdfast.control.link.snapshots.files import StoredPart, find_parts, part_path
from holdfast.protocol.checkpoints.directory import find_checkpoints, verify
from holdfast.runtime.snapshots.cutting import PartManifest
from holdfast.storage import LocalStorage

FOLDER = Path(__file__).parent
WRITTEN: dict[str, dict[str, dict[str, Any]]] = {
    **json.loads((FOLDER / "messages.json").read_text()),
    **json.loads((FOLDER / "lines.json").read_text()),
}
FORMATS = MESSAGES | LINES


class Row(list[Any]):
    """The fields of an array-like struct. A later version may append some."""


def plain(value: Any) -> Any:
    """Return a value as the files have it, with rows for array-like structs."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            fields = {field.encode_name: plain(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return Row((tag | fields).values()) if config.array_like else tag | fields
        case dict():
            return {str(msgspec.to_builtins(key)): plain(one) for key, one in value.items()}
        case list() | tuple() | frozenset():
            return [plain(one) for one in value]
        case _:
            return msgspec.to_builtins(value)


def lacks(wanted: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are not found, or are others. What is new may be added."""
    if isinstance(wanted, list) and isinstance(found, Row):
        found = found[: len(wanted)]
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            yield from lacks(value, found.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list | tuple) and len(wanted) == len(found):
        for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from lacks(one, other, f"{path}[{place}]")
    elif wanted != found:
        yield f"{path}: {wanted!r} is {found!r}"


@pytest.mark.parametrize("name", FORMATS)
def test_data_of_an_earlier_version_is_read_with_the_same_values(name: str) -> None:
    read_binary, read_line = msgspec.msgpack.Decoder(FORMATS[name]), msgspec.json.Decoder(FORMATS[name])
    for kind, written in WRITTEN[name].items():
        value = (
            read_binary.decode(bytes.fromhex(written["bytes"]))
            if "bytes" in written
            else read_line.decode(written["line"])
        )
        assert list(lacks(written["fields"], plain(value))) == [], kind


@pytest.mark.parametrize("name", FORMATS)
def test_each_kind_has_a_golden_example(name: str) -> None:
    """A new kind: `python tests/golden/write_golden.py`."""
    kinds = {kind.split()[0] for kind, _ in examples_of(FORMATS[name])}
    assert kinds - {kind.split()[0] for kind in WRITTEN[name]} == set()


@pytest.mark.parametrize("name", FORMATS)
def test_this_version_writes_the_same_data_as_an_earlier_version(name: str) -> None:
    """The next version can be undone: this one reads what that wrote."""
    for kind, value in examples_of(FORMATS[name]):
        assert list(lacks(WRITTEN[name][kind]["fields"], plain(value))) == [], kind


def test_a_renamed_tag_is_detected() -> None:
    assert list(lacks({"type": "Hello", "a": [1, 2]}, {"type": "Hallo", "a": [1, 3]})) == [
        ".type: 'Hello' is 'Hallo'",
        ".a[1]: 2 is 3",
    ]


def test_a_field_may_be_appended_to_an_array_like_struct() -> None:
    longer = msgspec.defstruct("Longer", [("step", int), ("time", float), ("new", int, 0)], array_like=True)
    assert list(lacks([[3, 0.5]], plain((longer(3, 0.5),)))) == []
    assert list(lacks([[3, 0.5]], plain((longer(4, 0.5),)))) == ["[0][0]: 3 is 4"]
    assert list(lacks([[3, 0.5]], plain(([3, 0.5, 0],)))) == ["[0]: [3, 0.5] is [3, 0.5, 0]"]


def test_a_checkpoint_of_an_earlier_version_is_complete() -> None:
    storage = LocalStorage(FOLDER / "checkpoint")
    (name,) = find_checkpoints(storage)
    assert verify(storage, name.folder) == name.step == 12


def test_snapshot_parts_of_an_earlier_version_are_found_and_read(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / "snapshot", tmp_path / "snapshot"))
    damaged: list[str] = []
    parts = find_parts(folder, "tiny_moe", lambda path, why: damaged.append(why))
    assert damaged == []
    assert sorted((part.step, part.part, part.parts) for part in parts) == [(6, 0, 2), (6, 1, 2)]
    for part in parts:
        stored = StoredPart(part_path(folder, part), "tiny_moe")
        assert msgspec.msgpack.decode(stored.manifest, type=PartManifest).state
        stored.close()


def test_a_job_file_of_an_earlier_version_gives_the_same_job() -> None:
    spec = job_spec(collect_job(str(FOLDER / "job.toml"), (), (), {}))
    found = json.loads(msgspec.json.encode(msgspec.to_builtins(spec)))
    assert list(lacks(json.loads((FOLDER / "job.json").read_text()), found)) == []
