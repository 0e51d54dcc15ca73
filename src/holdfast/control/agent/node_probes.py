"""Probes between nodes: a listener that other nodes connect to, and a connection to such a listener."""

from __future__ import annotations

import asyncio
import contextlib
import os

#: A connection may take this long; the coordinator waits a little longer for the answer.
CONNECT_S = 3.0


async def serve_probes(host: str) -> asyncio.Server | None:
    """Listen on a free port of an address; return None if that is impossible.

    Connections are accepted and closed. Nothing is read or written.
    """

    def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    try:
        return await asyncio.start_server(close, host, 0)
    except OSError:
        return None  # the checks before a node joins report a wrong address


async def connection_error(host: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Connect to an address, and close the connection. Return why that failed, also by a time-out, or ""."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{host}:{port}: no connection within {timeout_s:g} s"
    except OSError as error:
        return f"{host}:{port}: {_describe(error)}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


def _describe(error: OSError) -> str:
    """Return what went wrong; a failed look-up has a negative number, which is not one of the system's."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)
