"""One store that several users of one process call from threads of their own."""

from __future__ import annotations

import threading

from holdfast.control.store.interface import Entry, Listing, Store, Watch


class SharedStore(Store):
    """Lets one call at a time through to another store; closing it closes that."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.url = store.url

    def get(self, key: str) -> Entry | None:
        with self._lock:
            return self._store.get(key)

    def list(self, prefix: str) -> Listing:
        with self._lock:
            return self._store.list(prefix)

    def watch(self, prefix: str, after: int) -> Watch:
        with self._lock:
            return self._store.watch(prefix, after)

    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        with self._lock:
            return self._store.compare_and_swap(key, value, expected_revision)

    def remove(self, key: str, expected_revision: int) -> bool:
        with self._lock:
            return self._store.remove(key, expected_revision)

    def close(self) -> None:
        with self._lock:
            self._store.close()
