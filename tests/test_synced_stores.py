"""A written record is on disk, and so are the events before it: each test fails if one sync is missing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.control.store.sqlite import SqliteStore
from holdfast.observability.journal_file import FileJournal
from made_events import made
from synced_disk import Disk


def test_a_write_to_a_store_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(tmp_path, monkeypatch), tmp_path / "store.db"
    store = SqliteStore(path)
    assert store.compare_and_swap("key", b"value", 0) == 1
    assert disk.last_sync(".") > disk.named_at("store.db"), "the store's own entry must be synced"
    connection = store._connection
    assert connection is not None
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,), (
        "with FULL, a write is synced before it is confirmed"
    )
    store.close()


def test_a_store_sets_full_syncs_independently_of_library_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of SQLite may sync less by default for a store with a write-ahead log."""
    statements: list[str] = []
    real = sqlite3.connect

    def connect(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = real(*arguments, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
        connection.set_trace_callback(statements.append)
        return connection

    store = SqliteStore(tmp_path / "store.db")
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert store.compare_and_swap("key", b"value", 0) == 1
    assert "PRAGMA synchronous = FULL" in statements[: statements.index("BEGIN IMMEDIATE")]
    store.close()


def test_synced_events_of_a_journal_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(tmp_path, monkeypatch), tmp_path / "events.jsonl"
    journal = FileJournal(path)
    journal.append(made("job_started", seq=1))
    assert disk.last_sync(".") >= 0, "the journal's own entry must be synced"
    journal.sync()
    assert disk.done[-1] == ("sync", "events.jsonl", path.stat().st_size)
    journal.append(made("job_started", seq=2))
    journal.close()
    assert disk.done[-1] == ("sync", "events.jsonl", path.stat().st_size)
