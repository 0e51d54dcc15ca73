"""The agents' WebSocket: authenticated before it is accepted, with bounded queues, one message at a time."""

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

from holdfast.control.serving.machine_shell import MachineShell
from holdfast.control.serving.web import DirectSocket, direct_socket
from holdfast.errors import HoldfastError
from holdfast.protocol.messages.agent import AgentMessage, AppliedSteps, Hello
from holdfast.protocol.names import MALFORMED, MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES

#: Most bytes that may wait for a slow agent before its connection is closed: the largest message, and some small ones.
#: Messages to many agents share the same bytes, so this memory is needed once, not per agent.
MAX_QUEUED_BYTES = MAX_WHOLE_BYTES + 16 * MAX_MESSAGE_BYTES
HELLO_TIMEOUT_S = 10.0
#: seconds that the close frame with its reason may take
CLOSE_FRAME_S = 1.0

_NORMAL = 1000
_POLICY_VIOLATION = 1008
_TOO_BIG = 1009

_log = logging.getLogger("holdfast.coordinator")


class Framer:
    """Encodes messages as WebSocket frames. Consecutive calls with the same message return the same frame."""

    def __init__(self) -> None:
        self._message = self._frame = b""

    def __call__(self, message: bytes) -> bytes:
        """Return the message as a WebSocket frame."""
        if message is not self._message:
            self._message, self._frame = message, Frame(Opcode.BINARY, message).serialize(mask=False)
        return self._frame


