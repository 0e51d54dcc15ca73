"""Choose a store by its URL."""

from __future__ import annotations

from pathlib import Path

from holdfast.control.memory_store import MemoryStore
from holdfast.control.sqlite_store import SqliteStore
from holdfast.control.store import Store
from holdfast.errors import BadInputError


def open_store(url: str) -> Store:
    """Open `memory:` or `sqlite:PATH`. The place for `etcd:` is here.

    Raises:
        BadInputError: the URL is of no kind we know, or the store cannot be used.
    """
    kind, colon, rest = url.partition(":")
    if kind == "memory" and colon:
        if rest:
            raise BadInputError(f"the store is {url!r}: a memory store takes nothing after `memory:`")
        return MemoryStore()
    if kind == "sqlite" and rest:
        return SqliteStore(Path(rest))
    raise BadInputError(f"the store is {url!r}: it must be `sqlite:PATH` or `memory:`")
