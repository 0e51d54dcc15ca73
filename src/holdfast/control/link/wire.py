"""Sockets that carry state: exact reads and writes, checksums, and a listener with a thread for each connection.

The listener also limits the connections from peers that have not authenticated yet.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

import xxhash

from holdfast.counted_log import CountedLog

#: Either side gives up after this many seconds without a byte. Normally a halt ends a transfer earlier.
SILENCE_S = 10.0
#: How many buffers go into one system call (IOV_MAX is 1024).
_VECTOR = 512
#: the most connections from peers that have not authenticated yet
MAX_PENDING_PEERS = 64
#: seconds that a peer may take to authenticate
AUTHENTICATION_S = 5.0
#: connections that the kernel queues until they are accepted
BACKLOG = 128
CLOSE_S = 1.0
_LOOK_S = 1.0
_CHECKSUM = 0xFFFFFFFF
_PAUSE_S = 0.2


class TransferError(ConnectionError):
    """A transfer failed; the message says how."""


class ClosedError(TransferError):
    """The other side has closed the connection."""


class Wire:
    """Exact reads and writes on a socket, which fail after a silence of `SILENCE_S`."""

    def __init__(
        self, connection: socket.socket, count: Callable[[int, int], None] = lambda _sent, _received: None
    ) -> None:
        """Read and write a connection.

        Args:
            count: called with the numbers of bytes sent and received, as they move.
        """
        # Blocking, with the kernel's timeouts: Python's own timeouts turn each call into a poll and a short read.
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(SILENCE_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._count = count

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes, after waiting for them.

        Raises:
            ClosedError: the other side has closed the connection before.
            OSError: it failed, or nothing came for `SILENCE_S`.
        """
        buffer = bytearray(count)
        self.read_into([memoryview(buffer)])
        return bytes(buffer)

    def read_into(self, buffers: list[memoryview]) -> None:
        """Fill all buffers in their order with received bytes, and report each number of bytes to `count`.

        Raises:
            ClosedError: the other side has closed the connection before.
            OSError: it failed, or nothing came for `SILENCE_S`.
        """
        left = list(buffers)
        while left:
            count = self._socket.recvmsg_into(left[:_VECTOR], 0, socket.MSG_WAITALL)[0]
            if count == 0:
                raise ClosedError("the other side closed the connection")
            self._count(0, count)
            left = _advance(left, count)

    def write(self, *buffers: bytes | memoryview) -> None:
        """Send the buffers one after another, completely, and report each number of bytes to `count`.

        Raises:
            OSError: the connection failed, or the other side read nothing for `SILENCE_S`.
        """
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            count = self._socket.sendmsg(left[:_VECTOR])
            self._count(count, 0)
            left = _advance(left, count)


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers that remain after `count` bytes. Empty buffers are dropped."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    left = buffers[done:]
    if count:
        left[0] = left[0][count:]
    return left


def compute_checksum(pieces: list[memoryview]) -> int:
    """Return a 32-bit checksum of the concatenated pieces, to detect accidental corruption.

    It uses XXH3 and not CRC-32, because both ends compute it while others wait for the state. XXH3 takes a sixth of the
    time, or much less if zlib has no fast implementation on this machine.
    """
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0]) & _CHECKSUM
    value = xxhash.xxh3_64()
    for piece in pieces:
        value.update(piece)
    return value.intdigest() & _CHECKSUM


