"""Connection limits of a server: unauthenticated connections are few and short, and newer ones replace older ones.

The web server would accept any number of connections for any time. So this module accepts them, and passes them to it.
A connection is pending until a request with a valid token has come over it. Pending connections have a limited number
of slots. If none is free, the oldest one of the host with the most of them is dropped. So an agent always gets in, even
if many peers without a token connect from many addresses. Authenticated connections need no slot.

Pending connections get time limits of different lengths. Otherwise a crowd that came at once would be dropped at once
and come back at once, forever, and each time delay the other work of the processor.
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

#: file descriptors reserved for everything else: store, journal, logs, libraries
RESERVED_FILES = 64
#: seconds between two checks for closed connections
_CHECK_S = 0.5
_NO_FILES_PAUSE_S = 0.1
#: seconds that a TLS shutdown may take
_TLS_SHUTDOWN_S = 2.0

#: fractional parts of its multiples fill the unit interval evenly, for any number of them
_GOLDEN = (5**0.5 - 1) / 2

Address = tuple[str, int]
#: connections reserved for commands and tools
_COMMANDS = 16


def room_for_connections() -> int:
    """Return how many connections the limit on open files allows, unauthenticated ones included."""
    return max(file_limit() - RESERVED_FILES, 16)


def check_room(nodes_to_begin: int, max_nodes: int) -> str:
    """Return a warning if more nodes may join a job than can be connected under the limit on open files, else "".

    Raises:
        BadInputError: the nodes at the start are too many already.
    """
    room = max(1, room_for_connections() - _COMMANDS)
    limit = f"{room} nodes can connect to this coordinator because of its limit on open files: raise it"
    if nodes_to_begin > room:
        raise BadInputError(f"the job starts with {nodes_to_begin} nodes, and only {limit} (ulimit -n)")
    return f"the job may get {max_nodes} nodes, and only {limit} (ulimit -n)" if max_nodes > room else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits on pending connections, over which no valid token has come yet."""

    #: most pending connections at a time; fewer if few files may be open
    pending: int = 2048
    #: most seconds that a peer may take to send the token; each gets between half and all of them
    seconds: float = 5.0
    #: most pending connections per second that newer ones may replace. So a crowd costs little processor time, and each
    #: keeps its slot for a while. Newer connections wait in the kernel meanwhile.
    a_second: float = 500.0


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    since: float
    late: asyncio.TimerHandle
    transport: asyncio.Transport | None = None
    dropped: bool = False

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def drop(self) -> None:
        """Abort the connection. During a TLS handshake, shut its socket down, so that the handshake fails."""
        self.dropped = True
        if self.transport is not None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # during a TLS handshake, which then fails


