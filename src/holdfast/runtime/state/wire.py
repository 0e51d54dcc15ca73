"""What a state transfer consists of on the wire: proofs, a header, chunks with checksums, and the memory they go to."""

from __future__ import annotations

import bisect
import contextlib
import hmac
import socket
import struct
import threading
import zlib
from dataclasses import dataclass

import msgspec
import torch

from holdfast.protocol.plan import GenerationPlan, PassedSteps
from holdfast.runtime.state.memory import directly_readable, host_bytes
from holdfast.runtime.state.state import Manifest

STREAMS = 2
CHUNK_BYTES = 1 << 20
#: Either side gives up after so long without a byte; a halt is what normally ends a transfer early.
SILENCE_S = 10.0
#: How long an offer may come before its plan: orders reach workers at different times.
OFFER_WAIT_S = 10.0
#: How many buffers go into one system call (IOV_MAX is 1024).
_VECTOR = 512

MAGIC = b"holdfast"
NONCE = 32
TAG = 32
PREAMBLE = struct.Struct("<8sQH32s")  # magic, generation, stream, the sender's nonce
CLAIM = struct.Struct("<QQ32s")  # step, header bytes, header's SHA-256
CHUNK = struct.Struct("<QII")  # offset in the state, bytes, CRC-32
ACCEPTED = b"K"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent: the state of `step`, and the newest steps that have led to it, as far as v is known."""

    step: int
    passed: PassedSteps
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Who may send whom the state of a generation."""

    plan: GenerationPlan
    sender: str
    receiver: str

    def tag(self, role: str, stream: int, nonces: bytes, claim: bytes = b"") -> bytes:
        """Return the proof of one side of one stream."""
        text = "\0".join(
            (role, str(self.plan.term), str(self.plan.generation), self.sender, self.receiver, str(stream))
        )
        return hmac.digest(self.plan.secret, b"holdfast state\0" + text.encode() + b"\0" + nonces + claim, "sha256")


class TransferError(ConnectionError):
    """A transfer failed; the message says how."""


class ClosedError(TransferError):
    """The other side has closed the connection."""


# ---- bytes of tensors as one flat space ----


class FlatState:
    """The bytes of a list of tensors, laid end to end.

    Tensors that cannot be read or written in place (on a device, or not contiguous) go through copies.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._views: list[memoryview] = []
        self._starts: list[int] = []
        self.nbytes = 0
        for tensor in tensors:
            host = tensor
            if not directly_readable(tensor):
                host = tensor.detach().cpu().contiguous()
                if host.data_ptr() == tensor.data_ptr():
                    host = host.clone()
                self._staged.append((tensor, host))
            view = host_bytes(host)
            if len(view):
                self._views.append(view)
                self._starts.append(self.nbytes)
                self.nbytes += len(view)

    def pieces(self, start: int, length: int) -> list[memoryview]:
        """Return the memory of a range, in order."""
        found: list[memoryview] = []
        place = bisect.bisect_right(self._starts, start) - 1
        while length > 0:
            view, offset = self._views[place], start - self._starts[place]
            part = view[offset : offset + length]
            found.append(part)
            start, length, place = start + len(part), length - len(part), place + 1
        return found

    def settle(self) -> None:
        """Copy what came into staging to where it belongs."""
        with torch.no_grad():
            for tensor, host in self._staged:
                tensor.copy_(host)


def stream_chunks(nbytes: int, stream: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (offset, length) of the chunks that one stream carries: every STREAMS-th of the state's."""
    starts = range(stream * chunk_bytes, nbytes, STREAMS * chunk_bytes)
    return [(start, min(chunk_bytes, nbytes - start)) for start in starts]


# ---- the wire ----


class Wire:
    """Exact reads and writes on a socket, given up after a silence."""

    def __init__(self, connection: socket.socket) -> None:
        # Blocking, with the kernel's own timeouts: Python's make every call a poll and a short read.
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(SILENCE_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def read(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into([memoryview(buffer)])
        return bytes(buffer)

    def read_into(self, buffers: list[memoryview]) -> None:
        left = list(buffers)
        while left:
            count = self._socket.recvmsg_into(left[:_VECTOR], 0, socket.MSG_WAITALL)[0]
            if count == 0:
                raise ClosedError("the other side closed the connection")
            left = _advance(left, count)

    def write(self, *buffers: bytes | memoryview) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            left = _advance(left, self._socket.sendmsg(left[:_VECTOR]))


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left after so many bytes; empty buffers are dropped."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    left = buffers[done:]
    if count:
        left[0] = left[0][count:]
    return left


def checksum(pieces: list[memoryview]) -> int:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


class Sockets:
    """Sockets that another thread may shut, for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[socket.socket] = []
        self.shut = False

    def add(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.append(connection)
            if self.shut:
                shut(connection)

    def remove(self, connection: socket.socket) -> None:
        """Close a socket; under the lock, so that `shut_all` never meets a descriptor that was used again."""
        with self._changed:
            self._open.remove(connection)
            connection.close()
            self._changed.notify_all()

    def shut_all(self, wait_s: float = 0.0) -> None:
        """Shut those that are here and all that come; then wait for so long until their threads have closed them."""
        with self._changed:
            self.shut = True
            for connection in self._open:
                shut(connection)
            self._changed.wait_for(lambda: not self._open, timeout=wait_s)


def shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connection.shutdown(socket.SHUT_RDWR)
