"""The store for clusters: etcd, which runs on several machines.

Each value is stored with a stamp that is unique to its write. So a write with a lost answer can be repeated: if the
first try was carried out, the second one finds its own stamp.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from holdfast.control.store.etcd_gateway import ANSWER_S, EtcdGateway, EtcdRefusalError
from holdfast.control.store.etcd_place import EtcdPlace, place_at
from holdfast.control.store.interface import Entry, Listing, Store, StoreError, Watch
from holdfast.errors import BadInputError

#: etcd takes requests of 1.5 MiB unless told otherwise (`--max-request-bytes`); the key and the request's frame are
#: in that
MAX_KEPT_BYTES = 1_500_000
#: values above are kept compressed
COMPRESS_OVER_BYTES = 65_536
#: seconds between two looks of a watch
LOOK_S = 0.2

_PLAIN, _COMPRESSED = b"\x01", b"\x02"
_STAMP_BYTES = 16
#: An empty etcd is at revision 1, ours begin with 1 at the first write.
_FIRST = 1


class _Header(msgspec.Struct):
    revision: int


class _Pair(msgspec.Struct):
    key: bytes
    mod_revision: int
    value: bytes = b""


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_Pair] = []


class _Response(msgspec.Struct):
    response_range: _Range | None = None


class _Outcome(msgspec.Struct):
    header: _Header
    succeeded: bool = False
    responses: list[_Response] = []


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    """A write without an answer, which may or may not have been carried out."""

    key: str
    value: bytes
    expected: int
    stamp: bytes


class EtcdStore(Store):
    """A store under a prefix of an etcd.

    Args:
        answer_s: how long a member may take to answer, in seconds, before the next one is asked.

    Raises:
        BadInputError: the certificates cannot be read, or etcd refuses us.
        StoreAwayError: no member answers now.
        StoreError: the server at the address is not an etcd.
    """

    def __init__(self, url: str, *, answer_s: float = ANSWER_S) -> None:
        self.url = url
        self._place = place_at(url)
        self._answer_s = answer_s
        self._closed = False
        self._pending: dict[str, _PendingWrite] = {}
        self._gateway = EtcdGateway(self._place, answer_s)
        try:
            self._gateway.call("kv/range", {"key": self._prefixed(""), "count_only": True}, _Range)
        except BaseException as error:
            self._gateway.close()
            if isinstance(error, EtcdRefusalError):
                raise BadInputError(f"the store {url} cannot be used: {error}") from None
            raise

    def get(self, key: str) -> Entry | None:
        """Return the newest entry of `key`, or None.

        Raises:
            StoreError: the store is closed, or as `EtcdGateway.call`.
            BadInputError: holdfast did not write the entry.
        """
        self._check()
        found = self._gateway.call("kv/range", {"key": self._prefixed(key)}, _Range)
        return self._decode_entry(found.kvs[0]) if found.kvs else None

    def list(self, prefix: str) -> Listing:
        self._check()
        return self._range(self._prefixed(prefix), 0)

    def watch(self, prefix: str, after: int) -> Watch:
        self._check()
        return _EtcdWatch(self, EtcdStore(self.url, answer_s=self._answer_s), prefix, after)

    def compare_and_swap(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Replace a value if its revision is as expected (0: no entry), and return the new revision, else None.

        See `Store.compare_and_swap`. If the last write of this key got no answer and had the same arguments, repeat it
        with its stamp: if it was carried out, its revision is returned. Raises StoreError if the value is too large.
        """
        self._check()
        write = self._pending.pop(key, None)
        if write is None or (write.value, write.expected) != (value, expected_revision):
            write = _PendingWrite(key, value, expected_revision, os.urandom(_STAMP_BYTES))
        kept = _encode_value(write, self._place)
        inside = self._prefixed(key)
        revision = expected_revision + _FIRST if expected_revision else 0
        request = {
            "compare": [{"key": inside, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}],
            "success": [{"request_put": {"key": inside, "value": kept}}],
            "failure": [{"request_range": {"key": inside}}],
        }
        self._pending[key] = write
        outcome = self._gateway.call("kv/txn", request, _Outcome)
        del self._pending[key]
        if outcome.succeeded:
            return outcome.header.revision - _FIRST
        found = next(
            (pair for part in outcome.responses if part.response_range for pair in part.response_range.kvs), None
        )
        # Ours: an earlier try of this write was carried out, and its answer was lost.
        return found.mod_revision - _FIRST if found is not None and found.value == kept else None

    def remove(self, key: str, expected_revision: int) -> bool:
        """Remove a key if its revision is as expected. Return whether it does not exist now; see `Store.remove`.

        Raises StoreError if the store is closed, or as `EtcdGateway.call`.
        """
        self._check()
        inside = self._prefixed(key)
        request = {
            "compare": [
                {"key": inside, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected_revision + _FIRST)}
            ],
            "success": [{"request_delete_range": {"key": inside}}],
            "failure": [{"request_range": {"key": inside}}],
        }
        outcome = self._gateway.call("kv/txn", request, _Outcome)
        exists = any(part.response_range.kvs for part in outcome.responses if part.response_range)
        return outcome.succeeded or not exists

    def close(self) -> None:
        self._closed = True
        self._gateway.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def newer(self, prefix: str, after: int) -> Listing:
        """Return the newest entries of all keys that begin with `prefix` and have changed after a revision."""
        return self._range(self._prefixed(prefix), after)

    def _range(self, inside: bytes, after: int) -> Listing:
        """Return the entries that have changed after a revision (0: all), with the revision of the store.

        Args:
            inside: beginning of their keys in etcd, with the prefix of this store.
        """
        request: dict[str, object] = {"key": inside, "range_end": inside[:-1] + bytes([inside[-1] + 1])}
        if after:
            request["min_mod_revision"] = str(after + 1 + _FIRST)
        found = self._gateway.call("kv/range", request, _Range)
        begin = len(self._prefixed(""))
        entries = {pair.key[begin:].decode(): self._decode_entry(pair) for pair in found.kvs}
        return Listing(entries, found.header.revision - _FIRST)

    def _decode_entry(self, pair: _Pair) -> Entry:
        """Return a pair of etcd as an entry, decompressed. Raises BadInputError if holdfast did not write it."""
        form, payload = pair.value[:1], pair.value[1 + _STAMP_BYTES :]
        try:
            if form in (_PLAIN, _COMPRESSED) and len(pair.value) > _STAMP_BYTES:
                value = payload if form == _PLAIN else zlib.decompress(payload)
                return Entry(value, pair.mod_revision - _FIRST)
        except zlib.error:
            pass
        raise BadInputError(
            f"the key {pair.key.decode(errors='replace')!r} of the store {self.url} holds what holdfast did not write: "
            "give another prefix"
        )

    def _prefixed(self, key: str) -> bytes:
        return f"{self._place.prefix}/{key}".encode()

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.url} is closed")


