"""What a state transfer consists of on the wire: proofs, a header, chunks, and the memory that they go to."""

from __future__ import annotations

import bisect
import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from holdfast.protocol.plan import GenerationPlan, PassedSteps
from holdfast.runtime.state.memory import host_bytes, is_directly_readable
from holdfast.runtime.state.state import Manifest

#: of each sender
STREAMS = 2
CHUNK_BYTES = 1 << 20
#: How long an offer may come before its plan: orders reach workers at different times.
OFFER_WAIT_S = 10.0

#: what a stream begins with: it brings a whole state, or a parcel
STATE = b"holdfast"
PARCEL = b"hfparcel"
NONCE = 32
TAG = 32
PREAMBLE = struct.Struct("<8sQIH32s")  # kind, generation, the sender's rank, stream, the sender's nonce
CLAIM = struct.Struct("<QQ32s32s")  # step, header bytes, the SHA-256 of the header, and of the manifest in it
CHUNK = struct.Struct("<QII")  # offset in the state, bytes, checksum
ACCEPTED = b"K"


class Offer(NamedTuple):
    """What whoever connects says that it brings, before it has shown who it is."""

    kind: bytes
    generation: int
    sender: int
    stream: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent: the state of `step`, or a part of it; the newest steps that led to it, as far as v is known."""

    step: int
    passed: PassedSteps
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Who may send whom the state of a generation, or a parcel."""

    plan: GenerationPlan
    sender: str
    receiver: str
    kind: bytes = STATE

    @property
    def streams(self) -> int:
        """In how many streams it comes: a parcel of one sender, a state in turn of all that send it."""
        return STREAMS * len(self.senders)

    @property
    def senders(self) -> tuple[str, ...]:
        """Who sends what comes in all of them."""
        return (self.sender,) if self.kind == PARCEL else self.plan.senders(self.receiver)

    @property
    def own_streams(self) -> range:
        """Which of them the sender has."""
        senders = self.senders
        return range(senders.index(self.sender), self.streams, len(senders))

    def make_proof(self, role: str, stream: int, nonces: bytes, claim: bytes = b"") -> bytes:
        """Return the proof of one side of one stream."""
        text = "\0".join(
            (role, str(self.plan.term), str(self.plan.generation), self.sender, self.receiver, str(stream))
        )
        what = b"holdfast parcel\0" if self.kind == PARCEL else b"holdfast state\0"
        return hmac.digest(self.plan.secret, what + text.encode() + b"\0" + nonces + claim, "sha256")


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
            if not is_directly_readable(tensor):
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

    def copy_staged(self) -> None:
        """Copy what came into staging to where it belongs."""
        with torch.no_grad():
            for tensor, host in self._staged:
                tensor.copy_(host)


def stream_chunks(
    nbytes: int, stream: int, chunk_bytes: int = CHUNK_BYTES, *, streams: int = STREAMS
) -> list[tuple[int, int]]:
    """Return (offset, length) of the chunks that one of so many streams carries: each that many-th of the state's."""
    starts = range(stream * chunk_bytes, nbytes, streams * chunk_bytes)
    return [(start, min(chunk_bytes, nbytes - start)) for start in starts]
