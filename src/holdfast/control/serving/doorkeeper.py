"""The coordinator's door: who has not shown the token has few places and little time, and gives way to who comes later.

The web server would take whoever comes, for as long as they like. So connections are taken here, and handed to it.
Until a request with the token has come over it, a connection is a stranger's. Strangers have places of their own; where
none is free, the oldest one of the address that holds most goes. So an agent always gets in, however many strangers
there are and whatever address they have, and one that shows the token counts as a stranger no more.

A crowd that came at once must not go at once, and come back at once, for ever: whoever shares the processor would wait
for it each time. So strangers are given times of different lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass

from holdfast.control.file_limit import file_limit
from holdfast.counted_log import CountedLog
from holdfast.errors import BadInputError

#: descriptors that connections leave to everything else: store, journal, logs, libraries
RESERVED_FILES = 64
#: how often is looked who has left
_LOOK_S = 0.5
_NO_FILES_PAUSE_S = 0.1
#: how long TLS may take to say goodbye
_GOODBYE_S = 2.0

#: multiples of it, less whole ones, fill the unit interval evenly, however many they are
_GOLDEN = (5**0.5 - 1) / 2

Address = tuple[str, int]
#: connections that agents leave to commands and tools
_COMMANDS = 16


def room_for_connections() -> int:
    """Return how many connections the limit on open files leaves room for, strangers' included."""
    return max(file_limit() - RESERVED_FILES, 16)


