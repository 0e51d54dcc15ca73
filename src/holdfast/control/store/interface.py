"""Where the coordinator keeps its small state: keys with versions, changed by compare-and-swap only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from holdfast.errors import HoldfastError


class StoreError(HoldfastError):
    """The store cannot answer: the disk is full, the file is locked for too long, the server is gone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and its version: 1 when it was created, one more with every change."""

    value: bytes
    version: int


class Store(ABC):
    """A small map from keys to versioned values, shared by the processes that open it; `url` says which it is."""

    url: str

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """Return the newest entry of `key`, None where there is none.

        Linearizable: it sees every compare_and_swap that has returned, in whatever process.

        Raises:
            StoreError: the store cannot answer.
        """

    @abstractmethod
    def compare_and_swap(self, key: str, value: bytes, expected_version: int) -> int | None:
        """Replace the value of `key` if its version is `expected_version` (0: if the key does not exist).

        Atomic between all processes that share the store: of several calls that expect the same version exactly one
        succeeds. What succeeded is on disk when this returns, and there after a power cut (in memory: as long as this
        process lives).

        Returns:
            The new version; None if the version is another one, and then nothing has changed.

        Raises:
            StoreError: the store cannot answer; the value may or may not have been replaced.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; the second call does nothing. No other method may follow."""
