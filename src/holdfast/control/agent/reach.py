"""Whether nodes reach each other: a listener that others try to connect to, and such a try."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

#: A connection may take this long; the coordinator waits a little longer for the answer.
CONNECT_S = 3.0


def open_listener(host: str) -> socket.socket | None:
    """Return a socket that listens on a free port of an address, None if there can be none."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=16)
    except (OSError, IndexError):
        return None


async def serve_probes(listener: socket.socket) -> asyncio.Server:
    """Accept connections and close them; nothing is read or written."""

    def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    return await asyncio.start_server(close, sock=listener)


async def connection_error(host: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Return why no connection can be made to an address, "" if one can."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{host}:{port}: no connection within {timeout_s:g} s"
    except OSError as error:
        return f"{host}:{port}: {os.strerror(error.errno) if error.errno else error}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""
