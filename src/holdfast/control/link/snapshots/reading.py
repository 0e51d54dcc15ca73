"""Parts of snapshots from other nodes' agents: who asks, what is answered, and the reader's side of it.

Whoever reads connects to an agent's door. Before anything is parsed both sides prove with HMAC-SHA256 that they know
the job's key for this, bound to fresh nonces; the reader's proof covers what it asks for, the keeper's second one the
header that it answers with. Then the manifest follows; the reader says which chunks of the body it wants, and these
come as they lie in the file, to be compared with the checksums in the header.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import zlib
from collections.abc import Sequence

import msgspec

from holdfast.control.link.snapshots.files import MAX_HEADER_BYTES, DamagedPartError, decode_header
from holdfast.control.link.wire import TransferError, Wire, shut
from holdfast.protocol.state import Keeper, SnapshotPart

MAGIC = b"hfparts\1"
NONCE = 32
TAG = 32
CONNECT_S = 5.0
MAX_REQUEST_BYTES = 1024
REQUEST = struct.Struct("<H")
ANSWER = struct.Struct("<I")


def proof(key: bytes, role: bytes, nonces: bytes, what: bytes = b"") -> bytes:
    """Return what one side shows; `role` says which, and of what."""
    return hmac.digest(key, b"holdfast snapshot\0" + role + b"\0" + nonces + what, "sha256")


class RemotePart:
    """A part at another node's agent, for reading."""

    def __init__(self, keeper: Keeper, key: bytes, snapshot: SnapshotPart, job: str) -> None:
        """Ask for it, and read its header and its manifest.

        Raises:
            DamagedPartError: what is answered is not what was asked for.
            OSError: the agent cannot be reached, cannot show who it is, or has no such part.
        """
        self.manifest = b""
        self._connection = socket.create_connection((keeper.host, keeper.port), timeout=CONNECT_S)
        try:
            self._wire = Wire(self._connection)
            answer = self._ask(key, msgspec.msgpack.encode(snapshot))
            self.header = decode_header(answer, job)
            if self.header.snapshot != snapshot:
                raise DamagedPartError(f"it is {self.header.snapshot.name}, not {snapshot.name}")
            self.manifest = self._wire.read(self.header.manifest_bytes)
            if zlib.crc32(self.manifest) != self.header.checksums[0]:
                raise DamagedPartError("its manifest has another checksum")
        except (OSError, DamagedPartError):
            self.close()
            raise

    def _ask(self, key: bytes, request: bytes) -> bytes:
        """Return the header that is answered."""
        wire, mine = self._wire, secrets.token_bytes(NONCE)
        wire.write(MAGIC + mine)
        theirs, shown = wire.read(NONCE), wire.read(TAG)
        nonces = mine + theirs
        if not hmac.compare_digest(shown, proof(key, b"keeper", nonces)):
            raise TransferError("the agent could not show who it is")
        wire.write(REQUEST.pack(len(request)) + request + proof(key, b"reader", nonces, request))
        (length,) = ANSWER.unpack(wire.read(ANSWER.size))
        if not length:
            raise TransferError("it is not there any more")
        if length > MAX_HEADER_BYTES:
            raise TransferError(f"a header of {length} bytes is larger than {MAX_HEADER_BYTES}")
        header, shown = wire.read(length), wire.read(TAG)
        if not hmac.compare_digest(shown, proof(key, b"header", nonces, header)):
            raise TransferError("its header is corrupted")
        return header

    def choose(self, places: Sequence[int]) -> None:
        """Say, once, which chunks of the body are to be sent, ascending."""
        self._wire.write(ANSWER.pack(len(places)), struct.pack(f"<{len(places)}I", *places))

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next of these chunks."""
        self._wire.read_into(pieces)

    def abort(self) -> None:
        """Leave at once, whoever reads. Any thread; never blocks."""
        shut(self._connection)

    def close(self) -> None:
        """Let go of it; repeating that does no harm."""
        self._connection.close()
