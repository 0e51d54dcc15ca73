"""A server's listening socket, its URL, and its steady clock."""

from __future__ import annotations

import socket
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.errors import BadInputError


def open_listener(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on a TCP port, or on a free one for 0.

    Raises:
        BadInputError: the port is in use, or the address does not belong to this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        raise BadInputError(
            f"cannot listen on the address {host}: {getattr(error, 'strerror', error)}; give --listen another"
        ) from None
    family, _, _, _, address = found[0]
    # asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol number. Without it, a Stop would wait for
    # an ACK.
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
            f"cannot listen on port {port} of {host}: {error.strerror}; give another port, or 0 for a free one"
        ) from None
    return listener


def steady_time(clock: Clock) -> Callable[[], float]:
    """Return a function for unix time: the present time, continued by the monotonic clock, so that it never steps.

    Leases and events share it.
    """
    offset = clock.time() - clock.monotonic()
    return lambda: clock.monotonic() + offset


def listener_url(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL at which other machines reach a listening socket.

    If it listens on all addresses, the URL has this machine's host name.
    """
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