class AgentConnection:
    """One connection to an agent. Messages are sent at once while the socket has room, and otherwise wait in order.

    An inbound message is handled inside the call that read it. If that takes longer, because a record must be written
    first, later messages wait, and reading pauses.
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
        #: done once the connection must be closed, or has ended
        self.closed: asyncio.Future[None] = loop.create_future()
        #: done once all messages are sent, or can no longer be sent
        self.empty: asyncio.Future[None] = loop.create_future()
        #: whether the first message was received
        self.has_hello = False
        self._shell = shell
        self._socket = socket
        self._decode = decode
        self._framed = framed
        self._hello = hello
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        #: received messages that wait for the one that is being handled
        self._inbound: deque[bytes | None] = deque()
        self._handling: asyncio.Future[None] | None = None

    # outgoing messages

    def send(self, message: bytes) -> None:
        """Send a message, or queue it while the socket has no room.

        If more than `max_queued_bytes` would wait, log a warning and abort the connection. Ignored once the connection
        is closing.
        """
        if self.closing:
            return
        frame = self._framed(message)
        if self._socket.is_writable and not self._queue:
            self._socket.write(frame)
            return
        self._queued_bytes += len(frame)
        if self._queued_bytes > self._max_queued_bytes:
            _log.warning(
                "an agent reads too slowly, so its connection is closed with %d bytes waiting; it will reconnect",
                self._queued_bytes,
            )
            self.closing = True
            self._socket.abort()
            return
        self._queue.append(frame)

    def close(self, code: int = _NORMAL, why: str = "") -> None:
        """Close the connection after the queued messages, with this WebSocket code and reason.

        Later inbound messages are ignored. A repeated call does nothing.
        """
        if not self.closing:
            self.closing = True
            self.code, self.why = code, why
            _set_done(self.closed)
            self.on_writable()

    def refuse(self, why: str) -> None:
        """Close the connection because of an agent's invalid or missing message.

        Log the reason, and count the refusal.
        """
        _log.warning("connection %d is closed: %s", self.number, why)
        self._shell.count_refusal()
        self.close(_POLICY_VIOLATION, why)

    # called by the socket

    def on_writable(self) -> None:
        """Send waiting messages while the socket has room.

        If the connection is closing and none is left, complete `empty`.
        """
        while self._queue and self._socket.is_writable:
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            self._socket.write(frame)
        if self.closing and not self._queue:
            _set_done(self.empty)

    def on_closed(self, code: int) -> None:
        """Handle the end of the connection: drop the queued messages, and complete `closed` and `empty`.

        An end because of a message that was too big is counted as a refusal.
        """
        if code == _TOO_BIG:
            self.refuse(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        self._queue.clear()
        _set_done(self.closed)
        _set_done(self.empty)

    def on_message(self, data: bytes | None) -> None:
        """Handle a received message (None: a text frame).

        While another one is being handled, queue it and stop reading. Ignored once the connection is closing.
        """
        if self._handling is None:
            self._process(data)
        elif not self.closing:
            self._inbound.append(data)
            self._socket.pause()

    async def wait_until_handled(self) -> None:
        """Wait until all received messages are handled."""
        while self._handling is not None:
            await asyncio.wait((self._handling,))
            await asyncio.sleep(0)

    # inbound messages

    def _process(self, data: bytes | None) -> None:
        """Decode a message and pass it to the shell.

        Ignore it if the connection is closing. If the shell does not finish it at once, later messages wait for it. If
        the shell has failed, close the connection.
        """
        message = None if self.closing else self._read(data)
        if message is None:
            return
        try:
            rest = self._handle(message)
        except HoldfastError:
            self.close()  # the error that stopped the shell was reported to the server
            return
        if rest is not None:
            self._handling = rest
            rest.add_done_callback(self._on_handled)

    def _read(self, data: bytes | None) -> Any:
        """Decode a message.

        Return None, and close the connection as refused, for a text frame, a malformed message, a first message that is
        not a Hello, or a second Hello.
        """
        if data is None:
            self.refuse("a text frame")
            return None
        try:
            message = self._decode(data)
        except MALFORMED as error:
            self.refuse(f"a malformed message: {error}")
            return None
        if isinstance(message, self._hello) == self.has_hello:
            self.refuse("a second Hello" if self.has_hello else "the first message is not a Hello")
            return None
        return message

    def _handle(self, message: Any) -> asyncio.Future[None] | None:
        """Pass a message to the shell; a Hello adds the connection.

        Return the rest of the work as a future, or None if all is done. After `AppliedSteps` the future only lets other
        connections run.
        """
        if isinstance(message, self._hello):
            self.has_hello = True
            return asyncio.ensure_future(self._shell.add_connection(self.number, self, message))
        rest = self._shell.on_message(self.number, message)
        if rest is None and isinstance(message, AppliedSteps):
            # more such messages may be waiting: let other connections run in between
            return asyncio.ensure_future(asyncio.sleep(0))
        return rest

    def _on_handled(self, done: asyncio.Future[None]) -> None:
        """Handle the queued messages after one was handled, and resume reading once none is left.

        If it failed, close the connection, and log errors that are not of holdfast.
        """
        self._handling = None
        if not done.cancelled() and (error := done.exception()) is not None:
            if not isinstance(error, HoldfastError):
                _log.error("connection %d failed", self.number, exc_info=error)
            self.close()
        while self._inbound and self._handling is None:
            self._process(self._inbound.popleft())
        if self._handling is None:
            self._socket.resume()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AgentChannel:
    """The endpoint of all agents of one server. Connection numbers are never reused."""

    def __init__(
        self,
        shell: MachineShell[Any, Any, Any],
        *,
        messages: Any = AgentMessage,
        hello: type = Hello,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        """Create the endpoint.

        Args:
            shell: handles the messages.
            messages: the union of message types that agents send.
            hello: the type of the first message.
            hello_timeout_s: seconds to wait for the first message.
        """
        self._shell = shell
        self._hello_timeout_s = hello_timeout_s
        self._numbers = itertools.count(1)
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._hello = hello
        self._framer = Framer()

    async def serve(self, websocket: WebSocket) -> None:
        """Accept the WebSocket of one agent, and serve it until its connection ends."""
        await websocket.accept()
        await self.serve_socket(websocket, direct_socket(websocket))

    async def serve_socket(self, websocket: WebSocket, socket: DirectSocket) -> None:
        """Serve one agent over an accepted socket until its connection ends.

        Refuse it if no Hello comes in time. At the end, wait until its messages are handled, and remove it from the
        shell.
        """
        connection = AgentConnection(
            next(self._numbers), self._shell, socket, self._decoder.decode, self._framer, hello=self._hello
        )
        socket.take_over(connection)
        try:
            await asyncio.wait((connection.closed,), timeout=self._hello_timeout_s)
            if not connection.has_hello and not connection.closed.done():
                connection.refuse("no Hello in time")
            await connection.closed
            if socket.is_open:
                await _close_gracefully(connection, websocket, socket)
            await connection.wait_until_handled()
        finally:
            await self._shell.remove_connection(connection.number)


async def _close_gracefully(connection: AgentConnection, websocket: WebSocket, socket: DirectSocket) -> None:
    """Send the remaining messages, then the close frame with code and reason.

    If either takes longer than `CLOSE_FRAME_S`, or the agent is gone, abort the connection.
    """
    await asyncio.wait((connection.empty,), timeout=CLOSE_FRAME_S)
    if not connection.empty.done():
        socket.abort()
        return
    try:
        async with asyncio.timeout(CLOSE_FRAME_S):
            await websocket.close(connection.code, connection.why[:120])
    except (TimeoutError, WebSocketDisconnect):
        socket.abort()