class _EtcdWatch(Watch):
    """Looks again and again, through connections of its own: so it is the same after etcd was away or compacted."""

    def __init__(self, watched: EtcdStore, own: EtcdStore, prefix: str, after: int) -> None:
        self._watched = watched
        self._own = own
        self._prefix = prefix
        self._after = after

    def next(self, timeout_s: float) -> Mapping[str, Entry]:
        """Ask etcd every `LOOK_S` seconds, and return the entries that changed since the last call, by key.

        Return none after the timeout; see `Watch.next`. Raises StoreError if the store or the watch is closed.
        """
        until = time.monotonic() + timeout_s
        while True:
            if self._watched.closed or self._own.closed:
                raise StoreError(f"the store {self._watched.url} is closed")
            found = self._own.newer(self._prefix, self._after)
            self._after = found.revision
            left = until - time.monotonic()
            if found.entries or left <= 0:
                return found.entries
            time.sleep(min(LOOK_S, left))

    def close(self) -> None:
        self._own.close()


def _encode_value(write: _PendingWrite, place: EtcdPlace) -> bytes:
    """Return the bytes that etcd stores: form, stamp and value, which is compressed above `COMPRESS_OVER_BYTES`.

    Raises:
        StoreError: the compressed value is larger than etcd accepts.
    """
    if len(write.value) <= COMPRESS_OVER_BYTES:
        return _PLAIN + write.stamp + write.value
    kept = _COMPRESSED + write.stamp + zlib.compress(write.value, 1)
    if len(kept) > MAX_KEPT_BYTES:
        raise StoreError(
            f"{write.key} weighs {len(write.value)} bytes, compressed {len(kept)}: etcd at {place.endpoints[0]} takes "
            f"{MAX_KEPT_BYTES} at most; nothing was written; keep the job's state in a sqlite: store"
        )
    return kept
