"""A store for tests and for jobs that need not outlive their coordinator."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from holdfast.control.store.interface import Entry, Listing, Store, StoreError, Watch


class MemoryStore(Store):
    """A dictionary behind a lock; shared by the threads of one process."""

    def __init__(self) -> None:
        self.url = "memory:"
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._closed = False

    def get(self, key: str) -> Entry | None:
        """Return the entry of `key`, or None. Raises StoreError if the store is closed."""
        with self._changed:
            self._check()
            return self._entries.get(key)

    def list(self, prefix: str) -> Listing:
        """Return all entries whose keys begin with `prefix`. Raises StoreError if the store is closed."""
        with self._changed:
            self._check()
            return Listing(self._newer(prefix, 0), self._revision)

    def watch(self, prefix: str, after: int) -> Watch:
        return _MemoryWatch(self, prefix, after)

    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Replace a value if its revision is as expected (0: no entry), wake watches, and return the new revision.

        Return None, and change nothing, if the revision differs. Raises StoreError if the store is closed.
        """
        with self._changed:
            self._check()
            known = self._entries.get(key)
            if (known.revision if known else 0) != expected_revision:
                return None
            self._revision += 1
            self._entries[key] = Entry(bytes(value), self._revision)
            self._changed.notify_all()
            return self._revision

    def remove(self, key: str, expected_revision: int) -> bool:
        """Remove an entry if its revision is as expected. Return whether there is none now; see `Store.remove`.

        Watches do not see a removal. Raises StoreError if the store is closed.
        """
        with self._changed:
            self._check()
            known = self._entries.get(key)
            if known is not None and known.revision == expected_revision:
                self._revision += 1
                del self._entries[key]
            return key not in self._entries

    def close(self) -> None:
        """Close the store. All later calls, and watches that wait, raise StoreError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def await_newer(self, prefix: str, after: int, timeout_s: float) -> Listing:
        """Wait for entries under a prefix that are newer than a revision, and return them, or none after the timeout.

        Raises StoreError once the store is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newer(prefix, after), timeout=timeout_s)
            self._check()
            return Listing(self._newer(prefix, after), self._revision)

    def _newer(self, prefix: str, after: int) -> dict[str, Entry]:
        return {k: entry for k, entry in self._entries.items() if k.startswith(prefix) and entry.revision > after}

    def _check(self) -> None:
        if self._closed:
            raise StoreError("the memory store is closed")


class _MemoryWatch(Watch):
    def __init__(self, store: MemoryStore, prefix: str, after: int) -> None:
        self._store = store
        self._prefix = prefix
        self._after = after
        self._closed = False

    def next(self, timeout_s: float) -> Mapping[str, Entry]:
        """Wait for entries that change after the last call, and return them by key, or none after the timeout.

        Raises StoreError if the watch or its store is closed.
        """
        if self._closed:
            raise StoreError("the watch is closed")
        found = self._store.await_newer(self._prefix, self._after, timeout_s)
        self._after = found.revision
        return found.entries

    def close(self) -> None:
        self._closed = True
