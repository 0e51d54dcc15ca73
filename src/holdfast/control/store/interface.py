"""Where the coordinator keeps its small state: keys with revisions, changed by compare-and-swap only.

A store counts its changes: each takes the next revision, whatever its key. An entry carries the revision that made it,
so that one number says what of a listing is new to whoever has seen another (etcd's `mod_revision`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import EXIT_OUR_FAULT, HoldfastError


class StoreError(HoldfastError):
    """The store cannot answer: the disk is full, the file is locked for too long, the server is gone.

    Another coordinator may find it well again: its exit code lets whoever started this one start another.
    """

    exit_code = EXIT_OUR_FAULT


class StoreAwayError(StoreError):
    """The store does not answer now, and may well later: the same call may be made again on the same store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, and the revision of the store that made it what it is; revisions begin with 1 and only grow."""

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
        """Wait for changes, and return the newest entry of each key that has changed since those returned before.

        Changes that follow each other closely may be seen as one: no key's last change is missed, others may be.

        Args:
            timeout_s: after so many seconds without a change nothing is returned.

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
        """Return the newest entry of `key`, None where there is none.

        Linearizable: it sees every compare_and_swap that has returned, in whatever process.

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
            after: a listing's revision: what has changed since then is what comes first.
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
        """Remove the entry of `key` if its revision is this one; what is not there is removed already.

        Atomic, and on disk, as `compare_and_swap`; it takes a revision as well, and watches see nothing of it. Of what
        may have been removed, though this failed (`StoreAwayError`), the next call says so.

        Returns:
            Whether there is no such entry now; False if it has another revision, and then nothing has changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; the second call does nothing. No other method may follow, and watches see no more."""
