"""Reading parts of snapshots from the agents of other nodes: the protocol, and its reader.

The reader connects to the port of an agent, the keeper. Before anything is parsed, both sides prove with HMAC-SHA256
that they know the job's key for snapshots, bound to fresh nonces. The reader's proof covers its request. The keeper's
second proof covers the header that it sends. Then the manifest follows. The reader selects the chunks of the body, gets
them as they are in the file, and verifies them against the checksums in the header.
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
from holdfast.control.link.wire import TransferError, Wire, shut_down
from holdfast.protocol.state import Keeper, SnapshotPart

MAGIC = b"hfparts\1"
NONCE = 32
TAG = 32
CONNECT_S = 5.0
MAX_REQUEST_BYTES = 1024
REQUEST = struct.Struct("<H")
ANSWER = struct.Struct("<I")


def compute_proof(key: bytes, role: bytes, nonces: bytes, what: bytes = b"") -> bytes:
    """Return one side's proof that it knows the job's key: a keyed hash.

    Args:
        key: the job's key for snapshots.
        role: the side, and the kind of its proof.
        nonces: the nonces of reader and keeper.
        what: the bytes that the proof covers.
    """
    return hmac.digest(key, b"holdfast snapshot\0" + role + b"\0" + nonces + what, "sha256")


class RemotePart:
    """A part at another node's agent, for reading."""

    def __init__(self, keeper: Keeper, key: bytes, snapshot: SnapshotPart, job: str) -> None:
        """Request the part, and read its header and manifest.

        Raises:
            DamagedPartError: the answer is not the requested part, or is damaged.
            OSError: the agent cannot be reached, cannot prove its identity, or does not have the part.
        """
        self.manifest = b""
        self._connection = socket.create_connection((keeper.host, keeper.port), timeout=CONNECT_S)
        try:
            self._wire = Wire(self._connection)
            answer = self._request_header(key, msgspec.msgpack.encode(snapshot))
            self.header = decode_header(answer, job)
            if self.header.snapshot != snapshot:
                raise DamagedPartError(f"it is {self.header.snapshot.name}, not {snapshot.name}")
            self.manifest = self._wire.read(self.header.manifest_bytes)
            if zlib.crc32(self.manifest) != self.header.checksums[0]:
                raise DamagedPartError("its manifest has another checksum")
        except (OSError, DamagedPartError):
            self.close()
            raise

    def _request_header(self, key: bytes, request: bytes) -> bytes:
        """Authenticate both sides by `key`, send the encoded request, and return the encoded header from the answer.

        Raises:
            TransferError: the agent does not know the key, does not have the part, or the header is too large or
                corrupted.
            OSError: the connection failed.
        """
        wire, own_nonce = self._wire, secrets.token_bytes(NONCE)
        wire.write(MAGIC + own_nonce)
        peer_nonce, peer_proof = wire.read(NONCE), wire.read(TAG)
        nonces = own_nonce + peer_nonce
        if not hmac.compare_digest(peer_proof, compute_proof(key, b"keeper", nonces)):
            raise TransferError("the agent could not prove its identity")
        wire.write(REQUEST.pack(len(request)) + request + compute_proof(key, b"reader", nonces, request))
        (length,) = ANSWER.unpack(wire.read(ANSWER.size))
        if not length:
            raise TransferError("the agent no longer has it")
        if length > MAX_HEADER_BYTES:
            raise TransferError(f"a header of {length} bytes is larger than {MAX_HEADER_BYTES}")
        header, peer_proof = wire.read(length), wire.read(TAG)
        if not hmac.compare_digest(peer_proof, compute_proof(key, b"header", nonces, header)):
            raise TransferError("its header is corrupted")
        return header

    def select_chunks(self, indices: Sequence[int]) -> None:
        """Select the chunks of the body to read, by ascending index. Called once."""
        self._wire.write(ANSWER.pack(len(indices)), struct.pack(f"<{len(indices)}I", *indices))

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next selected chunk."""
        self._wire.read_into(pieces)

    def abort(self) -> None:
        """Shut down the connection at once, also while a thread reads. Any thread; never blocks."""
        shut_down(self._connection)

    def close(self) -> None:
        """Close the connection. A repeated call does nothing."""
        self._connection.close()
