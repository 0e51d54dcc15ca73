"""The receiving side of a state transfer; `transfer` says how it goes."""

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

from holdfast.control.link.wire import SILENCE_S, Reception, Sockets, TransferError, Wire, checksum
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
#: streams of senders that have shown who they are
MAX_CONNECTIONS = 32
#: and of those that bring parcels, which may come from many members at once
MAX_PARCELS = 256
#: offers that come before their plan: how many may wait for it here; the others ask again
MAX_WAITING = 16


class StateReceiver:
    """One state on its way in. Threads of the inbox fill it, the training thread waits for it."""

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
        """Wait for streams.

        Args:
            after: an earlier one that was broken off; nothing is written before its last thread has left the tensors.
            prepare: gives the tensors to receive into, or raises StateMismatchError.
            on_end: called when `ended` has become true, from a thread of the inbox.
            midway: called in the midst of each stream's first chunk.
            chunk_bytes: the sender's, too.
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
        self._sockets = Sockets()
        self._active = 0
        self._changed = threading.Condition()
        #: the step, and what its manifest comes to: of all streams
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
        """Who sends, in words."""
        return " and ".join(self.ticket.senders)

    @property
    def failed_senders(self) -> tuple[str, ...]:
        """The member whose stream failed first, or all senders if no stream failed."""
        senders = self.ticket.senders
        return senders if self._failed_stream is None else (senders[self._failed_stream % len(senders)],)

    @property
    def has_ended(self) -> bool:
        """True once everything is here, or once that has become impossible."""
        return bool(self._error) or self._done == self.ticket.streams

    def result(self) -> Header:
        """Return what was received; the tensors are filled.

        Raises:
            TransferError: it failed.
        """
        if self._error or self._header is None:
            raise TransferError(self._error or "it has not ended")
        return self._header

    def release_tensors(self) -> None:
        """Let go of the tensors: what is received is the state now, or of no use. This may be looked at for long."""
        with self._changed:
            self.tensors, self._flat = [], None

    def abort(self) -> None:
        """Leave at once; what is here is void. Any thread; never blocks."""
        self._sockets.shut_all()
        with self._changed:
            self._error = self._error or "it was broken off"
            self._changed.notify_all()

    def wait_inactive(self, timeout_s: float = 2 * SILENCE_S) -> bool:
        """Wait until no thread writes to the tensors any more; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout=timeout_s)

    def receive_stream(self, connection: socket.socket, wire: Wire, stream: int, claim: bytes) -> None:
        """Receive one stream, in the thread that calls this. The sender has shown who it is."""
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
            if header != CHUNK.pack(start, size, checksum(pieces)):
                raise TransferError(f"the checksum of bytes {start} to {start + size} is wrong: they were corrupted")
        wire.write(ACCEPTED)

    def _prepare_tensors(self, header: Header) -> None:
        if self._after is not None:
            if not self._after.wait_inactive():
                raise TransferError("an earlier transfer does not end")
            self._after.release_tensors()  # (it came to nothing, though the training thread may not have left it yet)
        self._after = None
        tensors = self._prepare(header.manifest)
        flat = FlatState(tensors)
        with self._changed:
            if self._error:
                raise TransferError(self._error)
            self.tensors, self._flat, self._header, self.nbytes = tensors, flat, header, flat.nbytes
            self._changed.notify_all()

    def _await_header(self) -> FlatState:
        with self._changed:
            self._changed.wait_for(lambda: self._flat is not None or self._error, timeout=SILENCE_S)
            if self._error or self._flat is None:
                raise TransferError(self._error or "the header did not come")
            return self._flat

    def _on_stream_ended(self, error: str, stream: int) -> None:
        with self._changed:
            self._active -= 1
            if error and not self._error:
                self._error, self._failed_stream = error, stream
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
    if length > MAX_HEADER_BYTES:
        raise TransferError(f"a header of {length} bytes is larger than {MAX_HEADER_BYTES}")
    data = wire.read(length)
    if hashlib.sha256(data).digest() != digest:
        raise TransferError("the header is corrupted")
    header = msgspec.msgpack.decode(data, type=Header)
    if header.step != step:
        raise TransferError("the header is of another step")
    if hashlib.sha256(msgspec.msgpack.encode(header.manifest)).digest() != manifest:
        raise TransferError("the header is of other tensors than were claimed")
    return header


class StateInbox:
    """Listens for senders of state, as long as the worker lives."""

    def __init__(
        self,
        host: str,
        *,
        admit: Callable[[Offer, float], Ticket | None],
        open_receiver: Callable[[Ticket], StateReceiver | None],
        monotonic: Callable[[], float] = time.monotonic,
        make_wire: Callable[[socket.socket], Wire] = Wire,
    ) -> None:
        """Say what to listen on and whom to let in; `start` begins.

        Args:
            host: the address to bind to.
            admit: says who may send what is offered; waits up to so many seconds until it is known.
            open_receipt: a sender has shown who it is; returns where its stream goes, None where it is too late.
            monotonic: the clock by which strangers are late.
            make_wire: what a connection is written and read by.
        """
        self._make_wire = make_wire
        self._admit = admit
        self._open_receiver = open_receiver
        places = {STATE: MAX_CONNECTIONS, PARCEL: MAX_PARCELS}
        self._slots = {kind: threading.BoundedSemaphore(count) for kind, count in places.items()}
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._reception = Reception(host, "sender", self._receive, CountedLog(logger, time.monotonic), monotonic)

    def start(self) -> int:
        """Listen on a free port, and return it.

        Raises:
            OSError: there is none.
        """
        return self._reception.start()

    def close(self) -> None:
        """Stop listening, and leave what is under way."""
        self._reception.close()

    def _receive(self, connection: socket.socket) -> None:
        wire = self._make_wire(connection)
        kind, generation, sender, stream, theirs = PREAMBLE.unpack(wire.read(PREAMBLE.size))
        if kind not in self._slots or stream >= STREAMS * MAX_GIVERS:
            raise TransferError("this is not our protocol")
        offer = Offer(kind, generation, sender, stream)
        ticket = self._admit(offer, 0.0) or self._await_plan(connection, offer)
        if ticket is None or stream not in ticket.own_streams:
            raise TransferError(f"nobody is to send the state of generation {generation}")
        mine = secrets.token_bytes(NONCE)
        wire.write(mine, ticket.make_proof("receiver", stream, theirs + mine))
        claim = wire.read(CLAIM.size)
        proof = wire.read(TAG)
        if not hmac.compare_digest(proof, ticket.make_proof("sender", stream, theirs + mine, claim)):
            raise TransferError("the sender could not show who it is")
        self._reception.strangers.leave(connection)
        if not self._slots[kind].acquire(blocking=False):
            raise TransferError("more streams at a time than there are places")
        try:
            receipt = self._open_receiver(ticket)
            if receipt is None:
                raise TransferError(f"the state of generation {generation} comes too late")
            receipt.receive_stream(connection, wire, stream, claim)
        finally:
            self._slots[kind].release()

    def _await_plan(self, connection: socket.socket, offer: Offer) -> Ticket | None:
        """Wait for the plan that makes an offer valid; so many may, and they keep no other stranger out."""
        if not self._waiting.acquire(blocking=False):
            return None
        try:
            self._reception.strangers.leave(connection)
            ticket = self._admit(offer, OFFER_WAIT_S)
            self._reception.strangers.enter(connection)
            return ticket
        finally:
            self._waiting.release()
