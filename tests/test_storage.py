"""A folder and a URL behave the same, and an unusable location is reported before training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import storage as module
from holdfast.errors import BadInputError
from holdfast.storage import RemoteStorage, Storage, is_url, storage_at

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["folder", "file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    places = {"folder": str(tmp_path / "c"), "file": f"file://{tmp_path}/c", "memory": f"memory://{tmp_path}/c"}
    return storage_at(places[request.param])


def test_written_files_are_listed_and_read(storage: Storage) -> None:
    storage.check()
    assert storage.entries() == []
    storage.write("a/one", [b"12", memoryview(b"345")])
    storage.write("a/two", [])
    storage.write("b", [b"x"])
    assert storage.entries() == ["a", "b"]
    assert storage.entries("a") == ["one", "two"]
    assert storage.entries("nowhere") == []
    assert (storage.size("a/one"), storage.read("a/one", 5)) == (5, b"12345")
    with storage.open("a/one") as file:
        file.seek(3)
        assert file.read() == b"45"
    storage.write("a/one", [b"other"])
    assert storage.read("a/one", 99) == b"other"
    storage.copy("a/one", "c/three")
    assert storage.read("c/three", 99) == b"other"
    storage.remove("a")
    storage.remove("a")
    storage.remove("b")
    assert storage.entries() == ["c"]


def test_a_failed_operation_raises_an_oserror(storage: Storage) -> None:
    storage.write("a/one", [b"12345"])
    for fails in (
        lambda: storage.read("a/one", 4),
        lambda: storage.size("a/none"),
        lambda: storage.size("a"),
        lambda: storage.open("a/none"),
    ):
        with pytest.raises(OSError, match=r".+"):
            fails()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    folder = storage_at(tmp_path)
    folder.write("one", [b"old"])
    with pytest.raises(OSError, match="No space"):
        folder.write("one", broken())
    assert folder.read("one", 9) == b"old"
    assert folder.entries() == ["one"]


def test_urls_are_distinguished_from_paths() -> None:
    assert [is_url(place) for place in ("s3://b/c", "gs://b", "C:/x", "a//b", "/a://b", "")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_a_url_without_its_library_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next(one for one in ("s3", "gs", "abfs", "ocilake") if _missing(one))
    with pytest.raises(
        BadInputError, match=rf"^the checkpoint directory {missing}://bucket/x needs a library: .*nstall"
    ):
        storage_at(f"{missing}://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(BadInputError, match="pip install fsspec"):
        storage_at("s3://bucket/x")


def _missing(scheme: str) -> bool:
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        return True
    return False


def test_a_url_of_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(BadInputError, match="the checkpoint directory nosuch://bucket/x cannot be used"):
        storage_at("nosuch://bucket/x")


class Refusing:
    """A store that rejects the key."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: object, **__: object) -> None:
            raise KeyError("InvalidAccessKeyId: the key AKIA does not exist\nand much more")

        return refuse


def test_a_wrong_access_key_is_reported_by_the_check() -> None:
    with pytest.raises(BadInputError, match=r"s3://b/c cannot be written to: KeyError: .*InvalidAccessKeyId"):
        RemoteStorage("s3://b/c", Refusing(), "b/c").check()


def test_a_store_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.01)
    waiting = threading.Event()

    class Hanging:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: waiting.wait(60.0)

    with pytest.raises(BadInputError, match="s3://b/c has not answered within"):
        RemoteStorage("s3://b/c", Hanging(), "b/c").check()
    waiting.set()
