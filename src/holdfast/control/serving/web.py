"""The coordinator's web server: uvicorn behind a doorkeeper, and the WebSockets that agents have to it."""

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

from holdfast.control.serving.doorkeeper import Address, Doorkeeper, Limits
from holdfast.control.serving.frames import FrameEnds, ReadBuffer, short_message
from holdfast.counted_log import CountedLog, CountedRecords
from holdfast.protocol.names import MAX_MESSAGE_BYTES

TokenTest = Callable[[Iterable[tuple[bytes, bytes]]], bool]

#: whose warnings a stranger can cause
_LIBRARIES = ("uvicorn.error", "asyncio")
_SOCKET = "direct_socket"


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: ending the job is the coordinator's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _CancelFilter(logging.Filter):
    """Drops uvicorn's errors about connections that the server closes as it ends: they only waited for more events."""

    def filter(self, record: logging.LogRecord) -> bool:
        cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not (cut_off or str(record.msg).startswith("Cancel %s running task(s)"))


class _Protocol(H11Protocol):
    """uvicorn's side of a connection; nobody gets as far as a WebSocket without the token."""

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
        # Without the token it is answered like any other request, and frames that follow it are not looked at.
        return self._get_upgrade() == b"websocket" and self._shown(self.headers)


class SocketUser(Protocol):
    """Whoever has taken a WebSocket over."""

    def received(self, data: bytes | None) -> None:
        """A message has come; None: one of text."""
        ...

    def has_room(self) -> None:
        """What was written is on its way, and more can be."""
        ...

    def ended(self, code: int) -> None:
        """Nothing will come any more; may be said twice."""
        ...


class DirectSocket(WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """uvicorn's WebSocket, which an application may take over: what comes is handed on inside the call that reads it.

    By ASGI, each message is a task's wake-up, and reading is stopped and begun again around it. Of an agent's word that
    is most of what it costs, and of thousands of agents most of what a coordinator does. Accepting and closing stay the
    application's, by ASGI.

    It is read into a buffer of its own: the loop would take 256 KiB of memory for each read, and give it back, which
    costs more than all else of a heartbeat.
    """

    _user: SocketUser | None = None
    _read: ReadBuffer | None = None
    #: of what came after the request by which it was opened
    _ends: FrameEnds | None = None

    # ---- the application's side ----

    def take_over(self, user: SocketUser) -> None:
        """Hand what comes to `user` from now on, and what has come since it was accepted."""
        self._user = user
        while not self.queue.empty():
            event = cast(Mapping[str, Any], self.queue.get_nowait())
            if event["type"] == "websocket.receive":
                user.received(event.get("bytes"))
            else:
                user.ended(event["code"])
        self.resume()

    @property
    def writes(self) -> bool:
        """Whether it takes frames now."""
        return self.writable.is_set()

    @property
    def stands(self) -> bool:
        """Whether neither side has ended or closed it."""
        return not (self.disconnected or self.close_sent or self.transport.is_closing())

    def write(self, frame: bytes) -> None:
        """Send a whole frame; one to a connection that has ended is dropped."""
        if self.stands:
            self.transport.write(frame)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def pause(self) -> None:
        """Read nothing more for now: what was read may still come."""
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    # ---- the loop's side ----

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._read is None:
            self._read = ReadBuffer()
        return self._read.room

    def buffer_updated(self, nbytes: int) -> None:
        assert self._read is not None
        self.data_received(self._read.take(nbytes))

    # ---- uvicorn's side ----

    def data_received(self, data: bytes) -> None:
        if self._ends is None:
            self._ends = FrameEnds()  # (this is the request, and no more)
        elif not self._ends.between:
            self._ends.take(data)
        else:
            # (between the parts of a message only its next part may come: the parser sees to that)
            if self._user is not None and not self.frames and self.conn.state is State.OPEN:
                message = short_message(data)
                if message is not None:
                    if not self.close_sent:
                        self._user.received(message)
                    return
            self._ends.take(data)
        super().data_received(data)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope.setdefault("state", {})[_SOCKET] = self  # (its task has not begun yet)

    def send_receive_event_to_app(self) -> None:
        if self._user is None:
            super().send_receive_event_to_app()
            return
        frames, self.frames = self.frames, []
        if not self.close_sent:
            self._user.received(b"".join(frames) if self.curr_msg_data_type == "bytes" else None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._user is not None:
            self._user.has_room()

    def handle_parser_exception(self) -> None:
        code = self.conn.close_sent.code if self.conn.close_sent is not None else 1006
        super().handle_parser_exception()
        if self._user is not None:
            self._user.ended(code)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._user is not None:
            self._user.ended(1006)


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
        limits: Limits | None = None,
    ) -> None:
        """Take the socket to listen on; `serve` begins. `log`, `limits`: of and for strangers."""
        self._listener = listener
        self._tls = (tls_cert, tls_key)
        self._log = log
        self._limits = limits
        self._server: uvicorn.Server | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._stopped = False

    def known(self, client: Address | None) -> None:
        """The other side of a connection has shown the token."""
        if self._doorkeeper is not None:
            self._doorkeeper.known(client)

    async def serve(self, app: ASGIApp, shown: TokenTest) -> None:
        """Serve until `stop`.

        Args:
            shown: tells whether a request's headers show the token.
        """
        config = self._config(app)
        config.load()
        server = self._server = _Uvicorn(config)
        server.should_exit = self._stopped

        def protocol(on_lost: Callable[[], object]) -> H11Protocol:
            return _Protocol(config, server.server_state, shown, on_lost)

        self._doorkeeper = Doorkeeper(self._listener, protocol, config.ssl, self._log, self._limits)
        with self._libraries_counted(), self._doorkeeper.opened():
            await server.serve(sockets=[])
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)  # those that were cancelled

    def stop(self) -> None:
        """End `serve`."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    @contextlib.contextmanager
    def _libraries_counted(self) -> Generator[None]:
        """Count repeated log records of libraries about bad connections, instead of printing each."""
        filters = (_CancelFilter(), CountedRecords(self._log))
        loggers = [logging.getLogger(name) for name in _LIBRARIES]
        for logger, one in itertools.product(loggers, filters):
            logger.addFilter(one)
        try:
            yield
        finally:
            for logger, one in itertools.product(loggers, filters):
                logger.removeFilter(one)

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        cert, key = self._tls
        return uvicorn.Config(
            app,
            http=H11Protocol,
            ws=DirectSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            # The leases say who lives; pings would only add wake-ups, compression only latency.
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
