"""Sockets that carry state: exact reads and writes, checksums, a listener with a thread for each connection.

Who may keep a connection before it has shown who it is, is said here as well.
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

#: Either side gives up after so long without a byte; a halt is what normally ends a transfer early.
SILENCE_S = 10.0
#: How many buffers go into one system call (IOV_MAX is 1024).
_VECTOR = 512
#: connections of those that have not shown who they are yet, and how long they may take for it
MAX_STRANGERS = 64
INTRODUCTION_S = 5.0
#: connections that the kernel holds until they are taken
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
    """Exact reads and writes on a socket, given up after a silence."""

    def __init__(
        self, connection: socket.socket, count: Callable[[int, int], None] = lambda _sent, _received: None
    ) -> None:
        """Read and write a connection; `count` is called with the bytes that were sent and received, as they are."""
        # Blocking, with the kernel's own timeouts: Python's make every call a poll and a short read.
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(SILENCE_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._count = count

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
            self._count(0, count)
            left = _advance(left, count)

    def write(self, *buffers: bytes | memoryview) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            count = self._socket.sendmsg(left[:_VECTOR])
            self._count(count, 0)
            left = _advance(left, count)


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
    """Return 32 bits that tell these bytes, laid end to end, from what accidents make of them.

    Of XXH3, not CRC-32: both ends compute it while others wait for the state. It takes a sixth of the time, and
    far less than that where zlib has no faster way.
    """
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0]) & _CHECKSUM
    value = xxhash.xxh3_64()
    for piece in pieces:
        value.update(piece)
    return value.intdigest() & _CHECKSUM


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


class Strangers:
    """Connections whose other side has not yet shown who it is: so many, for so long, the oldest given up first."""

    def __init__(self, places: int, seconds: float, monotonic: Callable[[], float]) -> None:
        self._places = places
        self._seconds = seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}

    def enter(self, connection: socket.socket) -> None:
        """Take a place, the oldest one's where none is free."""
        with self._lock:
            self._since[connection] = self._monotonic()
            while len(self._since) > self._places:
                self._drop(next(iter(self._since)))

    def leave(self, connection: socket.socket) -> None:
        """Give the place back; repeating it does no harm. From then on the connection may be closed."""
        with self._lock:
            self._since.pop(connection, None)

    def drop_late(self) -> None:
        """Give up those whose time is over."""
        until = self._monotonic() - self._seconds
        with self._lock:
            for connection in [connection for connection, since in self._since.items() if since <= until]:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._since[connection]
        shut(connection)  # its thread wakes up, and closes it


class Reception:
    """Listens on a free port, and serves each connection in a thread of its own.

    Whoever connects is a stranger until it has shown who it is. Strangers have places of their own and little time; a
    new one takes the place of the oldest where there is none left. So whoever belongs here always gets in.
    """

    def __init__(
        self,
        host: str,
        name: str,
        serve: Callable[[socket.socket], None],
        log: CountedLog,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say what to listen on; `start` begins.

        Args:
            host: the address to bind to.
            name: of its threads, and of those who connect, for the log.
            serve: talks to whoever has connected, in a thread; raises OSError or struct.error where it turns it away.
            monotonic: the clock by which strangers are late.
        """
        self.strangers = Strangers(MAX_STRANGERS, INTRODUCTION_S, monotonic)
        self._host, self._name, self._serve_one, self._log = host, name, serve, log
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._connections = Sockets()

    def start(self) -> int:
        """Listen on a free port, and return it.

        Raises:
            OSError: there is none.
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
        """Stop listening, and leave what is under way."""
        self._connections.shut_all()
        if self._listener is not None and self._thread is not None:
            shut(self._listener)
            self._thread.join()
            self._listener.close()
        self._connections.shut_all(CLOSE_S)  # what their threads have to say is to be counted
        self._log.flush(everything=True)

    def _listen(self, listener: socket.socket) -> None:
        while not self._connections.shut:
            self.strangers.drop_late()
            self._log.flush()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._connections.shut:
                    # No descriptor is left, for example: the strangers' will be free again in a while.
                    self._log.warn("accept", f"no connection can be taken: {error}")
                    time.sleep(_PAUSE_S)
                continue
            self._connections.add(connection)
            self.strangers.enter(connection)
            threading.Thread(target=self._serve, args=(connection,), name=f"holdfast-{self._name}", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        peer = _peer(connection)
        try:
            self._serve_one(connection)
        except (OSError, struct.error) as error:
            self._log.warn(peer, f"a {self._name} at {peer} is turned away: {error}")
        finally:
            self.strangers.leave(connection)
            self._connections.remove(connection)


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "somebody"
