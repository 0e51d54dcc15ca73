"""Gives out the parts of snapshots that lie on this node, in threads; `reading` says how one asks for them."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.control.link.snapshots import files
from holdfast.control.link.snapshots.files import DamagedPartError, StoredPart, part_path
from holdfast.control.link.snapshots.reading import (
    ANSWER,
    MAGIC,
    MAX_REQUEST_BYTES,
    NONCE,
    REQUEST,
    TAG,
    compute_proof,
)
from holdfast.control.link.wire import ThreadedListener, TransferError, Wire
from holdfast.counted_log import CountedLog
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.state import SnapshotPart

logger = logging.getLogger("holdfast.agent")

#: readers at a time that have shown who they are; the others are turned away, and ask again
MAX_READERS = 64


class SnapshotServer:
    """Listens for readers, as long as the agent lives."""

    def __init__(self, host: str, folder: Path, job: str, key: Callable[[], bytes]) -> None:
        """Prepare to serve parts; `start` begins.

        Args:
            key: secret that readers must show; b"" if it is not known yet, so that no reader is admitted.
        """
        self._folder, self._job, self._key = folder, job, key
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        self._reception = ThreadedListener(host, "reader", self._serve_reader, CountedLog(logger, time.monotonic))

    def start(self) -> int:
        """Listen on a free port, and return it.

        Raises:
            OSError: no port is free.
        """
        return self._reception.start()

    def close(self) -> None:
        """Stop listening, and abort transfers in progress."""
        self._reception.close()

    def _serve_reader(self, connection: socket.socket) -> None:
        """Authenticate a reader and this server to each other by the key, and answer the reader's request.

        Raises:
            TransferError: there is no key yet, the reader does not know it or breaks the protocol, or there are
                `MAX_READERS` already.
        """
        wire, key = Wire(connection), self._key()
        hello = wire.read(len(MAGIC) + NONCE)
        if not hello.startswith(MAGIC) or not key:
            raise TransferError("this is not our protocol, or this agent does not know the job's key yet")
        mine = secrets.token_bytes(NONCE)
        nonces = hello[len(MAGIC) :] + mine
        wire.write(mine + compute_proof(key, b"keeper", nonces))
        (length,) = REQUEST.unpack(wire.read(REQUEST.size))
        if length > MAX_REQUEST_BYTES:
            raise TransferError(f"a request of {length} bytes is larger than {MAX_REQUEST_BYTES}")
        request = wire.read(length)
        if not hmac.compare_digest(wire.read(TAG), compute_proof(key, b"reader", nonces, request)):
            raise TransferError("the reader could not show who it is")
        self._reception.pending.remove(connection)
        if not self._readers.acquire(blocking=False):
            raise TransferError(f"more than {MAX_READERS} readers at a time")
        try:
            self._answer(connection, wire, request, key, nonces)
        finally:
            self._readers.release()

    def _answer(self, connection: socket.socket, wire: Wire, request: bytes, key: bytes, nonces: bytes) -> None:
        """Send the header and manifest of the requested part, then the chunks that the reader chooses by number.

        Raises:
            TransferError: the part is missing or damaged, which the reader is told by an empty header; or there is no
                such chunk.
        """
        try:
            asked = msgspec.msgpack.decode(request, type=SnapshotPart)
            stored = StoredPart(part_path(self._folder, asked), self._job)
        except (*MALFORMED, OSError, DamagedPartError) as error:
            wire.write(ANSWER.pack(0))
            raise TransferError(f"it asks for what is not here: {error}") from None
        try:
            header = msgspec.msgpack.encode(stored.header)
            wire.write(ANSWER.pack(len(header)), header, compute_proof(key, b"header", nonces, header), stored.manifest)
            chunks = tuple(files.iterate_chunks(stored.header.body_bytes))
            (count,) = ANSWER.unpack(wire.read(ANSWER.size))
            if count > len(chunks):
                raise TransferError(f"{count} chunks are wanted of {len(chunks)}")
            wanted = wire.read(ANSWER.size * count)
            for start in range(0, len(wanted), ANSWER.size):
                place = int(ANSWER.unpack_from(wanted, start)[0])
                if place >= len(chunks):
                    raise TransferError(f"chunk {place} is wanted of {len(chunks)}")
                _send(connection, stored.fileno(), *chunks[place])
        finally:
            stored.close()


def _send(connection: socket.socket, file: int, at: int, nbytes: int) -> None:
    """Send `nbytes` bytes of a file from offset `at`. Raises TransferError if the file ends before."""
    end = at + nbytes
    while at < end:
        count = os.sendfile(connection.fileno(), file, at, end - at)
        if not count:
            raise TransferError("the file has become shorter")
        at += count
