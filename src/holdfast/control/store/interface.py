"""The interface of stores for the coordinator's small state: keys with revisions, changed by compare-and-swap.

A store counts its changes over all keys: each change gets the next revision. An entry has the revision of its last
change (etcd's `mod_revision`). So a reader with an earlier listing can tell which entries are new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import EXIT_OUR_FAULT, HoldfastError


class StoreError(HoldfastError):
    """The store cannot answer: the disk is full, the file is locked for too long, or the server is gone.

    Another coordinator may succeed later, so the exit code allows a restart.
    """

    exit_code = EXIT_OUR_FAULT


class StoreAwayError(StoreError):
    """The store does not answer now, and may well later: the same call may be made again on the same store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value with the revision of its last change. Revisions begin with 1 and only grow."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries under a prefix, by key, as they all were at one revision of the store, 0 for an empty one."""

    entries: Mapping[str, Entry]
    revision: int


class Watch(ABC):
    """Sees the entries under a prefix change. To be used by one thread, which may be another than the store's."""

    @abstractmethod
    def next(self, timeout_s: float) -> Mapping[str, Entry]:
        """Wait for changes, and return the newest entry of each key that has changed since the last call.

        Intermediate changes of a key may be missed; its last change is not.

        Args:
            timeout_s: after this many seconds without a change, return nothing.

        Raises:
            StoreError: the store cannot answer, or is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Watch no longer; the second call does nothing."""


class Store(ABC):
    """A small map from keys to values with revisions, shared by the processes that open it; `url` says which it is.

    Its methods may be called from any thread, by one at a time.
    """

    url: str

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """Return the newest entry of `key`, or None.

        Linearizable: it sees every compare_and_swap that has returned, in any process.

        Raises:
            StoreError: the store cannot answer.
        """

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """Return the newest entries of all keys that begin with `prefix`; linearizable, as `get`.

        Raises:
            StoreError: the store cannot answer.
        """

    @abstractmethod
    def watch(self, prefix: str, after: int) -> Watch:
        """Watch the entries of all keys that begin with `prefix`, from a revision on.

        Args:
            after: revision of a listing; later changes come first.
        """

    @abstractmethod
    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Replace the value of `key` if its revision is `expected_revision` (0: if the key does not exist).

        Atomic between all processes that share the store: of several calls that expect the same revision exactly one
        succeeds. What succeeded is on disk when this returns, and there after a power cut (in memory: as long as this
        process lives). It may take its time, and blocks.

        Returns:
            The new revision; None if the entry has another one, and then nothing has changed.

        Raises:
            StoreError: the store cannot answer; the value may or may not have been replaced.
            StoreAwayError: the same, and the same call made next on this key finds out: it returns the new revision
                if it was replaced by either.
        """

    @abstractmethod
    def remove(self, key: str, expected_revision: int) -> bool:
        """Remove the entry of `key` if it has this revision. A missing entry counts as removed.

        Atomic and durable, as `compare_and_swap`. It takes a revision, and watches do not see it. After an unknown
        outcome (`StoreAwayError`), the next call returns the result.

        Returns:
            Whether the entry is gone now; False if it has another revision, and nothing was changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store. A second call does nothing. No other method may be called afterwards, and watches end."""
