"""The receiving side of a state transfer; `transfer` describes the protocol."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from holdfast.control.link.wire import SILENCE_S, SocketSet, ThreadedListener, TransferError, Wire, compute_checksum
from holdfast.counted_log import CountedLog
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.state import MAX_GIVERS
from holdfast.runtime.state.state import Manifest, StateMismatchError
from holdfast.runtime.state.wire import (
    ACCEPTED,
    CHUNK,
    CHUNK_BYTES,
    CLAIM,
    NONCE,
    OFFER_WAIT_S,
    PARCEL,
    PREAMBLE,
    STATE,
    STREAMS,
    TAG,
    FlatState,
    Header,
    Offer,
    Ticket,
    stream_chunks,
)

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 20
#: number of streams from authenticated senders
MAX_CONNECTIONS = 32
#: number of streams with parcels, which may come from many members at once
MAX_PARCELS = 256
#: number of offers that may wait for their plan; other senders must try again
MAX_WAITING = 16


class StateReceiver:
    """Receives one state. Threads of the inbox fill it, and the training thread waits for it."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        prepare: Callable[[Manifest], list[torch.Tensor]],
        on_end: Callable[[], None],
        midway: Callable[[], None] = lambda: None,
        after: StateReceiver | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Prepare for the streams.

        Args:
            after: an earlier transfer that was broken off; nothing is written before its threads have stopped writing.
            prepare: returns the tensors to receive into, or raises StateMismatchError.
            on_end: called when `has_ended` has become true, from a thread of the inbox.
            midway: called during each stream's first chunk.
            chunk_bytes: the same as the sender's.
        """
        self.ticket = ticket
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0
        self.seconds = 0.0
        self._prepare = prepare
        self._on_end = on_end
        self._midway = midway
        self._after = after
        self._chunk_bytes = chunk_bytes
        self._sockets = SocketSet()
        self._active = 0
        self._changed = threading.Condition()
        #: step and digest of the manifest, the same for all streams
        self._claim: tuple[int, bytes] | None = None
        self._header: Header | None = None
        self._flat: FlatState | None = None
        self._streams: set[int] = set()
        self._done = 0
        self._error = ""
        self._failed_stream: int | None = None
        self._started = time.monotonic()

    @property
    def sender(self) -> str:
        """The names of the senders, for messages."""
        return " and ".join(self.ticket.senders)

    @property
    def failed_senders(self) -> tuple[str, ...]:
        """The sender of the stream that failed first, or all senders if no stream failed."""
        senders = self.ticket.senders
        return senders if self._failed_stream is None else (senders[self._failed_stream % len(senders)],)

    @property
    def has_ended(self) -> bool:
        """Whether the state is received, or can no longer be received."""
        return bool(self._error) or self._done == self.ticket.streams

    def result(self) -> Header:
        """Return the header of the received state; the tensors are filled.

        Raises:
            TransferError: the transfer failed.
        """
        if self._error or self._header is None:
            raise TransferError(self._error or "it has not ended")
        return self._header

    def release_tensors(self) -> None:
        """Drop the references to the tensors, because this object may exist for a long time."""
        with self._changed:
            self.tensors = []
            self._flat = None

    def abort(self) -> None:
        """Stop at once; the received bytes are void. Any thread; never blocks."""
        self._sockets.shut_all()
        with self._changed:
            self._error = self._error or "it was broken off"
            self._changed.notify_all()

    def wait_inactive(self, timeout_s: float = 2 * SILENCE_S) -> bool:
        """Wait until no thread writes to the tensors; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout=timeout_s)

    def receive_stream(self, connection: socket.socket, wire: Wire, stream: int, claim: bytes) -> None:
        """Receive one stream of an authenticated sender in the calling thread. An error is not raised: it ends all
        streams, and `result` raises it.

        Args:
            claim: the sender's `CLAIM`: step, and hashes of header and manifest.
        """
        with self._changed:
            self._active += 1
        self._sockets.add(connection)
        error = ""
        try:
            self._receive_chunks(wire, stream, claim)
        except (OSError, StateMismatchError, *MALFORMED) as problem:
            error = f"{problem or type(problem).__name__}"
        finally:
            self._sockets.remove(connection)
        self._on_stream_ended(error, stream)

    def _receive_chunks(self, wire: Wire, stream: int, claim: bytes) -> None:
        """Read a stream's chunks into the tensors, and confirm them to the sender. Stream 0 first brings the header,
        for which the others wait.

        Raises:
            TransferError: the stream was received before, claims another step or state than the others, or is
                corrupted.
        """
        step, length, digest, manifest = CLAIM.unpack(claim)
        with self._changed:
            if stream in self._streams or (self._claim and self._claim != (step, manifest)):
                raise TransferError(f"stream {stream} does not belong to this transfer: it is of step {step}")
            self._streams.add(stream)
            self._claim = step, manifest
        if stream == 0:
            self._prepare_tensors(_read_header(wire, step, length, digest, manifest))
        flat, streams = self._await_header(), self.ticket.streams
        for place, (start, size) in enumerate(stream_chunks(flat.nbytes, stream, self._chunk_bytes, streams=streams)):
            pieces = flat.pieces(start, size)
            header = wire.read(CHUNK.size)
            if place == 0:
                self._midway()
            wire.read_into(pieces)
            if header != CHUNK.pack(start, size, compute_checksum(pieces)):
                raise TransferError(f"the checksum of bytes {start} to {start + size} is wrong: they were corrupted")
        wire.write(ACCEPTED)

    def _prepare_tensors(self, header: Header) -> None:
        """Get the tensors for a header's manifest, once an earlier transfer has stopped writing, and wake the streams
        that wait for them.

        Raises:
            TransferError: the earlier transfer does not end, or this one has failed meanwhile.
        """
        if self._after is not None:
            if not self._after.wait_inactive():
                raise TransferError("an earlier transfer does not end")
            self._after.release_tensors()  # It has failed, but the training thread may still refer to it.
        self._after = None
        tensors = self._prepare(header.manifest)
        flat = FlatState(tensors)
        with self._changed:
            if self._error:
                raise TransferError(self._error)
            self.tensors, self._flat, self._header, self.nbytes = tensors, flat, header, flat.nbytes
            self._changed.notify_all()

    def _await_header(self) -> FlatState:
        """Wait until stream 0 has received the header, at most `SILENCE_S`, and return the memory to fill.

        Raises:
            TransferError: the header did not come, or the transfer has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._flat is not None or self._error, timeout=SILENCE_S)
            if self._error or self._flat is None:
                raise TransferError(self._error or "the header did not come")
            return self._flat

    def _on_stream_ended(self, error: str, stream: int) -> None:
        """Handle the end of a stream. The first error fails the transfer and ends all streams; after the last stream,
        staged bytes are copied into their tensors. Call `on_end` if the transfer has ended.

        Args:
            error: why it failed, or "".
        """
        with self._changed:
            self._active -= 1
            if error and not self._error:
                self._error = error
                self._failed_stream = stream
            elif not self._error and self._flat is not None:
                if self._done + 1 == self.ticket.streams:
                    self._flat.copy_staged()
                    self.seconds = time.monotonic() - self._started
                self._done += 1
            ended = self.has_ended
            self._changed.notify_all()
        if error:
            self._sockets.shut_all()
        if ended:
            self._on_end()


def _read_header(wire: Wire, step: int, length: int, digest: bytes, manifest: bytes) -> Header:
    """Read and decode a header of `length` bytes.

    Args:
        digest, manifest: the claimed SHA-256 of the header, and of the manifest in it.

    Raises:
        TransferError: it is too large, corrupted, of another step, or has another manifest.
    """
    if length > MAX_HEADER_BYTES:
        raise TransferError(f"a header of {length} bytes is larger than {MAX_HEADER_BYTES}")
    data = wire.read(length)
    if hashlib.sha256(data).digest() != digest:
        raise TransferError("the header is corrupted")
    header = msgspec.msgpack.decode(data, type=Header)
    if header.step != step:
        raise TransferError("the header is of another step")
    if hashlib.sha256(msgspec.msgpack.encode(header.manifest)).digest() != manifest:
        raise TransferError("the header describes other tensors than the claim")
    return header


class StateInbox:
    """Listens for senders of state, as long as the worker exists."""

    def __init__(
        self,
        host: str,
        *,
        admit: Callable[[Offer, float], Ticket | None],
        open_receiver: Callable[[Ticket], StateReceiver | None],
        monotonic: Callable[[], float] = time.monotonic,
        make_wire: Callable[[socket.socket], Wire] = Wire,
    ) -> None:
        """Configure the inbox; `start` starts to listen.

        Args:
            host: the address to bind to.
            admit: returns the ticket of an offer; waits up to this many seconds until it is known.
            open_receiver: returns the receiver of an authenticated sender's stream, or None if it comes too late.
            monotonic: the clock for the time limit of pending peers.
            make_wire: makes the reader and writer of a connection.
        """
        self._make_wire = make_wire
        self._admit = admit
        self._open_receiver = open_receiver
        places = {STATE: MAX_CONNECTIONS, PARCEL: MAX_PARCELS}
        self._slots = {kind: threading.BoundedSemaphore(count) for kind, count in places.items()}
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._reception = ThreadedListener(host, "sender", self._receive, CountedLog(logger, time.monotonic), monotonic)

    def start(self) -> int:
        """Listen on a free port, and return it.

        Raises:
            OSError: no port is free.
        """
        return self._reception.start()

    def close(self) -> None:
        """Stop listening, and stop all transfers."""
        self._reception.close()

    def _receive(self, connection: socket.socket) -> None:
        """Handle a new connection: read the offer, find its plan's ticket or wait for it, authenticate both sides, and
        let the receiver of this transfer read the stream.

        Raises:
            TransferError: the offer is malformed or not planned, the sender is not authenticated, too many streams are
                open, or the receiver no longer wants the state.
        """
        wire = self._make_wire(connection)
        kind, generation, sender, stream, theirs = PREAMBLE.unpack(wire.read(PREAMBLE.size))
        if kind not in self._slots or stream >= STREAMS * MAX_GIVERS:
            raise TransferError("the offer is not of the state transfer protocol")
        offer = Offer(kind, generation, sender, stream)
        ticket = self._admit(offer, 0.0) or self._await_plan(connection, offer)
        if ticket is None or stream not in ticket.own_streams:
            raise TransferError(f"no sender is planned for stream {stream} of the state of generation {generation}")
        mine = secrets.token_bytes(NONCE)
        wire.write(mine, ticket.make_proof("receiver", stream, theirs + mine))
        claim = wire.read(CLAIM.size)
        proof = wire.read(TAG)
        if not hmac.compare_digest(proof, ticket.make_proof("sender", stream, theirs + mine, claim)):
            raise TransferError("the sender could not be authenticated")
        self._reception.pending.remove(connection)
        if not self._slots[kind].acquire(blocking=False):
            raise TransferError("too many streams at a time")
        try:
            receiver = self._open_receiver(ticket)
            if receiver is None:
                raise TransferError(f"the state of generation {generation} comes too late")
            receiver.receive_stream(connection, wire, stream, claim)
        finally:
            self._slots[kind].release()

    def _await_plan(self, connection: socket.socket, offer: Offer) -> Ticket | None:
        """Wait up to `OFFER_WAIT_S` for the plan that makes an offer valid, and return its ticket.

        Return None if none comes, or if `MAX_WAITING` offers wait already. Meanwhile the peer is not pending, so that
        it blocks no other peer.
        """
        if not self._waiting.acquire(blocking=False):
            return None
        try:
            self._reception.pending.remove(connection)
            ticket = self._admit(offer, OFFER_WAIT_S)
            self._reception.pending.add(connection)
            return ticket
        finally:
            self._waiting.release()
