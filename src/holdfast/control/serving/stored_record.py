"""A record in the store, replaced as a whole by compare-and-swap: whoever finds another one has been superseded."""

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
    """One record in the store, and the revision of it that we know."""

    def __init__(self, store: Store, key: str, decoder: msgspec.msgpack.Decoder[R], schema: int, what: str) -> None:
        """Read what is there.

        Args:
            decoder: of the record, which has its schema's number as `schema`. It is made where nobody else decodes for
                the first time: msgspec learns a type's fields then, and a second thread that comes meanwhile crashes
                the process. what: it is called in words.

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
        self.record = _decoded(entry.value, decoder, schema, f"{what} in the store {store.url}") if entry else None

    def swap(self, record: R) -> None:
        """Replace the record.

        Raises:
            SupersededError: it is no longer the one that we wrote or read.
        """
        revision = self._store.compare_and_swap(self._key, self._encoder.encode(record), self._revision)
        if revision is None:
            raise SupersededError(f"the record {self._key} was changed by another coordinator")
        self._revision, self.record = revision, record


def outdated_store(what: str, url: str, newer: str) -> str:
    """Return the message of an `OutdatedStoreError`.

    Args:
        what: "job" or "pool". url: of the store. newer: what shows that the store is older.
    """
    return (
        f"the store {url} is older than the {what}: {newer}. Nothing was stopped, and workers train on. Put back the "
        f"store as the {what} wrote it last. If it is lost, end the {what}'s agents, and start the {what} again with "
        "an empty store and another events file: jobs go on from their newest checkpoints"
    )


def _decoded(value: bytes, decoder: msgspec.msgpack.Decoder[R], schema: int, what: str) -> R:
    """Read a record of this version; one of another is refused, for it would be misread."""
    try:
        found = _SCHEMA.decode(value).schema
        if found == schema:
            return decoder.decode(value)
    except MALFORMED as error:
        raise BadInputError(f"{what} cannot be read: {error}; give another store") from None
    known = f"{what} has schema {found}, this holdfast reads schema {schema}"
    if found > schema:
        raise BadInputError(f"{known}: a newer one wrote it; upgrade holdfast, or give another store")
    raise BadInputError(
        f"{known}: an older one wrote it; end the job with that one, or give another store and events file, "
        "where the job resumes from its newest checkpoint"
    )
