"""Choose a store by its URL."""

from __future__ import annotations

from pathlib import Path

from holdfast.control.store.etcd_place import place_at
from holdfast.control.store.interface import Store
from holdfast.control.store.memory import MemoryStore
from holdfast.control.store.sqlite import SqliteStore
from holdfast.errors import BadInputError


def check_store(url: str) -> None:
    """Check the form of a store's URL, without opening the store.

    Raises:
        BadInputError: its kind is unknown, or the rest does not fit its kind. The message contains the URL.
    """
    kind, colon, rest = url.partition(":")
    if kind == "etcd" and rest:
        place_at(url)
        return
    if kind == "memory" and rest:
        raise BadInputError(f"the store is {url!r}: a memory store takes nothing after `memory:`")
    if not (kind == "memory" and colon) and not (kind == "sqlite" and rest):
        raise BadInputError(f"the store is {url!r}: it must be `sqlite:PATH`, `etcd:http://HOST:PORT` or `memory:`")


def open_store(url: str) -> Store:
    """Open `memory:`, `sqlite:PATH` or `etcd:http://HOST:PORT[,..][/PREFIX]`.

    Raises:
        BadInputError: the URL is of no kind we know, or the store cannot be used.
        StoreError: it cannot be used now.
    """
    check_store(url)
    kind, _, rest = url.partition(":")
    if kind == "etcd":
        from holdfast.control.store.etcd import EtcdStore  # with httpx, which takes as long as all of the other stores

        return EtcdStore(url)
    return MemoryStore() if kind == "memory" else SqliteStore(Path(rest))
