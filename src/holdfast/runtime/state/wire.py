"""The wire format of a state transfer: proofs, a header, chunks, and the memory that they fill."""

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

#: number of streams of each sender
STREAMS = 2
CHUNK_BYTES = 1 << 20
#: seconds that an offer may precede its plan, because orders reach workers at different times
OFFER_WAIT_S = 10.0

#: first bytes of a stream: for a whole state, or for a parcel
STATE = b"holdfast"
PARCEL = b"hfparcel"
NONCE = 32
TAG = 32
PREAMBLE = struct.Struct("<8sQIH32s")  # kind, generation, the sender's rank, stream, the sender's nonce
CLAIM = struct.Struct("<QQ32s32s")  # step, header bytes, the SHA-256 of the header, and of the manifest in it
CHUNK = struct.Struct("<QII")  # offset in the state, bytes, checksum
ACCEPTED = b"K"


class Offer(NamedTuple):
    """What a peer that connects to send or receive state says first, unauthenticated."""

    kind: bytes
    generation: int
    sender: int
    stream: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a sent state, or of a part of it."""

    #: the step of the state
    step: int
    #: the last steps and their results, as far as they are known
    passed: PassedSteps
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The permission for a transfer: which member may send the state of a generation, or a parcel, to which member."""

    plan: GenerationPlan
    sender: str
    receiver: str
    kind: bytes = STATE

    @property
    def streams(self) -> int:
        """The number of streams: a parcel comes from one sender, a state from all its senders in turn."""
        return STREAMS * len(self.senders)

    @property
    def senders(self) -> tuple[str, ...]:
        """The members that send the streams."""
        return (self.sender,) if self.kind == PARCEL else self.plan.senders(self.receiver)

    @property
    def own_streams(self) -> range:
        """The streams of this ticket's sender."""
        senders = self.senders
        return range(senders.index(self.sender), self.streams, len(senders))

    def make_proof(self, role: str, stream: int, nonces: bytes, claim: bytes = b"") -> bytes:
        """Return the proof of one side of one stream: an HMAC-SHA256 with the plan's secret over the kind, the
        generation, both workers and the arguments.

        Args:
            role: "sender" or "receiver".
            nonces: of both sides.
            claim: the sender's `CLAIM`; empty for the receiver.
        """
        text = "\0".join(
            (role, str(self.plan.term), str(self.plan.generation), self.sender, self.receiver, str(stream))
        )
        kind = b"holdfast parcel\0" if self.kind == PARCEL else b"holdfast state\0"
        return hmac.digest(self.plan.secret, kind + text.encode() + b"\0" + nonces + claim, "sha256")


# ---- bytes of tensors as one flat space ----


class FlatState:
    """The bytes of a list of tensors, concatenated.

    Tensors that cannot be read or written in place (on a device, or not contiguous) are copied.
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
        """Return views of the memory of `length` bytes from offset `start` of the concatenation, in order."""
        found: list[memoryview] = []
        place = bisect.bisect_right(self._starts, start) - 1
        while length > 0:
            view, offset = self._views[place], start - self._starts[place]
            part = view[offset : offset + length]
            found.append(part)
            start, length, place = start + len(part), length - len(part), place + 1
        return found

    def copy_staged(self) -> None:
        """Copy received bytes into tensors that could not be written in place, from their copies on the host."""
        with torch.no_grad():
            for tensor, host in self._staged:
                tensor.copy_(host)


def stream_chunks(
    nbytes: int, stream: int, chunk_bytes: int = CHUNK_BYTES, *, streams: int = STREAMS
) -> list[tuple[int, int]]:
    """Return (offset, length) of the chunks in one stream: every `streams`-th chunk of the state."""
    starts = range(stream * chunk_bytes, nbytes, streams * chunk_bytes)
    return [(start, min(chunk_bytes, nbytes - start)) for start in starts]
