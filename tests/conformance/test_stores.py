"""One test suite for all stores, and tests of the SQLite store alone."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etcd_server import EtcdServer
from holdfast.control.store.etcd import EtcdStore
from holdfast.control.store.interface import Entry, Listing, Store, StoreError
from holdfast.control.store.memory import MemoryStore
from holdfast.control.store.sqlite import SCHEMA_VERSION, SqliteStore
from holdfast.control.store.store_choice import open_store
from holdfast.errors import BadInputError


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        url = {"memory": "memory:", "sqlite": f"sqlite:{tmp_path / 'store.db'}"}.get(request.param)
        if url is None:
            server = EtcdServer(tmp_path / "etcd")
            stack.callback(server.kill)
            url = server.url
        yield stack.enter_context(contextlib.closing(open_store(url)))


def test_a_missing_key_has_no_entry(store: Store) -> None:
    assert store.get("job/a") is None


def test_a_key_is_created_and_then_changed(store: Store) -> None:
    assert store.compare_and_swap("a", b"one", 0) == 1
    entry = store.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"one", 1)
    assert store.compare_and_swap("a", b"two", 1) == 2
    entry = store.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"two", 2)


@pytest.mark.parametrize("expected", [0, 2, 7])
def test_a_write_with_a_wrong_revision_changes_nothing(store: Store, expected: int) -> None:
    store.compare_and_swap("a", b"one", 0)
    assert store.compare_and_swap("a", b"other", expected) is None
    entry = store.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"one", 1)


def test_a_write_with_a_revision_of_a_missing_key_is_refused(store: Store) -> None:
    assert store.compare_and_swap("a", b"x", 1) is None
    assert store.get("a") is None


def test_values_of_any_bytes_are_stored_under_separate_keys(store: Store) -> None:
    values = {"a": b"", "b": bytes(range(256)) * 4096, "ключ/./x": b"\x00\xff"}
    for revision, (key, value) in enumerate(values.items(), start=1):
        assert store.compare_and_swap(key, value, 0) == revision
    for key, value in values.items():
        entry = store.get(key)
        assert entry is not None
        assert entry.value == value


def test_a_listing_has_the_keys_under_a_prefix(store: Store) -> None:
    assert store.list("") == Listing({}, 0)
    for key in ("jobs/a/record", "jobs/b/record", "job", "pool/record", "jobs%"):
        store.compare_and_swap(key, key.encode(), 0)
    store.compare_and_swap("pool/record", b"new", 4)
    listing = store.list("jobs/")
    assert listing == Listing(
        {"jobs/a/record": Entry(b"jobs/a/record", 1), "jobs/b/record": Entry(b"jobs/b/record", 2)}, 6
    )
    assert store.list("nothing").entries == {}


def test_a_watch_returns_changes_newer_than_a_listing(store: Store) -> None:
    store.compare_and_swap("jobs/a", b"1", 0)
    store.compare_and_swap("jobs/b", b"1", 0)
    with contextlib.closing(store.watch("jobs/", store.list("jobs/").revision)) as watch:
        assert watch.next(0.0) == {}
        store.compare_and_swap("jobs/a", b"2", 1)
        store.compare_and_swap("pool/a", b"1", 0)
        store.compare_and_swap("jobs/a", b"3", 3)
        assert watch.next(0.0) == {"jobs/a": Entry(b"3", 5)}
        assert watch.next(0.0) == {}
    with contextlib.closing(store.watch("jobs/", 0)) as watch:
        assert watch.next(0.0) == {"jobs/a": Entry(b"3", 5), "jobs/b": Entry(b"1", 2)}


def test_a_removed_key_is_missing_and_its_revision_is_not_reused(store: Store) -> None:
    for key in ("jobs/a", "jobs/b"):
        store.compare_and_swap(key, b"1", 0)
    assert not store.remove("jobs/b", 1)
    assert store.remove("jobs/b", 2)
    assert store.remove("jobs/b", 2), "the key does not exist"
    assert store.get("jobs/b") is None
    assert store.list("") == Listing({"jobs/a": Entry(b"1", 1)}, 3)
    with contextlib.closing(store.watch("", 1)) as watch:
        assert watch.next(0.0) == {}
    assert store.compare_and_swap("jobs/b", b"2", 2) is None
    assert store.compare_and_swap("jobs/b", b"2", 0) == 4
    assert store.remove("jobs/a", 1)
    assert store.compare_and_swap("jobs/a", b"3", 0) == 6


def test_a_watch_started_before_the_first_write_returns_it(store: Store) -> None:
    with contextlib.closing(store.watch("a", 0)) as watch:
        assert watch.next(0.0) == {}
        store.compare_and_swap("a", b"1", 0)
        assert watch.next(0.0) == {"a": Entry(b"1", 1)}


def test_a_waiting_watch_returns_on_a_change(store: Store) -> None:
    with contextlib.closing(store.watch("a", 0)) as watch, ThreadPoolExecutor(1) as thread:
        seen = thread.submit(watch.next, 60.0)
        store.compare_and_swap("a", b"1", 0)
        assert seen.result(timeout=60.0) == {"a": Entry(b"1", 1)}


def test_closing_a_store_ends_its_watches(store: Store) -> None:
    watch = store.watch("", 0)
    with ThreadPoolExecutor(1) as thread:
        seen = thread.submit(watch.next, 60.0)
        store.close()
        with pytest.raises(StoreError, match="closed"):
            seen.result(timeout=60.0)
    watch.close()
    watch.close()
    with pytest.raises(StoreError, match="closed"):
        watch.next(0.0)


def test_a_store_can_be_written_from_another_thread(store: Store) -> None:
    assert store.get("a") is None
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(store.compare_and_swap, "a", b"1", 0).result(timeout=60.0) == 1
    assert store.get("a") == Entry(b"1", 1)


def test_calls_of_a_closed_store_raise_an_error(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("a")
    with pytest.raises(StoreError, match="closed"):
        store.compare_and_swap("a", b"", 0)
    with pytest.raises(StoreError, match="closed"):
        store.list("")


#: key, value (None: remove the key), and the expected revision
_operations = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.one_of(st.none(), st.binary(max_size=8)),
        st.one_of(st.just(-1), st.integers(min_value=0, max_value=6)),
    ),
    max_size=40,
)


@pytest.fixture(scope="module", params=["memory", "sqlite", "etcd"])
def anew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Store]]:
    """Return a function that opens an empty store. Stores in etcd share a server, each with its own prefix."""
    folder, number = tmp_path_factory.mktemp("stores"), count()
    if request.param == "memory":
        yield MemoryStore
    elif request.param == "sqlite":
        yield lambda: SqliteStore(folder / f"{next(number)}.db")
    else:
        server = EtcdServer(folder / "etcd")
        try:
            yield lambda: EtcdStore(f"{server.url}/{next(number)}")
        finally:
            server.kill()


@given(operations=_operations)
@settings(max_examples=40, deadline=None)
def test_a_store_behaves_like_a_map_with_revisions(
    anew: Callable[[], Store], operations: list[tuple[str, bytes | None, int]]
) -> None:
    model: dict[str, tuple[bytes, int]] = {}
    with contextlib.closing(anew()) as store:
        before = revision = store.list("").revision
        for key, value, expected in operations:
            known = model.get(key, (b"", 0))[1]
            expected = known if expected < 0 else expected and before + expected
            if value is None:
                assert store.remove(key, expected) == (not known or expected == known)
                if known and expected == known:
                    del model[key]
                    revision += 1
                continue
            new = store.compare_and_swap(key, value, expected)
            assert new == (revision + 1 if expected == known else None)
            if new is not None:
                model[key], revision = (value, new), new
        for key in "abc":
            entry = store.get(key)
            assert (None if entry is None else (entry.value, entry.revision)) == model.get(key)
        listing = store.list("")
        assert {key: (entry.value, entry.revision) for key, entry in listing.entries.items()} == model
        assert listing.revision == revision


# ---- SQLite ----

_COUNTER = """
import sys
from holdfast.control.store.store_choice import open_store
store = open_store(sys.argv[1])
sys.stdin.readline()
won = 0
while won < int(sys.argv[2]):
    entry = store.get("counter")
    value, revision = (int(entry.value), entry.revision) if entry else (0, 0)
    if store.compare_and_swap("counter", str(value + 1).encode(), revision) is not None:
        won += 1
