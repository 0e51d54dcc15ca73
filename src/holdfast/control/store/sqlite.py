"""The embedded store: one SQLite file, shared by the processes of one machine.

The header of the file contains its kind (`application_id`) and its schema (`user_version`). Both are read before SQLite
opens the file, so that a foreign file is not changed at all.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.control.store.interface import Entry, Listing, Store, StoreError, Watch
from holdfast.errors import BadInputError
from holdfast.observability.journal_file import sync_directory

#: Raised with every change of the tables that an older holdfast could not read.
SCHEMA_VERSION = 2
#: "HFST", in the header of every store file of ours.
APPLICATION_ID = 0x48465354

Rows = list[tuple[Any, ...]]

#: What SQLite raises; its message about a damaged file may quote bytes of it that are not UTF-8.
_PROBLEMS = (OSError, sqlite3.Error, UnicodeDecodeError)

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100

#: Seconds between two looks of a watch. Writes of other processes do not wake it.
LOOK_S = 0.05

#: Each change takes the next revision of the whole store. The revision of a removal is kept with the empty key.
_NEXT = "(SELECT coalesce(max(revision), 0) + 1 FROM entries)"
_CREATE = (
    f"INSERT INTO entries (key, value, revision) VALUES (?, ?, {_NEXT}) ON CONFLICT (key) DO NOTHING RETURNING revision"
)
_REPLACE = f"UPDATE entries SET value = ?, revision = {_NEXT} WHERE key = ? AND revision = ? RETURNING revision"
_NEWER = "SELECT key, value, revision FROM entries WHERE key <> '' AND revision > ? AND substr(key, 1, length(?)) = ?"
_COUNT_AFTER = (  # The removed entry may have had the last revision.
    "INSERT INTO entries (key, value, revision) "
    "VALUES ('', x'', (SELECT max(coalesce(max(revision), 0), ?) + 1 FROM entries)) "
    "ON CONFLICT (key) DO UPDATE SET revision = excluded.revision"
)
_REMOVE = "DELETE FROM entries WHERE key = ? AND revision = ?"


class SqliteStore(Store):
    """A store in the SQLite file `path`. The first write creates the file if it does not exist.

    Raises:
        BadInputError: the file has another schema, is not a store of holdfast, or cannot be written. It is unchanged.
        StoreError: another process has locked the file.
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
        except _PROBLEMS as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise StoreError(f"the store {path} is locked by another process: {error}") from None
            raise BadInputError(f"the store {path} cannot be opened: {error}; {_remedy(error)}") from None

    def get(self, key: str) -> Entry | None:
        rows = self._read("SELECT value, revision FROM entries WHERE key = ?", (key,))
        return self._as_entry(*rows[0]) if rows else None

    def list(self, prefix: str) -> Listing:
        """Return all entries whose keys begin with `prefix`, with the store's revision; see `Store.list`.

        If the file does not exist yet, there are none, at revision 0. Raises StoreError if it cannot be read.
        """
        # One statement sees one snapshot. The store's revision is that of its newest entry.
        rows = self._read(f"{_NEWER} UNION ALL SELECT NULL, NULL, max(revision) FROM entries", (0, prefix, prefix))
        entries = {str(key): self._as_entry(value, revision) for key, value, revision in rows if key is not None}
        last = next((revision for key, _, revision in rows if key is None), None)
        return Listing(entries, self._as_entry(b"", last).revision if last is not None else 0)

    def watch(self, prefix: str, after: int) -> Watch:
        return _SqliteWatch(self, SqliteStore(self._path, busy_timeout_s=self._busy_timeout_s), prefix, after)

    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Replace a value if its revision is as expected (0: no entry), and return the new revision, else None.

        See `Store.compare_and_swap`. Raises StoreError if the file cannot be written or is locked for too long.
        """
        # One statement is one transaction in autocommit mode: SQLite takes the write lock before it looks.
        if expected_revision == 0:
            statement, arguments = _CREATE, (key, value)
        else:
            statement, arguments = _REPLACE, (value, key, expected_revision)
        try:
            rows = self._open_connection().execute(statement, arguments).fetchall()
        except _PROBLEMS as error:
            raise StoreError(f"the store {self._path} cannot be written: {error}") from error
        return int(rows[0][0]) if rows else None

    def remove(self, key: str, expected_revision: int) -> bool:
        """Remove an entry if its revision is as expected, in one transaction that also increases the store's revision.

        Return whether there is no entry now; see `Store.remove`.
        """
        known = self.get(key)
        if known is None or known.revision != expected_revision:
            return known is None
        try:
            connection = self._open_connection()
            with contextlib.ExitStack() as undo:
                connection.execute("BEGIN IMMEDIATE")
                undo.callback(connection.execute, "ROLLBACK")
                if removed := connection.execute(_REMOVE, (key, expected_revision)).rowcount > 0:
                    connection.execute(_COUNT_AFTER, (expected_revision,))
                connection.execute("COMMIT")
                undo.pop_all()
        except _PROBLEMS as error:
            raise StoreError(f"the store {self._path} cannot be written: {error}") from error
        return removed or self.get(key) is None

    def newer(self, prefix: str, after: int) -> dict[str, Entry]:
        """Return the newest entries of all keys that begin with `prefix` and have changed after a revision."""
        rows = self._read(_NEWER, (after, prefix, prefix))
        return {str(key): self._as_entry(value, revision) for key, value, revision in rows}

    def close(self) -> None:
        """Close the connection. Later calls raise StoreError; a second `close` does nothing."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _as_entry(self, value: object, revision: object) -> Entry:
        """Return a row as an entry. Raises StoreError if its columns have other types, as in a damaged file."""
        if isinstance(value, bytes) and isinstance(revision, int):
            return Entry(value, revision)
        raise StoreError(f"the store {self._path} cannot be read: it is damaged; put back a copy of it")

    def _read(self, statement: str, arguments: tuple[object, ...]) -> Rows:
        """Return the rows of a query, [] if the file does not exist yet. Raises StoreError if it cannot be read."""
        if self._connection is None and not self._closed and not self._path.exists():
            return []
        try:
            return self._open_connection().execute(statement, arguments).fetchall()
        except _PROBLEMS as error:
            raise StoreError(f"the store {self._path} cannot be read: {error}") from error

    def _open_connection(self) -> sqlite3.Connection:
        """Return the connection; at first, create the file if it does not exist, check its header, and connect.

        Raises:
            StoreError: the store is closed.
            BadInputError: the file is not a store of this schema.
            OSError, sqlite3.Error, UnicodeDecodeError: the file cannot be created or used.
        """
        if self._closed:
            raise StoreError(f"the store {self._path} is closed")
        if self._connection is None:
            if not self._path.exists():
                _create(self._path)
            _check_header(self._path)
            self._connection = _connect(self._path, self._busy_timeout_s)
        return self._connection


