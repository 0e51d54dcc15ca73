"""The coordinator's web server: uvicorn behind connection limits, and the WebSockets of agents."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Request
from websockets.protocol import State

from holdfast.control.serving.connection_limits import Address, ConnectionLimiter, ConnectionLimits
from holdfast.control.serving.frames import FrameTracker, ReadBuffer, decode_short_frame
from holdfast.counted_log import CountedLog, CountedRecords
from holdfast.protocol.names import MAX_MESSAGE_BYTES

TokenTest = Callable[[Iterable[tuple[bytes, bytes]]], bool]

#: libraries that log warnings which unauthenticated clients can cause
_LIBRARIES = ("uvicorn.error", "asyncio")
_SOCKET = "direct_socket"


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, because the coordinator decides when the job ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _CancelFilter(logging.Filter):
    """Drops uvicorn's errors about connections that the server closes at its end."""

    def filter(self, record: logging.LogRecord) -> bool:
        cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not (cut_off or str(record.msg).startswith("Cancel %s running task(s)"))


class _Protocol(H11Protocol):
    """uvicorn's side of a connection. A request can become a WebSocket only with a valid token."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, shown: TokenTest, on_lost: Callable[[], object]
    ) -> None:
        super().__init__(config, state, app_state={})
        self._shown = shown
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def _should_upgrade(self) -> bool:
        # Without a token it is answered like any other request, and the frames after it are ignored.
        return self._get_upgrade() == b"websocket" and self._shown(self.headers)


class SocketUser(Protocol):
    """The code that has taken a WebSocket over."""

    def on_message(self, data: bytes | None) -> None:
        """Handle a received message, or None for a text message."""
        ...

    def on_writable(self) -> None:
        """Handle that the written data is out, so that the socket has room again."""
        ...

    def on_closed(self, code: int) -> None:
        """Handle the end of the connection. May be called twice."""
        ...


class DirectSocket(WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """uvicorn's WebSocket, which an application can take over to get messages inside the call that reads them.

    With ASGI, each message wakes a task, and stops and resumes reading. That is most of the cost of an agent's message,
    and with thousands of agents most of a coordinator's load. Accepting and closing stay with ASGI.

    It has its own read buffer: the event loop would allocate and free 256 KiB for each read, which costs more than the
    rest of a heartbeat.
    """

    _user: SocketUser | None = None
    _read: ReadBuffer | None = None
    #: frame boundaries of the data after the request that opened it
    _ends: FrameTracker | None = None

    # called by the application

    def take_over(self, user: SocketUser) -> None:
        """Pass all messages to `user` from now on, and the ones that came since the accept. Resume reading."""
        self._user = user
        while not self.queue.empty():
            event = cast(Mapping[str, Any], self.queue.get_nowait())
            if event["type"] == "websocket.receive":
                user.on_message(event.get("bytes"))
            else:
                user.on_closed(event["code"])
        self.resume()

    @property
    def is_writable(self) -> bool:
        """Whether it accepts frames now."""
        return self.writable.is_set()

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended or closed it."""
        return not (self.disconnected or self.close_sent or self.transport.is_closing())

    def write(self, frame: bytes) -> None:
        """Send a whole frame. It is dropped if the connection has ended."""
        if self.is_open:
            self.transport.write(frame)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def pause(self) -> None:
        """Stop reading. Data that was read already may still arrive."""
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`. Without a pause, do nothing."""
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    # called by the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read. The size hint is ignored."""
        if self._read is None:
            self._read = ReadBuffer()
        return self._read.room

    def buffer_updated(self, nbytes: int) -> None:
        assert self._read is not None
        self.data_received(self._read.get_data(nbytes))

    # called by uvicorn

    def data_received(self, data: bytes) -> None:
        """Pass data that is exactly one short message directly to the user. uvicorn's parser gets everything else.

        It tracks where frames end, because data that begins within a frame must go to the parser.
        """
        if self._ends is None:
            self._ends = FrameTracker()  # these bytes are the request, and nothing else
        elif not self._ends.is_between_frames:
            self._ends.process(data)
        else:
            # Between the parts of a message, only its next part is valid, and the parser checks that.
            if self._user is not None and not self.frames and self.conn.state is State.OPEN:
                message = decode_short_frame(data)
                if message is not None:
                    if not self.close_sent:
                        self._user.on_message(message)
                    return
            self._ends.process(data)
        super().data_received(data)

    def handle_connect(self, event: Request) -> None:
        """Handle the request that opens the WebSocket.

        If it is accepted, store this object in the scope for `direct_socket`.
        """
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope.setdefault("state", {})[_SOCKET] = self  # the task of the connection has not started yet

    def send_receive_event_to_app(self) -> None:
        """Pass a message that the parser has completed to the user (None for text), unless the socket is closed.

        Without a user it goes to the application.
        """
        if self._user is None:
            super().send_receive_event_to_app()
            return
        frames, self.frames = self.frames, []
        if not self.close_sent:
            self._user.on_message(b"".join(frames) if self.curr_msg_data_type == "bytes" else None)

    def resume_writing(self) -> None:
        """Mark the socket as writable, and notify the user."""
        super().resume_writing()
        if self._user is not None:
            self._user.on_writable()

    def handle_parser_exception(self) -> None:
        """Close the connection after invalid data, and report its end to the user with the code of the close frame."""
        code = self.conn.close_sent.code if self.conn.close_sent is not None else 1006
        super().handle_parser_exception()
        if self._user is not None:
            self._user.on_closed(code)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection as uvicorn does, and report it to the user."""
        super().connection_lost(exc)
        if self._user is not None:
            self._user.on_closed(1006)


def direct_socket(websocket: WebSocket) -> DirectSocket:
    """Return the connection behind an accepted WebSocket."""
    return websocket.scope["state"][_SOCKET]


class WebServer:
    """Serves an application on a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        log: CountedLog,
        *,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Create the server. `serve` starts it.

        Args:
            listener: the listening socket.
            log: counts warnings about unauthenticated connections.
            tls_cert: certificate chain, or None without TLS.
            tls_key: private key of the certificate.
            limits: limits on unauthenticated connections.
        """
        self._listener = listener
        self._tls = (tls_cert, tls_key)
        self._log = log
        self._limits = limits
        self._server: uvicorn.Server | None = None
        self._limiter: ConnectionLimiter | None = None
        self._stopped = False

    def on_authenticated(self, client: Address | None) -> None:
        """Note that the peer of a connection has sent a valid token."""
        if self._limiter is not None:
            self._limiter.on_authenticated(client)

    async def serve(self, app: ASGIApp, shown: TokenTest) -> None:
        """Serve an application with uvicorn, behind the connection limits, until `stop`.

        Then wait for its cancelled tasks.

        Args:
            app: the application.
            shown: returns whether the headers of a request contain a valid token.
        """
        config = self._config(app)
        config.load()
        server = self._server = _Uvicorn(config)
        server.should_exit = self._stopped

        def protocol(on_lost: Callable[[], object]) -> H11Protocol:
            return _Protocol(config, server.server_state, shown, on_lost)

        self._limiter = ConnectionLimiter(self._listener, protocol, config.ssl, self._log, self._limits)
        with self._count_library_records(), self._limiter.accepting():
            await server.serve(sockets=[])
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)  # wait for the cancelled tasks

    def stop(self) -> None:
        """End `serve`, or a later call of it."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    @contextlib.contextmanager
    def _count_library_records(self) -> Generator[None]:
        """Count repeated log records of libraries about bad connections, instead of printing each.

        Drop uvicorn's errors about connections that the server closes.
        """
        filters = (_CancelFilter(), CountedRecords(self._log))
        loggers = [logging.getLogger(name) for name in _LIBRARIES]
        for logger, log_filter in itertools.product(loggers, filters):
            logger.addFilter(log_filter)
        try:
            yield
        finally:
            for logger, log_filter in itertools.product(loggers, filters):
                logger.removeFilter(log_filter)

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        cert, key = self._tls
        return uvicorn.Config(
            app,
            http=H11Protocol,
            ws=DirectSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            # Leases detect dead agents. Pings would only wake processes, and compression would only add latency.
            ws_ping_interval=None,
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=str(cert) if cert else None,
            ssl_keyfile=str(key) if key else None,
        )