store.close()
"""


def test_concurrent_processes_lose_no_increment(tmp_path: Path) -> None:
    url, each = f"sqlite:{tmp_path / 'store.db'}", 200
    counters = [
        subprocess.Popen([sys.executable, "-c", _COUNTER, url, str(each)], stdin=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for counter in counters:
            counter.communicate("go\n", timeout=120)
        assert [counter.returncode for counter in counters] == [0, 0, 0]
    finally:
        for counter in counters:
            counter.kill()
            counter.wait()
    store = open_store(url)
    entry = store.get("counter")
    store.close()
    assert entry is not None
    assert (int(entry.value), entry.revision) == (3 * each, 3 * each)


def test_a_value_survives_a_kill_of_the_writer(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    code = (
        "import os, signal, sys; from holdfast.control.store.store_choice import open_store\n"
        "s = open_store(sys.argv[1]); s.compare_and_swap('a', b'kept', 0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, url], timeout=60).returncode == -9
    store = open_store(url)
    entry = store.get("a")
    store.close()
    assert entry is not None
    assert entry.value == b"kept"


def test_a_sqlite_write_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    store = SqliteStore(tmp_path / "store.db")
    store.compare_and_swap("a", b"x", 0)
    assert str(tmp_path) in synced, "the folder was synced, which keeps the file name"
    assert store._connection is not None
    # 2 means that SQLite syncs its log with every write.
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_a_closed_sqlite_store_leaves_one_private_file(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path / 'store.db'}")
    store.compare_and_swap("a", b"secret", 0)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]


def test_reading_a_missing_sqlite_store_creates_no_file(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path / 'store.db'}")
    assert store.get("a") is None
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_two_stores_opened_before_the_file_exists_share_it(tmp_path: Path) -> None:
    first, second = (open_store(f"sqlite:{tmp_path / 'store.db'}") for _ in range(2))
    assert first.compare_and_swap("a", b"1", 0) == 1
    assert second.compare_and_swap("a", b"2", 0) is None
    entry = second.get("a")
    assert entry is not None
    assert entry.value == b"1"
    first.close()
    second.close()


def _made(path: Path) -> Path:
    store = SqliteStore(path)
    store.compare_and_swap("a", b"x", 0)
    store.close()
    return path


def _folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("schema", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_database_with_another_schema_is_refused_unchanged(tmp_path: Path, schema: int) -> None:
    path = _made(tmp_path / "store.db")
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    before = _folder_bytes(tmp_path)
    with pytest.raises(BadInputError, match=rf"{path}.*schema {schema}.*reads schema {SCHEMA_VERSION}"):
        open_store(f"sqlite:{path}")
    assert _folder_bytes(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"not a database\n" * 40, b"SQLite format 3\x00"], ids=["empty", "text", "cut"]
)
def test_a_file_that_is_not_a_database_is_refused_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="not a database"):
        open_store(f"sqlite:{path}")
    assert _folder_bytes(tmp_path) == {"store.db": content}


def test_a_broken_database_is_refused(tmp_path: Path) -> None:
    path = _made(tmp_path / "store.db")
    path.write_bytes(path.read_bytes()[:100] + b"\xaa" * 4000)
    with pytest.raises(BadInputError, match=r"cannot be opened: .*; put back a copy of it, or give another path"):
        open_store(f"sqlite:{path}")


def test_a_database_with_undecodable_damage_is_refused(tmp_path: Path) -> None:
    """SQLite quotes the damaged bytes in its error message, which Python cannot decode."""
    path = _made(tmp_path / "store.db")
    damaged = path.read_bytes().replace(b"PRIMARY KEY", b"PRIM\xb5RY KEY")
    path.write_bytes(damaged)
    with pytest.raises(BadInputError, match=r"cannot be opened: .*; put back a copy of it, or give another path"):
        open_store(f"sqlite:{path}")


@pytest.mark.parametrize("change", ["value = 'text'", "value = 7", "revision = 'x'", "revision = 1.5"])
def test_an_entry_of_a_wrong_type_is_reported_as_damage(tmp_path: Path, change: str) -> None:
    path = _made(tmp_path / "store.db")
    with contextlib.closing(open_store(f"sqlite:{path}")) as store:
        assert store.compare_and_swap("damaged", b"1", 0)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE entries SET {change} WHERE key = 'damaged'")
    with contextlib.closing(open_store(f"sqlite:{path}")) as store:
        for read in (lambda: store.get("damaged"), lambda: store.list("d"), lambda: store.watch("d", 0).next(0.0)):
            with pytest.raises(StoreError, match="is damaged; put back a copy of it"):
                read()


def test_a_database_of_another_program_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()
    before = _folder_bytes(tmp_path)
    with pytest.raises(BadInputError, match="not a store of holdfast"):
        open_store(f"sqlite:{path}")
    assert _folder_bytes(tmp_path) == before


def test_a_locked_store_is_not_reported_as_bad_input(tmp_path: Path) -> None:
    path = _made(tmp_path / "store.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked by another process") as caught:
            SqliteStore(path, busy_timeout_s=0.01)
        assert caught.value.exit_code == 70
        other.execute("ROLLBACK")
    SqliteStore(path, busy_timeout_s=0.01).close()


def test_an_unwritable_store_path_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "store.db", tmp_path):
        with pytest.raises(BadInputError, match=f"{path} cannot be opened"):
            open_store(f"sqlite:{path}")


@pytest.mark.parametrize(
    "url", ["", "sqlite", "sqlite:", "memory", "memory:x", "etcd://h:1", "/tmp/x.db", "mysql:x", "etcd:"]
)
def test_an_unknown_store_url_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="the store is"):
        open_store(url)
