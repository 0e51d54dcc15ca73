"""An agent's WebSocket to the coordinator, without tasks and queues between the socket and the agent.

A message is handled inside the call that read it from the socket, and is written inside the call that sends it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage, Part
from holdfast.protocol.names import MAX_MESSAGE_BYTES, MAX_PART_BYTES, MAX_WHOLE_BYTES

#: what may wait behind a replay or a slow coordinator until it counts as gone; a new connection replays what matters
MAX_UNSENT_BYTES = 32 << 20
#: of a message; parts are full, but for the last one
_MAX_PARTS = 2 * MAX_WHOLE_BYTES // MAX_PART_BYTES
#: bytes of a replay that are given to the socket before it must make room
_SOCKET_BYTES = 1 << 20
#: messages of a replay that are sent before other tasks run
_REPLAY_BATCH = 8
_UNACKNOWLEDGED_MS = 10_000
_decoder = msgspec.msgpack.Decoder(CoordinatorMessage)
_encoder = msgspec.msgpack.Encoder()


OnMessage = Callable[[Any], None]
Decode = Callable[[bytes], Any]


class ChannelRefusedError(ConnectionError):
    """The coordinator's server answered, but not with a WebSocket. `status`: of the HTTP answer, 0 for none."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class PartsError(ValueError):
    """Parts of a message that do not belong together, or are too many."""


class PartJoiner:
    """Puts large messages together, which come in parts."""

    def __init__(self, max_bytes: int = MAX_WHOLE_BYTES, decode: Decode = _decoder.decode) -> None:
        self._max_bytes = max_bytes
        self._decode = decode
        self._parts: list[bytes] = []
        self._bytes = self._left = 0

    def add(self, message: CoordinatorMessage) -> CoordinatorMessage | None:
        """Add a received message. Return a message that is complete now, or None while parts of it are missing.

        Raises:
            PartsError: another message came between two parts, a part is missing, or the parts are too many or too
                large.
            DecodeError: the joined parts are not a message.
        """
        if not isinstance(message, Part):
            if self._parts:
                raise PartsError(f"{type(message).__name__} came where {self._left} more parts should")
            return message
        self._bytes += len(message.data)
        if self._parts and message.left != self._left - 1:
            raise PartsError(f"a part came after which {message.left} follow, not {self._left - 1}")
        if message.left >= _MAX_PARTS:
            raise PartsError(f"a message of {message.left + 1} parts: {_MAX_PARTS} at most are taken")
        if self._bytes > self._max_bytes:
            raise PartsError(f"a message of more than {self._max_bytes} bytes")
        self._parts.append(message.data)
        self._left = message.left
        if self._left:
            return None
        data, self._parts, self._bytes = b"".join(self._parts), [], 0
        whole = self._decode(data)
        if isinstance(whole, Part):
            raise PartsError("a part of parts")
        return whole


