"""The agents' WebSocket: authenticated before it is accepted, bounded in every direction, one message at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.control.coordinator.shell import MALFORMED, Shell
from holdfast.coordination.inputs import Received
from holdfast.errors import HoldfastError
from holdfast.protocol.messages.agent import AgentMessage, AppliedSteps, Hello
from holdfast.protocol.names import MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES

#: What may wait for a slow agent before its connection is given up: the largest message, and what is said beside it.
#: (It takes that much memory once, whoever waits for it: what is told to many are the same bytes.)
MAX_QUEUED_BYTES = MAX_WHOLE_BYTES + 16 * MAX_MESSAGE_BYTES
HELLO_TIMEOUT_S = 10.0

_POLICY_VIOLATION = 1008
_TOO_BIG = 1009

_log = logging.getLogger("holdfast.coordinator")


class AgentConnection:
    """The outgoing side of one connection: an ordered queue that `write` empties."""

    def __init__(self, websocket: WebSocket, *, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.closing = False
        self._websocket = websocket
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._code, self._why = 1000, ""
        self._something = asyncio.Event()
        self._writer: asyncio.Task[Any] | None = None

    def send(self, message: bytes) -> None:
        """Queue a message; a queue that is full gives the connection up."""
        if self.closing:
            return
        self._queued_bytes += len(message)
        if self._queued_bytes > self._max_queued_bytes:
            _log.warning(
                "an agent reads too slowly: its connection is closed with %d bytes waiting", self._queued_bytes
            )
            self.closing = True
            self._writer_gives_up()
            return
        self._queue.append(message)
        self._something.set()

    def close(self, code: int = 1000, why: str = "") -> None:
        """Close after what was sent; what comes in from now on is not looked at."""
        if not self.closing:
            self.closing = True
            self._code, self._why = code, why
            self._something.set()

    async def write(self) -> None:
        """Send what is queued, in order, until the connection is closed from this side or lost."""
        self._writer = asyncio.current_task()
        try:
            while True:
                while self._queue:
                    message = self._queue.popleft()
                    self._queued_bytes -= len(message)
                    await self._websocket.send_bytes(message)
                if self.closing:
                    await self._websocket.close(self._code, self._why[:120])
                    return
                self._something.clear()
                await self._something.wait()
        except (WebSocketDisconnect, RuntimeError) as error:
            # RuntimeError is uvicorn's word for sending after it closed the connection itself (a message too big).
            _log.debug("nothing more can be sent on a connection: %r", error)

    def _writer_gives_up(self) -> None:
        # It may be stuck in a send to an agent that reads nothing: only cancelling gets it out.
        if self._writer is not None:
            self._writer.cancel()


class AgentChannel:
    """The endpoint of all agents of one coordinator; connection numbers are never used twice."""

    def __init__(self, shell: Shell, *, hello_timeout_s: float = HELLO_TIMEOUT_S) -> None:
        self._shell = shell
        self._hello_timeout_s = hello_timeout_s
        self._numbers = itertools.count(1)
        self._decoder = msgspec.msgpack.Decoder(AgentMessage)

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one agent until its connection ends."""
        await websocket.accept()
        number = next(self._numbers)
        connection = AgentConnection(websocket)
        reader = asyncio.create_task(self._read(number, connection, websocket))
        writer = asyncio.create_task(connection.write())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if connection.closing and not writer.done():
                # The last word (why it was refused) is on its way; who does not read it is not waited for long.
                await asyncio.wait((writer,), timeout=1.0)
        finally:
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            await self._shell.remove(number)
        for result in results:
            # What broke the shell has already been told to the server; only surprises are uvicorn's to log.
            if isinstance(result, Exception) and not isinstance(result, HoldfastError):
                raise result

    async def _read(self, number: int, connection: AgentConnection, websocket: WebSocket) -> None:
        """Handle messages as they come, each to its end before the next is read."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                frame = await websocket.receive()
        except TimeoutError:
            self._refuse(number, connection, "no Hello in time")
            return
        first = self._decode(number, connection, frame)
        if first is None:
            return
        if not isinstance(first, Hello):
            self._refuse(number, connection, "the first message is no Hello")
            return
        await self._shell.add(number, connection, first)
        while not connection.closing:
            frame = await websocket.receive()
            if connection.closing:
                return
            message = self._decode(number, connection, frame)
            if message is None:
                break
            if isinstance(message, Hello):
                self._refuse(number, connection, "a second Hello")
                break
            await self._shell.feed(Received(number, message))
            if isinstance(message, AppliedSteps):
                await asyncio.sleep(0)  # the next page may be here already: others get their turn before it
        await self._shell.remove(number)

    def _decode(self, number: int, connection: AgentConnection, frame: Any) -> AgentMessage | None:
        """Return the message in a frame; None where the connection has ended, or ends for what it holds."""
        if frame["type"] == "websocket.disconnect":
            if frame.get("code") == _TOO_BIG:
                self._refuse(number, connection, f"a message of more than {MAX_MESSAGE_BYTES} bytes")
            return None
        data = frame.get("bytes")
        if data is None:
            self._refuse(number, connection, "a text frame")
            return None
        try:
            return self._decoder.decode(data)
        except MALFORMED as error:
            self._refuse(number, connection, f"a malformed message: {error}")
            return None

    def _refuse(self, number: int, connection: AgentConnection, why: str) -> None:
        _log.warning("connection %d is closed: %s", number, why)
        self._shell.metrics.refused()
        connection.close(_POLICY_VIOLATION, why)
