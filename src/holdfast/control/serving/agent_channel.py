"""The agents' WebSocket: authenticated before it is accepted, bounded in every direction, one message at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import Frame, Opcode

from holdfast.control.serving.turns import MachineShell
from holdfast.control.serving.web import DirectSocket, direct_socket
from holdfast.errors import HoldfastError
from holdfast.protocol.messages.agent import AgentMessage, AppliedSteps, Hello
from holdfast.protocol.names import MALFORMED, MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES

#: What may wait for a slow agent before its connection is given up: the largest message, and what is said beside it.
#: (It takes that much memory once, whoever waits for it: what is told to many are the same bytes.)
MAX_QUEUED_BYTES = MAX_WHOLE_BYTES + 16 * MAX_MESSAGE_BYTES
HELLO_TIMEOUT_S = 10.0
#: how long the last word (why it was refused) may be on its way
LAST_WORD_S = 1.0

_NORMAL = 1000
_POLICY_VIOLATION = 1008
_TOO_BIG = 1009

_log = logging.getLogger("holdfast.coordinator")


class Framer:
    """Makes frames of messages; what is said to many, one after the other, is made a frame of once."""

    def __init__(self) -> None:
        self._message = self._frame = b""

    def __call__(self, message: bytes) -> bytes:
        """Return the message as a frame of the WebSocket."""
        if message is not self._message:
            self._message, self._frame = message, Frame(Opcode.BINARY, message).serialize(mask=False)
        return self._frame


class AgentConnection:
    """One connection, by its number: what is said goes out at once, as far as there is room; the rest waits in order.

    What comes is handled inside the call that read it. Where that takes longer, because something must be written down
    first, what comes meanwhile waits, and nothing more is read.
    """

    def __init__(
        self,
        number: int,
        shell: MachineShell[Any, Any, Any],
        socket: DirectSocket,
        decode: Callable[[bytes], Any],
        framed: Callable[[bytes], bytes],
        *,
        hello: type = Hello,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.closing = False
        self.code, self.why = _NORMAL, ""
        #: done once the connection is to be closed, or has ended
        self.closed: asyncio.Future[None] = loop.create_future()
        #: done once nothing is left to be sent, or can be
        self.empty: asyncio.Future[None] = loop.create_future()
        #: whether its first message has come
        self.greeted = False
        self._shell = shell
        self._socket = socket
        self._decode = decode
        self._framed = framed
        self._hello = hello
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        #: what waits for the message that is being handled
        self._unheard: deque[bytes | None] = deque()
        self._handling: asyncio.Future[None] | None = None

    # ---- what is said ----

    def send(self, message: bytes) -> None:
        """Send a message, after those that wait; where too many do, the connection is given up."""
        if self.closing:
            return
        frame = self._framed(message)
        if self._socket.writes and not self._queue:
            self._socket.write(frame)
            return
        self._queued_bytes += len(frame)
        if self._queued_bytes > self._max_queued_bytes:
            _log.warning(
                "an agent reads too slowly: its connection is closed with %d bytes waiting", self._queued_bytes
            )
            self.closing = True
            self._socket.abort()
            return
        self._queue.append(frame)

    def close(self, code: int = _NORMAL, why: str = "") -> None:
        """Close after what was sent; what comes in from now on is not looked at."""
        if not self.closing:
            self.closing = True
            self.code, self.why = code, why
            _done(self.closed)
            self.has_room()

    def refuse(self, why: str) -> None:
        """Close the connection for what has come over it, or has not."""
        _log.warning("connection %d is closed: %s", self.number, why)
        self._shell.refused()
        self.close(_POLICY_VIOLATION, why)

    # ---- the socket's side ----

    def has_room(self) -> None:
        """Send what waits, as far as there is room."""
        while self._queue and self._socket.writes:
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            self._socket.write(frame)
        if self.closing and not self._queue:
            _done(self.empty)

    def ended(self, code: int) -> None:
        """The connection has ended."""
        if code == _TOO_BIG:
            self.refuse(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        self._queue.clear()
        _done(self.closed)
        _done(self.empty)

    def received(self, data: bytes | None) -> None:
        """A message has come."""
        if self._handling is None:
            self._hear(data)
        elif not self.closing:
            self._unheard.append(data)
            self._socket.pause()

    async def heard(self) -> None:
        """Wait until all that came is handled."""
        while self._handling is not None:
            await asyncio.wait((self._handling,))
            await asyncio.sleep(0)

    # ---- what is heard ----

    def _hear(self, data: bytes | None) -> None:
        """Handle a message; what is left to do of it is under way then."""
        message = None if self.closing else self._read(data)
        if message is None:
            return
        try:
            left = self._handle(message)
        except HoldfastError:
            self.close()  # (what broke the shell has told the server)
            return
        if left is not None:
            self._handling = left
            left.add_done_callback(self._go_on)

    def _read(self, data: bytes | None) -> Any:
        """Return the message in a frame; None where the connection ends for what it holds."""
        if data is None:
            self.refuse("a text frame")
            return None
        try:
            message = self._decode(data)
        except MALFORMED as error:
            self.refuse(f"a malformed message: {error}")
            return None
        if isinstance(message, self._hello) == self.greeted:
            self.refuse("a second Hello" if self.greeted else "the first message is no Hello")
            return None
        return message

    def _handle(self, message: Any) -> asyncio.Future[None] | None:
        """Return what is under way of it, None where all is done."""
        if isinstance(message, self._hello):
            self.greeted = True
            return asyncio.ensure_future(self._shell.add(self.number, self, message))
        left = self._shell.heard(self.number, message)
        if left is None and isinstance(message, AppliedSteps):
            return asyncio.ensure_future(asyncio.sleep(0))  # more pages may be here: others get their turn between
        return left

    def _go_on(self, done: asyncio.Future[None]) -> None:
        """A message is handled: go on with those that have come meanwhile."""
        self._handling = None
        if not done.cancelled() and (error := done.exception()) is not None:
            if not isinstance(error, HoldfastError):
                _log.error("connection %d broke", self.number, exc_info=error)
            self.close()
        while self._unheard and self._handling is None:
            self._hear(self._unheard.popleft())
        if self._handling is None:
            self._socket.resume()


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AgentChannel:
    """The endpoint of all agents of one server; connection numbers are never used twice."""

    def __init__(
        self,
        shell: MachineShell[Any, Any, Any],
        *,
        messages: Any = AgentMessage,
        hello: type = Hello,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        """`messages`: what agents say (a union of types); `hello`: what each says first."""
        self._shell = shell
        self._hello_timeout_s = hello_timeout_s
        self._numbers = itertools.count(1)
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._hello = hello
        self._framer = Framer()

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one agent until its connection ends."""
        await websocket.accept()
        await self.attend(websocket, direct_socket(websocket))

    async def attend(self, websocket: WebSocket, socket: DirectSocket) -> None:
        """Serve one agent over a socket that is accepted."""
        connection = AgentConnection(
            next(self._numbers), self._shell, socket, self._decoder.decode, self._framer, hello=self._hello
        )
        socket.take_over(connection)
        try:
            await asyncio.wait((connection.closed,), timeout=self._hello_timeout_s)
            if not connection.greeted and not connection.closed.done():
                connection.refuse("no Hello in time")
            await connection.closed
            if socket.stands:
                await _part(connection, websocket, socket)
            await connection.heard()
        finally:
            await self._shell.remove(connection.number)


async def _part(connection: AgentConnection, websocket: WebSocket, socket: DirectSocket) -> None:
    """Close the connection, after the last word where that is read in time."""
    await asyncio.wait((connection.empty,), timeout=LAST_WORD_S)
    if not connection.empty.done():
        socket.abort()
        return
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await websocket.close(connection.code, connection.why[:120])
    except (TimeoutError, WebSocketDisconnect):
        socket.abort()