class CoordinatorChannel(asyncio.Protocol):
    """One connection. `on_message` for each message, inside the read; `closed` is done once it has ended.

    `decode` makes messages of bytes.
    """

    def __init__(self, url: str, token: str, on_message: OnMessage, decode: Decode = _decoder.decode) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._on_message = on_message
        self._transport: asyncio.Transport | None = None
        self._protocol = ClientProtocol(parse_uri(url), max_size=MAX_MESSAGE_BYTES)
        self._token = token
        self._parts: list[bytes] = []
        self._decode = decode
        self._joiner = PartJoiner(decode=decode)
        #: encoded messages, and replays that are not at their end yet
        self._waiting: deque[bytes | Iterator[AgentMessage]] = deque()
        self._waiting_bytes = 0
        self._paused = False

    def send(self, message: Any) -> None:
        """Send a message, after the messages that wait for room. It is dropped if the connection has ended.

        If more than `MAX_UNSENT_BYTES` wait, the connection is aborted.
        """
        if not self._open:
            return
        data = _encoder.encode(message)
        if self._waiting:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
        else:
            self._write(data)
        assert self._transport is not None
        if self._waiting_bytes + self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._waiting.clear()
            self._transport.abort()

    def replay(self, messages: Iterator[AgentMessage]) -> None:
        """Send these messages as the socket has room. Later messages follow them."""
        self._waiting.append(messages)
        self._send_replay()

    def close(self) -> None:
        """Close the connection after the sent messages. Messages that wait for room are dropped."""
        transport = self._transport
        self._waiting.clear()
        if transport is None or transport.is_closing():
            return
        if self._protocol.state is State.OPEN:
            self._protocol.send_close()
            self._flush()
        transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended; cancelling one who waits harms no other."""
        await asyncio.shield(self.closed)

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's options, and send the request for a WebSocket with the token."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_SOCKET_BYTES)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        request = self._protocol.connect()
        request.headers["Authorization"] = f"Bearer {self._token}"
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle the answer to the handshake and the frames in received data, and send the protocol's replies."""
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._on_handshake(event)
            elif isinstance(event, Frame):
                self._on_frame(event)
        self._flush()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_replay()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop waiting messages and complete `closed`. During the handshake, `ready` fails."""
        self._waiting.clear()
        if not self.ready.done():
            self.ready.set_exception(ChannelRefusedError(0, "the connection ended before it stood"))
        if not self.closed.done():
            self.closed.set_result(None)

    # ---- inside ----

    @property
    def _open(self) -> bool:
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._protocol.state is State.OPEN

    def _write(self, data: bytes) -> None:
        self._protocol.send_binary(data)
        self._flush()

    def _send_replay(self) -> None:
        """Send the waiting messages and replays (iterators over messages) in order, while the socket has room.

        After `_REPLAY_BATCH` of them other tasks run, and the rest follows.
        """
        for _ in range(_REPLAY_BATCH):
            if not self._waiting or self._paused or not self._open:
                return
            first = self._waiting[0]
            if isinstance(first, bytes):
                self._waiting_bytes -= len(first)
                self._waiting.popleft()
                self._write(first)
                continue
            message = next(first, None)
            if message is None:
                self._waiting.popleft()
            else:
                self._write(_encoder.encode(message))
        asyncio.get_running_loop().call_soon(self._send_replay)

    def _flush(self) -> None:
        """Write the protocol's outgoing bytes to the socket, and close it when the protocol has ended."""
        transport = self._transport
        assert transport is not None
        for data in self._protocol.data_to_send():
            if data:
                transport.write(data)
            else:
                transport.close()  # the protocol's way to say that nothing follows

    def _on_handshake(self, response: Response) -> None:
        """Complete `ready`. If the server refuses, `ready` fails with the HTTP status; the connection is aborted."""
        if self.ready.done():
            return
        if self._protocol.handshake_exc is None:
            self.ready.set_result(None)
            return
        status = response.status_code
        self.ready.set_exception(ChannelRefusedError(status, f"HTTP {status} {response.reason_phrase}"))
        self.abort()

    def _on_frame(self, frame: Frame) -> None:
        """Join frames and parts to a message, and call `on_message` with it. Text and control frames are ignored.

        If the data is not a message, the connection is aborted.
        """
        if frame.opcode not in (Opcode.BINARY, Opcode.CONT):
            return  # pings and closes are the protocol's; text is nothing of ours
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return
        data = b"".join(self._parts)
        self._parts = []
        try:
            message = self._joiner.add(self._decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, PartsError):
            self.abort()  # not a coordinator of this protocol
            return
        if message is not None:
            self._on_message(message)


#: Makes a channel from the URL, the token and the callback for messages.
ChannelMaker = Callable[[str, str, OnMessage], CoordinatorChannel]


def websocket_url(coordinator: str) -> str:
    """Return the agents' URL of a coordinator's http(s) URL."""
    return "ws" + coordinator.removeprefix("http").rstrip("/") + "/agent"


async def open_channel(
    coordinator: str,
    token: str,
    on_message: OnMessage,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
    make: ChannelMaker = CoordinatorChannel,
) -> CoordinatorChannel:
    """Connect to a coordinator, and return the channel from `make` once the server has accepted the WebSocket.

    Args:
        coordinator: its http(s) URL.
        token: sent in the handshake.
        on_message: called for each message.
        tls: context for an https URL.
        timeout_s: most seconds until the handshake is done.
        make: makes the channel.

    Raises:
        OSError: no answer (ChannelRefusedError: an answer, but not with a WebSocket).
        TimeoutError: no answer in time.
    """
    loop = asyncio.get_running_loop()
    url = websocket_url(coordinator)
    where = parse_uri(url)
    channel: CoordinatorChannel | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, channel = await loop.create_connection(
                lambda: make(url, token, on_message),
                where.host,
                where.port,
                ssl=tls if where.secure else None,
            )
            await channel.ready
    except BaseException:
        if channel is not None:
            channel.abort()
        raise
    return channel
