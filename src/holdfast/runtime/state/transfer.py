"""State transfer to joiners: a sender connects, both sides authenticate, then two streams go directly into memory.

If several members have the state, each sends a part of it, in its own streams. All must claim the same step and the
same tensors, or the state is refused.

Each stream is a TCP connection. Before anything is parsed, both sides prove with HMAC-SHA256 that they know the plan's
secret, bound to the generation, both worker ids, the stream and fresh nonces. The sender's proof also covers the step
and a digest of the header. Stream 0 then carries the header (description of the tensors, step, step results). Every
stream carries its part of the bytes in chunks with checksums, which each side computes in the stream's thread. A halt
shuts the sockets: both sides stop at once, and the received bytes are void.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Generator

import msgspec

from holdfast.control.link.wire import ClosedError, SocketSet, TransferError, Wire, compute_checksum
from holdfast.protocol.plan import GenerationPlan, Member, PassedStep
from holdfast.runtime.state.state import StateView
from holdfast.runtime.state.wire import (
    ACCEPTED,
    CHUNK,
    CHUNK_BYTES,
    CLAIM,
    NONCE,
    OFFER_WAIT_S,
    PREAMBLE,
    STATE,
    TAG,
    FlatState,
    Header,
    Ticket,
    stream_chunks,
)

CONNECT_S = 5.0
#: seconds between two attempts to connect: pending peers may block a sender until the receiver knows its plan
PAUSE_S = 0.1
CONNECT_ATTEMPTS = round(OFFER_WAIT_S / PAUSE_S)


class StateSender:
    """Sends this worker's state, or a part of it, to the members that lack it, in background threads."""

    def __init__(
        self,
        *,
        plan: GenerationPlan,
        sender: str,
        receivers: tuple[str, ...],
        view: StateView,
        step: int,
        passed: tuple[PassedStep, ...],
        on_end: Callable[[str, str], None],
        midway: Callable[[], None] = lambda: None,
        chunk_bytes: int = CHUNK_BYTES,
        make_wire: Callable[[socket.socket], Wire] = Wire,
        connect_attempts: int = CONNECT_ATTEMPTS,
        kind: bytes = STATE,
    ) -> None:
        """Prepare; `start` starts to send.

        Args:
            view: the state; its tensors must not change until `sent`, or until some time after `abort`.
            on_end: called once from a thread of the sender, also after an abort, with the first error and its receiver,
                or with two empty strings.
            midway: called during each stream's first chunk, which may be the only one.
            chunk_bytes: the same as the receiver's.
            make_wire: makes the reader and writer of a connection.
            connect_attempts: how often to connect if the receiver closes the connection before it is authenticated.
            kind: STATE or PARCEL.
        """
        self._kind = kind
        self._plan = plan
        self._sender = sender
        self._receivers = receivers
        self._tensors = view.tensors
        self._header = msgspec.msgpack.encode(Header(step=step, passed=passed, manifest=view.manifest))
        manifest = hashlib.sha256(msgspec.msgpack.encode(view.manifest)).digest()
        self._claim = CLAIM.pack(step, len(self._header), hashlib.sha256(self._header).digest(), manifest)
        self._on_end = on_end
        self._midway = midway
        self._chunk_bytes = chunk_bytes
        self._make_wire = make_wire
        self._connect_attempts = connect_attempts
        self._sockets = SocketSet()
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        #: errors, each with its receiver
        self._errors: list[tuple[str, str]] = []
        self._left = 0
        self._threads: list[threading.Thread] = []
        #: whether all receivers have the whole state
        self.sent = False

    def start(self) -> None:
        """Start a thread for each receiver and each of this sender's streams to it; returns at once."""
        members = {member.worker: member for member in self._plan.members}
        jobs = [
            (members[receiver], stream) for receiver in self._receivers for stream in self._ticket(receiver).own_streams
        ]
        self._left = len(jobs)
        flat: list[FlatState] = []
        for member, stream in jobs:
            thread = threading.Thread(
                target=self._run, args=(flat, member, stream), name=f"holdfast-push-{stream}", daemon=True
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _ticket(self, receiver: str) -> Ticket:
        """Return this sender's ticket for a receiver."""
        return Ticket(plan=self._plan, sender=self._sender, receiver=receiver, kind=self._kind)

    def abort(self) -> None:
        """Stop all streams at once. Any thread; never blocks."""
        self._aborted.set()
        self._sockets.shut_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, at most `timeout_s` for each; return whether all have ended."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, flat: list[FlatState], member: Member, stream: int) -> None:
        """Send one stream. An error stops all other streams; the last stream to end calls `on_end`.

        Args:
            flat: the state's bytes, which all streams share; the first stream adds them.
        """
        receiver = member.worker
        error = ""
        try:
            with self._lock:
                if not flat:
                    flat.append(FlatState(self._tensors))
            self._send(flat[0], receiver, (member.host, member.state_port), stream)
        except OSError as problem:
            error = f"state for {receiver} could not be sent: {problem or type(problem).__name__}"
        with self._lock:
            self._left -= 1
            if error:
                self._errors.append((error, receiver))
            last = self._left == 0
            if last:  # This object may exist for longer than the tensors are needed.
                flat.clear()
                self._tensors = []
            self.sent = last and not self._errors
        if error:
            self.abort()
        if last:
            self._on_end(*(self._errors[0] if self._errors else ("", "")))

    def _send(self, flat: FlatState, receiver: str, address: tuple[str, int], stream: int) -> None:
        """Send one stream: the header if it is stream 0, and each chunk with its checksum; then wait for the
        confirmation.

        Raises:
            OSError: the connection failed, or the receiver did not accept the state.
        """
        with self._connect(receiver, address, stream) as wire:
            if stream == 0:
                wire.write(self._header)
            streams = self._ticket(receiver).streams
            parts = stream_chunks(flat.nbytes, stream, self._chunk_bytes, streams=streams)
            for place, (start, length) in enumerate(parts):
                pieces = flat.pieces(start, length)
                chunk = [CHUNK.pack(start, length, compute_checksum(pieces)), *pieces]
                if place == 0:
                    wire.write(chunk.pop(0))
                    self._midway()
                wire.write(*chunk)
            if wire.read(1) != ACCEPTED:
                raise TransferError("it was refused")

    @contextlib.contextmanager
    def _connect(self, receiver: str, address: tuple[str, int], stream: int) -> Generator[Wire]:
        """Connect to the receiver, and yield the wire after both sides are authenticated. If the receiver closes the
        connection before that, try again up to `connect_attempts` times.

        Raises:
            OSError: it is not reachable, or not authenticated.
        """
        for left in reversed(range(self._connect_attempts)):
            connection = socket.create_connection(address, timeout=CONNECT_S)
            self._sockets.add(connection)
            try:
                wire = self._make_wire(connection)
                try:
                    self._authenticate(wire, receiver, stream)
                except ClosedError:
                    # Pending peers may have taken all places for new connections, or all for waiting offers.
                    if not left or self._aborted.wait(PAUSE_S):
                        raise
                    continue
                yield wire
                return
            finally:
                self._sockets.remove(connection)

    def _authenticate(self, wire: Wire, receiver: str, stream: int) -> None:
        """Send the offer, check the receiver's proof, and send the claim with this side's proof.

        Raises:
            ClosedError: the receiver closed the connection.
            TransferError: its proof is wrong.
        """
        ticket = self._ticket(receiver)
        generation, rank = self._plan.generation, self._plan.rank(self._sender) or 0
        mine = secrets.token_bytes(NONCE)
        try:
            wire.write(PREAMBLE.pack(self._kind, generation, rank, stream, mine))
            theirs = wire.read(NONCE)
            proof = wire.read(TAG)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ClosedError(str(error)) from None
        if not hmac.compare_digest(proof, ticket.make_proof("receiver", stream, mine + theirs)):
            raise TransferError("the receiver could not be authenticated")
        wire.write(self._claim, ticket.make_proof("sender", stream, mine + theirs, self._claim))