class SocketSet:
    """Open sockets that another thread may shut down permanently."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[socket.socket] = []
        self.shut = False

    def add(self, connection: socket.socket) -> None:
        """Add a socket, and shut it down at once if `shut_all` was called before."""
        with self._changed:
            self._open.append(connection)
            if self.shut:
                shut_down(connection)

    def remove(self, connection: socket.socket) -> None:
        """Close and forget a socket, under the lock: so `shut_all` never shuts down a descriptor that was reused.

        Raises:
            ValueError: the socket is not in the set, and is not closed.
        """
        with self._changed:
            self._open.remove(connection)
            connection.close()
            self._changed.notify_all()

    def shut_all(self, wait_s: float = 0.0) -> None:
        """Shut down all sockets and every socket that is added later, and wait at most `wait_s` until all are closed.

        Args:
            wait_s: seconds to wait until their threads have closed them.
        """
        with self._changed:
            self.shut = True
            for connection in self._open:
                shut_down(connection)
            self._changed.wait_for(lambda: not self._open, timeout=wait_s)


def shut_down(connection: socket.socket) -> None:
    """Shut down both directions of a socket, which ends waits on it in other threads.

    A socket without a connection is ignored.
    """
    with contextlib.suppress(OSError):  # not connected yet, or no longer
        connection.shutdown(socket.SHUT_RDWR)


class PendingPeers:
    """Connections from peers that have not authenticated yet.

    At most `places` are kept, each for at most `seconds`. The oldest is dropped first.
    """

    def __init__(self, places: int, seconds: float, monotonic: Callable[[], float]) -> None:
        self._places = places
        self._seconds = seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}

    def add(self, connection: socket.socket) -> None:
        """Add a connection, and shut down the oldest ones while there are too many."""
        with self._lock:
            self._since[connection] = self._monotonic()
            while len(self._since) > self._places:
                self._drop(next(iter(self._since)))

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection, which may be closed from then on. A repeated call does nothing."""
        with self._lock:
            self._since.pop(connection, None)

    def drop_expired(self) -> None:
        """Shut down and forget the connections that have not authenticated within their time."""
        until = self._monotonic() - self._seconds
        with self._lock:
            for connection in [connection for connection, since in self._since.items() if since <= until]:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._since[connection]
        shut_down(connection)  # its thread wakes up and closes it


class ThreadedListener:
    """Listens on a free port, and serves each connection in its own thread.

    Connections that have not authenticated yet are limited in number and time, and a new one replaces the oldest. So a
    legitimate peer always gets in.
    """

    def __init__(
        self,
        host: str,
        name: str,
        serve: Callable[[socket.socket], None],
        log: CountedLog,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Configure the listener. `start` opens it.

        Args:
            host: the address to bind to.
            name: name of its threads and of its peers, for the log.
            serve: serves one connection in its thread; raises OSError or struct.error to reject the peer.
            monotonic: the clock for the time limit of authentication.
        """
        self.pending = PendingPeers(MAX_PENDING_PEERS, AUTHENTICATION_S, monotonic)
        self._host, self._name, self._serve_one, self._log = host, name, serve, log
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._connections = SocketSet()

    def start(self) -> int:
        """Listen on a free port in a background thread, and return the port.

        Raises:
            OSError: no port is free.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=BACKLOG)
        listener.settimeout(_LOOK_S)
        self._listener = listener
        self._thread = threading.Thread(
            target=self._listen, args=(listener,), name=f"holdfast-{self._name}s", daemon=True
        )
        self._thread.start()
        return listener.getsockname()[1]

    def close(self) -> None:
        """Stop listening, shut down the open connections, and wait for their threads, at most `CLOSE_S`.

        Log the counted warnings.
        """
        self._connections.shut_all()
        if self._listener is not None and self._thread is not None:
            shut_down(self._listener)
            self._thread.join()
            self._listener.close()
        self._connections.shut_all(CLOSE_S)  # so that their threads' last warnings are counted
        self._log.flush(everything=True)

    def _listen(self, listener: socket.socket) -> None:
        """Accept connections until `close`, and serve each as a pending peer in its own thread.

        Drop expired peers about once a second. If no connection can be accepted, log a warning and pause.
        """
        while not self._connections.shut:
            self.pending.drop_expired()
            self._log.flush()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._connections.shut:
                    # No file descriptor is left, for example. Dropped connections will free some soon.
                    self._log.warn("accept", f"no connection can be accepted: {error}")
                    time.sleep(_PAUSE_S)
                continue
            self._connections.add(connection)
            self.pending.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name=f"holdfast-{self._name}", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection until its end, then close it. An OSError or struct.error is logged as a rejected peer."""
        peer = _peer_address(connection)
        try:
            self._serve_one(connection)
        except (OSError, struct.error) as error:
            self._log.warn(peer, f"a {self._name} at {peer} is rejected: {error}")
        finally:
            self.pending.remove(connection)
            self._connections.remove(connection)


def _peer_address(connection: socket.socket) -> str:
    """Return the IP address of the other side, or "an unknown address" if the connection has ended."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "an unknown address"