class ConnectionLimiter:
    """Accepts connections from a listening socket while it is open."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[Callable[[], object]], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        log: CountedLog,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Accept no connection yet.

        Args:
            listener: a non-blocking listening socket.
            protocol: makes the protocol of one connection, which must call the given callback when the connection ends.
            tls: the TLS context, or None without TLS.
            log: gets one line per address, not per connection.
            limits: limits on pending connections.
        """
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._log = log
        self._limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        #: pending connections by host and port, oldest first
        self._pending: dict[str, dict[int, _Connection]] = {}
        self._count = 0
        self._admitted = 0
        self._known: dict[Address, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def accepting(self) -> Generator[None]:
        """Accept connections while inside, and forget closed ones twice a second.

        Accepted connections stay open afterwards.
        """
        self._resume()
        self._forget_closed()
        try:
            yield
        finally:
            self._loop.remove_reader(self._listener)
            for timer in self._timers.values():
                timer.cancel()
            self._log.flush(everything=True)

    def on_authenticated(self, client: Address | None) -> None:
        """Move the connection from this address to the authenticated ones. Ignored if it is not pending."""
        connection = self._remove(client) if client else None
        if client and connection is not None:
            self._known[client] = connection

    # accepting

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept_next)

    def _pause(self, seconds: float) -> None:
        """Accept no connections for a while. New ones wait in the kernel."""
        self._loop.remove_reader(self._listener)
        self._timers["resume"] = self._loop.call_later(seconds, self._resume)

    def _accept_next(self) -> None:
        """Accept one connection once a slot for pending ones is free.

        Others wait for the next call, so that accepted ones can send in between.

        If the system has no file descriptor left, drop the oldest pending connection, and pause.
        """
        wait_s = self._free_slot()
        if wait_s > 0:
            self._pause(wait_s)
            return
        try:
            taken, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._log.warn("accept", f"no connection can be accepted: {error.strerror}")
            if self._count:
                self._drop(self._oldest_pending(), "the system has no file descriptor left")
            self._pause(_NO_FILES_PAUSE_S)
            return
        self._admit(taken, (str(peer[0]), int(peer[1])))

    def _admit(self, taken: socket.socket, address: Address) -> None:
        """Serve an accepted connection as pending, with a time limit.

        Close it at once if authenticated connections use up the limit on open files.
        """
        if len(self._known) >= room_for_connections():
            taken.close()
            why = f"{len(self._known)} agents and commands are connected, and no more files may be open"
            self._log.warn("full", f"{address[0]} is rejected: {why}: raise the limit (ulimit -n)")
            return
        taken.setblocking(False)
        late = self._loop.call_later(self._next_time_limit(), self._on_late, address)
        connection = _Connection(taken, self._loop.time(), late)
        self._remove(address)  # an earlier connection from this address has ended
        self._pending.setdefault(address[0], {})[address[1]] = connection
        self._count += 1
        task = self._loop.create_task(self._serve(connection, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, address: Address) -> None:
        """Make the TLS handshake, if any, and attach the protocol to the connection.

        Log a failed handshake, unless the connection was dropped before.
        """
        tls: dict[str, float] = {}
        if self._tls is not None:
            tls = {"ssl_handshake_timeout": self._limits.seconds, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._protocol(lambda: self._on_closed(address, connection)),
                connection.socket,
                ssl=self._tls,
                **tls,
            )
        except OSError as error:
            if self._on_closed(address, connection):  # otherwise it was dropped, which was logged
                self._log.warn(address[0], f"a connection from {address[0]} ends without TLS: {error}")
            return
        connection.transport = transport
        if connection.dropped:
            connection.drop()  # it was dropped while it was being accepted

    def _next_time_limit(self) -> float:
        """Return between half and all of the time limit, in seconds, spread evenly over consecutive connections."""
        self._admitted += 1
        return self._limits.seconds * (1 + self._admitted * _GOLDEN % 1) / 2

    def _on_late(self, address: Address) -> None:
        self._drop(address, f"no token arrived within the limit of {self._limits.seconds:g} s")

    # slots of pending connections

    def _free_slot(self) -> float:
        """Return 0 if there is a slot for one more pending connection, if necessary after dropping the oldest one.

        Return the seconds to wait if that one may not be replaced yet.
        """
        room = room_for_connections()
        places = max(1, min(self._limits.pending, room // 2, room - len(self._known)))
        if self._count < places:
            return 0.0
        host, port = self._oldest_pending()
        wait_s = self._pending[host][port].since + places / self._limits.a_second - self._loop.time()
        if wait_s > 0:
            return wait_s
        self._drop((host, port), "newer connections need its slot")
        return 0.0

    def _oldest_pending(self) -> Address:
        """Return the oldest pending connection of the host with the most of them."""
        host = max(self._pending, key=lambda host: len(self._pending[host]))
        return host, next(iter(self._pending[host]))

    def _drop(self, address: Address, why: str) -> None:
        """End a pending connection, and log the reason. Ignored if it has authenticated or ended."""
        connection = self._remove(address)
        if connection is not None:
            connection.drop()
            self._log.warn(address[0], f"a connection from {address[0]} without the token is dropped: {why}")

    def _on_closed(self, address: Address, connection: _Connection) -> bool:
        """Handle the end of a connection, and return whether it was still pending."""
        if self._pending.get(address[0], {}).get(address[1]) is not connection:
            return False
        self._remove(address)
        return True

    def _remove(self, address: Address) -> _Connection | None:
        """Remove a connection from the pending ones, and cancel its time limit.

        Return it, or None if it is not pending.
        """
        host, port = address
        of_host = self._pending.get(host, {})
        connection = of_host.pop(port, None)
        if connection is not None:
            connection.late.cancel()
            self._count -= 1
            if not of_host:
                del self._pending[host]
        return connection

    def _forget_closed(self) -> None:
        """Forget authenticated connections that have ended, and log the counted warnings.

        It repeats itself every `_CHECK_S`.
        """
        self._known = {address: connection for address, connection in self._known.items() if not connection.is_closed}
        self._log.flush()
        self._timers["check"] = self._loop.call_later(_CHECK_S, self._forget_closed)
