"""A store for tests and for jobs that need not outlive their coordinator."""

from __future__ import annotations

import threading

from holdfast.control.store.interface import Entry, Store, StoreError


class MemoryStore(Store):
    """A dictionary behind a lock; shared by the threads of one process."""

    def __init__(self) -> None:
        self.url = "memory:"
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._closed = False

    def get(self, key: str) -> Entry | None:
        with self._lock:
            self._check()
            return self._entries.get(key)

    def compare_and_swap(self, key: str, value: bytes, expected_version: int) -> int | None:
        with self._lock:
            self._check()
            known = self._entries.get(key)
            if (known.version if known else 0) != expected_version:
                return None
            self._entries[key] = Entry(bytes(value), expected_version + 1)
            return expected_version + 1

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreError("the memory store is closed")
