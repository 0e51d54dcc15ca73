"""The rendezvous of a process group over the control channel: keys are pushed to all members.

Each member posts its keys once, all together. Agents and coordinator distribute them in bundles, and a `Board` holds
the keys that arrived. torch sees it as a `torch.distributed.Store`. gloo makes one `set` per rank, and then a `wait`
and a `get` of each rank's key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from holdfast.protocol.names import MAX_KEY_BYTES, MAX_POSTED_BYTES, key_of, posted_bytes
from holdfast.runtime.groups.communicator import HaltCheck, HaltedError, make_halt_check

MAX_VALUE_BYTES = MAX_KEY_BYTES
MAX_KEY_CHARS = 1024
MAX_KEYS = 1 << 20

#: Seconds between two calls of the halt check, which cannot wake a waiting thread.
POLL_S = 0.02


class Board:
    """The keys of one generation's groups that have reached this worker. Thread-safe."""

    def __init__(
        self,
        generation: int,
        post: Callable[[dict[str, bytes]], None],
        *,
        halt: threading.Event | HaltCheck | None = None,
    ) -> None:
        """Create an empty board.

        Args:
            generation: the group's generation.
            post: sends keys of this worker to all other members; must not block.
            halt: interrupts every wait.
        """
        self.generation = generation
        self._post = post
        self._halted = make_halt_check(halt)
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = False
        #: this worker's keys that are not sent yet, and how many more keys to wait for before sending
        self._unsent: dict[str, bytes] = {}
        self._to_come = 0
        #: bytes that this worker has posted
        self._posted_bytes = 0

    def expect_keys(self, keys: int) -> None:
        """Announce that this worker will `post` this many keys, in addition to those still expected; all are sent
        together when the last one is posted. With 0 keys, send an empty message at once, so that the others do not wait
        for a key.
        """
        with self._changed:
            self._to_come = max(self._to_come, 0) + keys
        if not keys:
            self._post({})

    def post(self, key: str, value: bytes) -> None:
        """Publish a key of this worker: here at once, on the other members together with all announced keys, when the
        last of them is posted. Without `expect_keys` it is sent at once.

        Raises:
            ValueError: the key or value, or the sum of all posted bytes, is over its limit.
        """
        self.put({key: value})
        with self._changed:
            self._posted_bytes += posted_bytes({key: value})
            if self._posted_bytes > MAX_POSTED_BYTES:
                raise ValueError(
                    f"this worker's addresses for generation {self.generation} have {self._posted_bytes} bytes, "
                    f"and at most {MAX_POSTED_BYTES} can be exchanged: the group is too large; start with fewer workers"
                )
            self._unsent[key] = value
            self._to_come -= 1
            if self._to_come > 0:
                return
            keys, self._unsent = self._unsent, {}
        self._post(keys)

    def put(self, keys: Mapping[str, bytes]) -> None:
        """Store keys of any members on this board, without sending them, and wake waiting threads. A repeated key
        replaces the earlier value.

        Raises:
            ValueError: a key, a value or the number of keys is over its limit. No key is stored then.
        """
        for key, value in keys.items():
            if len(value) > MAX_VALUE_BYTES or len(key) > MAX_KEY_CHARS:
                raise ValueError(f"rendezvous key of {len(key)} characters with {len(value)} bytes is too large")
        with self._changed:
            if len(self._values) + sum(key not in self._values for key in keys) > MAX_KEYS:
                raise ValueError(f"the rendezvous of generation {self.generation} has more than {MAX_KEYS} keys")
            self._values.update(keys)
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout_s: float) -> None:
        """Wait until all keys have arrived. If they have, return at once, even after a halt.

        Raises:
            HaltedError: the generation was halted, or the board closed.
            TimeoutError: a key did not arrive in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := [key for key in keys if key not in self._values]:
                if self._closed or self._halted():
                    raise HaltedError(f"generation {self.generation} was halted in rendezvous")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"rendezvous of generation {self.generation}: {missing[0]!r} did not come in {timeout_s:g} s"
                    )
                self._changed.wait(min(left, POLL_S))

    def values(self) -> dict[str, bytes]:
        """Return all keys that have arrived."""
        with self._changed:
            return dict(self._values)

    def value(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            KeyError: it has not arrived.
        """
        with self._changed:
            return self._values[key]

    def remove(self, key: str) -> bool:
        """Remove a key here; return whether it had arrived."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def close(self) -> None:
        """Interrupt every wait for keys that have not arrived, now and from now on: it raises HaltedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BoardStore(Store):
    """Adapts a board to torch's store interface. Atomic operations are refused, because keys are only pushed.

    Waits end by the store's own timeout, and ignore the process group's: gloo would pass its connect timeout.
    """

    def __init__(
        self, board: Board, *, timeout_s: float, rank: int, owner: Callable[[str], int], name: str = ""
    ) -> None:
        """Create the view of a board, or of one of its groups.

        Args:
            rank: this worker's rank in the generation.
            owner: returns the rank in the generation that posts a key. The same key of other ranks is ignored.
            name: the group's name, if the generation has several; equal on all its members.
        """
        super().__init__()
        self._board = board
        self._timeout_s = timeout_s
        self._rank = rank
        self._owner = owner
        self._name = name

    def values(self) -> dict[str, bytes]:
        """Return the keys of this group that have arrived, without the ranks and the group's name."""
        named = ((wire.partition(":")[2], value) for wire, value in self._board.values().items())
        return {key.removeprefix(self._name): value for key, value in named if key.startswith(self._name)}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._board.post(key_of(self._rank, self._name + key), data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._board.value(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._board.wait([self._key(key) for key in keys], self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        return {self._key(key) for key in keys} <= self._board.values().keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._board.remove(self._key(key))

    def num_keys(self) -> int:
        return len(self.values())

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, value: int) -> int:
        raise NotImplementedError(f"add({key!r}): a pushed rendezvous has no atomic operations")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        raise NotImplementedError(f"compare_set({key!r}): a pushed rendezvous has no atomic operations")

    def _key(self, key: str) -> str:
        return key_of(self._owner(key), self._name + key)
