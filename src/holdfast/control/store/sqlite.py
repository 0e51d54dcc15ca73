"""The embedded store: one SQLite file, shared by the processes of one machine.

The file says what it is (`application_id`) and which schema it has (`user_version`); both are read from its header
before SQLite opens it, so that a file that is not ours stays untouched to the last byte.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from pathlib import Path

from holdfast.control.store.interface import Entry, Store, StoreError
from holdfast.errors import BadInputError
from holdfast.observability.journal_file import sync_directory

#: Raised with every change of the tables that an older holdfast could not read.
SCHEMA_VERSION = 1
#: "HFST", in the header of every store file of ours.
APPLICATION_ID = 0x48465354

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100


class SqliteStore(Store):
    """A store in the SQLite file `path`; for one thread. Where there is none, the first write creates it.

    Raises:
        BadInputError: the file is of another schema, is no store of ours, or cannot be written; it is untouched.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = 10.0) -> None:
        self.url = f"sqlite:{path}"
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        try:
            if path.exists():
                _check_header(path)
                self._connection = _connect(path, busy_timeout_s)
            elif not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
                raise BadInputError(f"the store {path} cannot be opened: {path.parent} is no directory to write to")
        except (OSError, sqlite3.Error) as error:
            raise BadInputError(
                f"the store {path} cannot be opened: {error}; give a path that can be written"
            ) from None

    def get(self, key: str) -> Entry | None:
        if self._connection is None and not self._closed and not self._path.exists():
            return None
        try:
            row = self._opened().execute("SELECT value, version FROM entries WHERE key = ?", (key,)).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the store {self._path} cannot be read: {error}") from error
        return Entry(bytes(row[0]), int(row[1])) if row else None

    def compare_and_swap(self, key: str, value: bytes, expected_version: int) -> int | None:
        new = expected_version + 1
        # One statement is one transaction in autocommit mode: SQLite takes the write lock before it looks.
        if expected_version == 0:
            statement = "INSERT INTO entries (key, value, version) VALUES (?, ?, ?) ON CONFLICT (key) DO NOTHING"
            arguments: tuple[object, ...] = (key, value, new)
        else:
            statement = "UPDATE entries SET value = ?, version = ? WHERE key = ? AND version = ?"
            arguments = (value, new, key, expected_version)
        try:
            cursor = self._opened().execute(statement, arguments)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the store {self._path} cannot be written: {error}") from error
        return new if cursor.rowcount == 1 else None

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the store {self._path} is closed")
        if self._connection is None:
            if not self._path.exists():
                _create(self._path)
            _check_header(self._path)
            self._connection = _connect(self._path, self._busy_timeout_s)
        return self._connection


def _create(path: Path) -> None:
    """Make an empty store and put it in its place in one step: a store that can be seen is complete."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    # Private: the records hold the secrets of the state transfers. SQLite gives its side files the same mode.
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(
                "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL)"
            )
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")
        # Another process that is as far as we are wins or loses here, and either store will do.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        sync_directory(path.parent)
    finally:
        draft.unlink()


def _check_header(path: Path) -> None:
    """Read what the file says about itself, without SQLite and without a lock.

    Raises:
        BadInputError: it is not a store, or of another schema.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise BadInputError(f"the store {path} is not a database: give another path, or remove the file")
    (schema,) = struct.unpack_from(">I", header, 60)
    (application,) = struct.unpack_from(">I", header, 68)
    if application != APPLICATION_ID:
        raise BadInputError(f"the database {path} is not a store of holdfast: give another path")
    if schema != SCHEMA_VERSION:
        raise BadInputError(
            f"the store {path} has schema {schema}, this holdfast reads schema {SCHEMA_VERSION}: use the one that "
            "wrote it, or give another path"
        )


def _connect(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    # mode=rw: a file that vanished meanwhile is an error, not an empty store without tables.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=busy_timeout_s
    )
    try:
        # WAL + FULL: one fsync per write (2 ms measured), so that what is told of a record outlives a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        # A checkpoint syncs (up to 0.1 s measured), and a write may come in the middle of a recovery: rather let the
        # log grow to 40 MB. Closing the store folds it in.
        connection.execute("PRAGMA wal_autocheckpoint = 10000")
        connection.execute("SELECT key, value, version FROM entries LIMIT 0")
        # A write that changes nothing shows now, not in the middle of the job, that the file can be written.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        connection.close()
        raise
    return connection
