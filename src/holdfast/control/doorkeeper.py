"""The coordinator's door: who has not shown the token has few places and little time, and gives way to who comes later.

The web server would take whoever comes, for as long as they like. So connections are taken here, and handed to it.
Until a request with the token has come over it, a connection is a stranger's. Strangers have places of their own; where
none is free, the oldest one of the address that holds most goes. So an agent always gets in, however many strangers
there are and whatever address they have, and one that shows the token counts as a stranger no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.counted_log import CountedLog

#: descriptors that connections leave to everything else: store, journal, logs, libraries
RESERVED_FILES = 64
#: how often is looked who is late, and who has left
_LOOK_S = 0.5
_NO_FILES_PAUSE_S = 0.1
#: how long TLS may take to say goodbye
_GOODBYE_S = 2.0

#: enough for every agent of a large job
_WANTED_FILES = 65536

Address = tuple[str, int]


def raise_file_limit() -> None:
    """Let this process open as many files as it may: every agent is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of strangers.

    strangers: how many at the most; fewer where few files may be open. seconds: how long one may take to show the
    token. grace_s: how long a place is its own before it may be given to a newer one.
    """

    strangers: int = 256
    seconds: float = 5.0
    grace_s: float = 0.1


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    since: float
    transport: asyncio.Transport | None = None

    @property
    def over(self) -> bool:
        return self.socket.fileno() < 0

    def drop(self) -> None:
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
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        log: CountedLog,
        limits: Limits | None = None,
    ) -> None:
        """Take nobody yet.

        Args:
            listener: does not block.
            protocol: makes what serves one connection.
            log: gets a line for an address, not for a connection.
        """
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._log = log
        self._limits = limits or Limits()
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[Address, _Connection] = {}
        self._known: dict[Address, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
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
        connection = self._strangers.pop(client, None) if client else None
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
            self._drop_oldest("the system has nothing left to serve it with")
            self._pause(_NO_FILES_PAUSE_S)
            return
        self._take(taken, (str(peer[0]), int(peer[1])))

    def _take(self, taken: socket.socket, address: Address) -> None:
        if len(self._known) >= self._room:
            taken.close()
            why = f"{len(self._known)} agents and commands are connected, and no more files may be open"
            self._log.warn("full", f"{address[0]} is turned away: {why}: raise the limit (ulimit -n)")
            return
        taken.setblocking(False)
        connection = _Connection(taken, self._loop.time())
        self._strangers.pop(address, None)  # of a connection that is over
        self._strangers[address] = connection
        task = self._loop.create_task(self._serve(connection, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, address: Address) -> None:
        tls: dict[str, float] = {}
        if self._tls is not None:
            tls = {"ssl_handshake_timeout": self._limits.seconds, "ssl_shutdown_timeout": _GOODBYE_S}
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol, connection.socket, ssl=self._tls, **tls
            )
        except OSError as error:
            if address in self._strangers:  # else it was dropped, and that was said
                self._log.warn(address[0], f"a connection from {address[0]} ends without TLS: {error}")
            return
        connection.transport = transport
        if self._strangers.get(address) is not connection:
            connection.drop()  # it had to go while it was being taken

    # ---- places ----

    @property
    def _room(self) -> int:
        """How many connections the limit on open files leaves room for, strangers' included."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(files - RESERVED_FILES, 16) if files != resource.RLIM_INFINITY else 1 << 20

    def _make_room(self) -> float:
        """See that one more stranger has a place; return the seconds to wait before one can have."""
        room = self._room
        places = max(1, min(self._limits.strangers, room // 2, room - len(self._known)))
        if len(self._strangers) < places:
            return 0.0
        self._forget_those_who_left()
        if len(self._strangers) < places:
            return 0.0
        age = self._loop.time() - self._strangers[self._oldest()].since
        if age < self._limits.grace_s:
            return self._limits.grace_s - age
        self._drop_oldest("others want to come in")
        return 0.0

    def _oldest(self) -> Address:
        """The oldest stranger of the address that holds most places."""
        ((host, _),) = Counter(host for host, _ in self._strangers).most_common(1)
        return next(address for address in self._strangers if address[0] == host)

    def _drop_oldest(self, why: str) -> None:
        if self._strangers:
            self._drop(self._oldest(), why)

    def _drop(self, address: Address, why: str) -> None:
        self._strangers.pop(address).drop()
        self._log.warn(address[0], f"a connection from {address[0]} without the token is dropped: {why}")

    def _look(self) -> None:
        """Drop who is late."""
        self._forget_those_who_left()
        late = self._loop.time() - self._limits.seconds
        for address in [address for address, stranger in self._strangers.items() if stranger.since <= late]:
            self._drop(address, f"it has not shown it within {self._limits.seconds:g} s")
        self._log.flush()
        self._timers["look"] = self._loop.call_later(_LOOK_S, self._look)

    def _forget_those_who_left(self) -> None:
        self._strangers = {address: one for address, one in self._strangers.items() if not one.over}
        self._known = {address: one for address, one in self._known.items() if not one.over}
