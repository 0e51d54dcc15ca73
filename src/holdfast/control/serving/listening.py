"""A server's socket, the URL at which others reach it, and its time."""

from __future__ import annotations

import socket
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.errors import BadInputError


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; nobody else can have the port from here on.

    Raises:
        BadInputError: the port is in use, or the address is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # (the latter of what can be no host's name)
        raise BadInputError(
            f"the address {host} cannot be listened on: {getattr(error, 'strerror', error)}; give --listen another"
        ) from None
    family, _, _, _, address = found[0]
    # asyncio sets TCP_NODELAY only on sockets whose protocol number says TCP: without it a Stop waits for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BadInputError(
            f"port {port} on {host} cannot be listened on: {error.strerror}; give another, or 0 for a free one"
        ) from None
    return listener


def steady_time(clock: Clock) -> Callable[[], float]:
    """Return unix time that follows the monotonic clock: one time for leases and events, which never steps."""
    offset = clock.time() - clock.monotonic()
    return lambda: clock.monotonic() + offset


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL at which others reach what listens there."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
