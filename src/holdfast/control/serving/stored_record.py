"""A record in the store, replaced as a whole by compare-and-swap.

A server that finds a changed record is superseded.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from holdfast.control.store.interface import Store
from holdfast.errors import BadInputError, SupersededError
from holdfast.protocol.names import MALFORMED

R = TypeVar("R", bound=msgspec.Struct)


class _Schema(msgspec.Struct):
    schema: int


_SCHEMA = msgspec.msgpack.Decoder(_Schema)


class StoredRecord(Generic[R]):
    """One record in the store, and its revision as last read or written here."""

    def __init__(self, store: Store, key: str, decoder: msgspec.msgpack.Decoder[R], schema: int, what: str) -> None:
        """Read the record.

        Args:
            store: the store.
            key: the key of the record.
            decoder: decoder of the record, which contains its schema number as `schema`. Create it while no other
                thread decodes for the first time: msgspec then learns the fields of a type, and a second thread
                meanwhile crashes the process.
            schema: the schema number that this version reads.
            what: name of the record in error messages.

        Raises:
            BadInputError: it cannot be read, or another version of holdfast wrote it.
            StoreError: the store cannot answer.
        """
        self._store = store
        self.url = store.url
        self._key = key
        self._encoder = msgspec.msgpack.Encoder()
        entry = store.get(key)
        self._revision = entry.revision if entry else 0
        self.record = _decode(entry.value, decoder, schema, f"{what} in the store {store.url}") if entry else None

    def swap(self, record: R) -> None:
        """Replace the record in the store, and remember its new revision.

        Raises:
            SupersededError: another server has changed it since it was read or written here.
        """
        revision = self._store.compare_and_swap(self._key, self._encoder.encode(record), self._revision)
        if revision is None:
            raise SupersededError(f"the record {self._key} was changed by another coordinator")
        self._revision, self.record = revision, record


def outdated_store(what: str, url: str, newer: str) -> str:
    """Return the message of an `OutdatedStoreError`.

    Args:
        what: "job" or "pool".
        url: URL of the store.
        newer: the evidence that the store is outdated.
    """
    return (
        f"the store {url} is older than the {what}: {newer}. Nothing was stopped, and workers train on. Restore "
        f"the newest copy of the store. If it is lost, end the {what}'s agents, and start the {what} again with "
        "an empty store and another events file: jobs go on from their newest checkpoints"
    )


def _decode(value: bytes, decoder: msgspec.msgpack.Decoder[R], schema: int, what: str) -> R:
    """Decode a record. One with another schema number is refused, because it would be misread.

    Raises:
        BadInputError: it has another schema number, or is malformed. The message begins with `what` and names a remedy.
    """
    try:
        found = _SCHEMA.decode(value).schema
        if found == schema:
            return decoder.decode(value)
    except MALFORMED as error:
        raise BadInputError(f"{what} cannot be read: {error}; give another store") from None
    known = f"{what} has schema {found}, this holdfast reads schema {schema}"
    if found > schema:
        raise BadInputError(f"{known}: a newer version wrote it; upgrade holdfast, or give another store")
    raise BadInputError(
        f"{known}: an older version wrote it; end the job with that version, or give another store and events file: "
        "then the job resumes from its newest checkpoint"
    )