class _SqliteWatch(Watch):
    """Looks again and again, through a connection of its own."""

    def __init__(self, watched: SqliteStore, own: SqliteStore, prefix: str, after: int) -> None:
        self._watched = watched
        self._own = own
        self._prefix = prefix
        self._after = after

    def next(self, timeout_s: float) -> Mapping[str, Entry]:
        """Read the file every `LOOK_S` seconds, and return the entries that changed since the last call, by key.

        Return none after the timeout; see `Watch.next`. Raises StoreError once the store is closed.
        """
        until = time.monotonic() + timeout_s
        while True:
            if self._watched.closed:
                raise StoreError(f"the store {self._watched.url} is closed")
            found = self._own.newer(self._prefix, self._after)
            left = until - time.monotonic()
            if found or left <= 0:
                self._after = max((entry.revision for entry in found.values()), default=self._after)
                return found
            time.sleep(min(LOOK_S, left))

    def close(self) -> None:
        self._own.close()


def _remedy(error: Exception) -> str:
    """Return what the user can do about an error: replace a damaged file, or give a path that can be written."""
    code = getattr(error, "sqlite_errorcode", None)
    damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or isinstance(error, UnicodeDecodeError)
    return "put back a copy of it, or give another path" if damaged else "give a path that can be written"


def _create(path: Path) -> None:
    """Create an empty store with the tables, readable by this user only, and link it to its path when it is complete.

    If another process has created the file meanwhile, that one stays. Raises OSError or `sqlite3.Error` if it cannot be
    created.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    # Private: the records hold the secrets of the state transfers. SQLite gives its side files the same mode.
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(
                "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL UNIQUE)"
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
    """Read the kind and the schema from the file's header, without SQLite and without a lock.

    Raises:
        BadInputError: the file is not a store, or has another schema.
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
    """Connect to an existing store, with a sync for each write, and check that it can be read and written.

    Raises:
        OSError, sqlite3.Error, UnicodeDecodeError: it cannot, or another process holds its lock for `busy_timeout_s`.
    """
    # mode=rw: a file that vanished meanwhile is an error, not an empty store without tables.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=busy_timeout_s,
        check_same_thread=False,  # One thread at a time, as the interface requires.
    )
    try:
        # WAL and FULL: one fsync per write (2 ms measured), so that a record survives a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        # A checkpoint syncs (up to 0.1 s measured), and a write may come in the middle of a recovery: rather let the
        # log grow to 40 MB. Closing the store folds it in.
        connection.execute("PRAGMA wal_autocheckpoint = 10000")
        connection.execute("SELECT key, value, revision FROM entries LIMIT 0")
        # A write that changes nothing shows now, not in the middle of the job, that the file can be written.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except _PROBLEMS:
        connection.close()
        raise
    return connection
