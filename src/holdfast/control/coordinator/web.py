"""The coordinator's web server: uvicorn behind a doorkeeper."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Iterable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.control.coordinator.doorkeeper import Address, Doorkeeper, Limits
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.counted_log import CountedLog, CountedRecords
from holdfast.protocol.names import MAX_MESSAGE_BYTES

TokenTest = Callable[[Iterable[tuple[bytes, bytes]]], bool]

#: whose warnings a stranger can cause
_LIBRARIES = ("uvicorn.error", "asyncio")


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: ending the job is the coordinator's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


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


class WebServer:
    """Serves an application on a listening socket."""

    def __init__(
        self, listener: socket.socket, settings: ServerSettings, log: CountedLog, limits: Limits | None = None
    ) -> None:
        """Take the socket to listen on; `serve` begins. `log`, `limits`: of and for strangers."""
        self._listener = listener
        self._settings = settings
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

    def stop(self) -> None:
        """End `serve`."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    @contextlib.contextmanager
    def _libraries_counted(self) -> Generator[None]:
        """Hold back what libraries say over and over for each connection that is none."""
        counting = CountedRecords(self._log)
        loggers = [logging.getLogger(name) for name in _LIBRARIES]
        for logger in loggers:
            logger.addFilter(counting)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(counting)

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        settings = self._settings
        return uvicorn.Config(
            app,
            http=H11Protocol,
            ws="websockets-sansio",
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
            ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
            ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
        )