def check_room(nodes_to_begin: int, max_nodes: int) -> str:
    """Return a warning where a job may come to have more nodes than can be connected, "" where it cannot.

    Raises:
        BadInputError: it could not even begin.
    """
    room = max(1, room_for_connections() - _COMMANDS)
    limit = f"{room} nodes can be connected to this coordinator, for it may open that many files: raise the limit"
    if nodes_to_begin > room:
        raise BadInputError(f"the job begins with {nodes_to_begin} nodes, and only {limit} (ulimit -n)")
    return f"the job may come to have {max_nodes} nodes, and only {limit} (ulimit -n)" if max_nodes > room else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of strangers.

    strangers: how many at the most; fewer where few files may be open. seconds: how long one may take to show the
    token, at the most; at the least, half of it. a_second: how many may have their places taken by newer ones in a
    second, so that a crowd costs the processor little, and each keeps its place for a while. The newer ones wait in the
    kernel meanwhile.
    """

    strangers: int = 2048
    seconds: float = 5.0
    a_second: float = 500.0


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    since: float
    late: asyncio.TimerHandle
    transport: asyncio.Transport | None = None
    dropped: bool = False

    @property
    def over(self) -> bool:
        return self.socket.fileno() < 0

    def drop(self) -> None:
        self.dropped = True
        if self.transport is not None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # in the middle of a TLS handshake, which fails by it


class Doorkeeper:
    """Takes connections from a listening socket, as long as it is open."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[Callable[[], object]], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        log: CountedLog,
        limits: Limits | None = None,
    ) -> None:
        """Take nobody yet.

        Args:
            listener: does not block.
            protocol: makes what serves one connection, and calls what it is given when that ends.
            log: gets a line for an address, not for a connection.
        """
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._log = log
        self._limits = limits or Limits()
        self._loop = asyncio.get_running_loop()
        #: by host and port, the oldest first
        self._strangers: dict[str, dict[int, _Connection]] = {}
        self._count = 0
        self._taken = 0
        self._known: dict[Address, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
        """Take connections while inside; those that were taken stay."""
        self._resume()
        self._look()
        try:
            yield
        finally:
            self._loop.remove_reader(self._listener)
            for timer in self._timers.values():
                timer.cancel()
            self._log.flush(everything=True)

    def known(self, client: Address | None) -> None:
        """Whoever has this address has shown the token: it is a stranger no more."""
        connection = self._remove(client) if client else None
        if client and connection is not None:
            self._known[client] = connection

    # ---- taking ----

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._take_one)

    def _pause(self, seconds: float) -> None:
        """Leave those who come now to the kernel for a while."""
        self._loop.remove_reader(self._listener)
        self._timers["resume"] = self._loop.call_later(seconds, self._resume)

    def _take_one(self) -> None:
        """Somebody has come. The others who have wait for the next turn: who was taken gets to speak in between."""
        wait_s = self._make_room()
        if wait_s > 0:
            self._pause(wait_s)
            return
        try:
            taken, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._log.warn("accept", f"no connection can be taken: {error.strerror}")
            if self._count:
                self._drop(self._oldest(), "the system has nothing left to serve it with")
            self._pause(_NO_FILES_PAUSE_S)
            return
        self._take(taken, (str(peer[0]), int(peer[1])))

    def _take(self, taken: socket.socket, address: Address) -> None:
        if len(self._known) >= room_for_connections():
            taken.close()
            why = f"{len(self._known)} agents and commands are connected, and no more files may be open"
            self._log.warn("full", f"{address[0]} is turned away: {why}: raise the limit (ulimit -n)")
            return
        taken.setblocking(False)
        late = self._loop.call_later(self._time_to_show(), self._late, address)
        connection = _Connection(taken, self._loop.time(), late)
        self._remove(address)  # of a connection that is over
        self._strangers.setdefault(address[0], {})[address[1]] = connection
        self._count += 1
        task = self._loop.create_task(self._serve(connection, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, address: Address) -> None:
        tls: dict[str, float] = {}
        if self._tls is not None:
            tls = {"ssl_handshake_timeout": self._limits.seconds, "ssl_shutdown_timeout": _GOODBYE_S}
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._protocol(lambda: self._left(address, connection)), connection.socket, ssl=self._tls, **tls
            )
        except OSError as error:
            if self._left(address, connection):  # else it was dropped, and that was said
                self._log.warn(address[0], f"a connection from {address[0]} ends without TLS: {error}")
            return
        connection.transport = transport
        if connection.dropped:
            connection.drop()  # it had to go while it was being taken

    def _time_to_show(self) -> float:
        self._taken += 1
        return self._limits.seconds * (1 + self._taken * _GOLDEN % 1) / 2

    def _late(self, address: Address) -> None:
        self._drop(address, f"it has not shown it in time, {self._limits.seconds:g} s at the most")

    # ---- places ----

    def _make_room(self) -> float:
        """See that one more stranger has a place; return the seconds to wait before one can have."""
        room = room_for_connections()
        places = max(1, min(self._limits.strangers, room // 2, room - len(self._known)))
        if self._count < places:
            return 0.0
        host, port = self._oldest()
        wait_s = self._strangers[host][port].since + places / self._limits.a_second - self._loop.time()
        if wait_s > 0:
            return wait_s
        self._drop((host, port), "others want to come in")
        return 0.0

    def _oldest(self) -> Address:
        """The oldest stranger of the host that holds most places."""
        host = max(self._strangers, key=lambda host: len(self._strangers[host]))
        return host, next(iter(self._strangers[host]))

    def _drop(self, address: Address, why: str) -> None:
        connection = self._remove(address)
        if connection is not None:
            connection.drop()
            self._log.warn(address[0], f"a connection from {address[0]} without the token is dropped: {why}")

    def _left(self, address: Address, connection: _Connection) -> bool:
        """A connection has ended; return whether it was a stranger's."""
        if self._strangers.get(address[0], {}).get(address[1]) is not connection:
            return False
        self._remove(address)
        return True

    def _remove(self, address: Address) -> _Connection | None:
        host, port = address
        of_host = self._strangers.get(host, {})
        connection = of_host.pop(port, None)
        if connection is not None:
            connection.late.cancel()
            self._count -= 1
            if not of_host:
                del self._strangers[host]
        return connection

    def _look(self) -> None:
        """Forget who has left."""
        self._known = {address: one for address, one in self._known.items() if not one.over}
        self._log.flush()
        self._timers["look"] = self._loop.call_later(_LOOK_S, self._look)
