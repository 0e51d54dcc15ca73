"""Whether a node is fit to join: looked at before its agent says Hello, while its workers start.

What is looked at takes a few milliseconds, of which workers need a hundred times as many; only the site's own program
may take longer, and then the node comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass

from holdfast.control.agent.memory import available_bytes
from holdfast.control.programs import ProgramError, run_program

#: with less than this for each worker, not even a forked one can come up
WORKER_BYTES = 64 << 20
#: for sockets and logs
DISK_BYTES = 16 << 20
#: 128 KiB go through a loopback in a tenth of a millisecond; a machine with six runnable processes per core took 5 s
NETWORK_S = 20.0
#: a site's checks of its hardware take seconds; what takes longer than a model takes to load is not waited for
PROGRAM_S = 60.0
_SENT = bytes(range(256)) * 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What a node is looked at for. folder: of its sockets. host: where the others reach it. program: the site's."""

    workers: int
    folder: str
    host: str
    program: str = ""
    program_s: float = PROGRAM_S

    async def unfit(self) -> str:
        """Check memory, disk and network, and run the site's program. Return all problems in one line, or ""."""
        found = await asyncio.gather(self._check_network(), self._check_program())
        return "; ".join(why for why in (_check_memory(self.workers), _check_disk(self.folder), *found) if why)

    async def _check_network(self) -> str:
        """Exchange 128 KiB between two sockets over the address at which the other nodes reach this one.

        Return the problem, or "".

        It is tried twice: the time may also be up because this process was stopped (SIGSTOP), or its machine paused.
        """
        return await self._try_network() and await self._try_network()

    async def _try_network(self) -> str:
        """Send 128 KiB to the node's own address and read them back. Return why that fails, or "".

        It fails if other data comes back, after an OSError, or if it takes longer than `NETWORK_S`.
        """
        try:
            async with asyncio.timeout(NETWORK_S):
                return (
                    "" if await _echoed(self.host) else f"network: {self.host} gives back other data than it was sent"
                )
        except TimeoutError:
            return f"network: 128 KiB over {self.host} take longer than {NETWORK_S:g} s"
        except OSError as error:
            return f"network: {self.host} cannot be reached from itself: {error.strerror or error}"

    async def _check_program(self) -> str:
        """Run the site's program. Return how it failed, or that it took longer than `program_s`; "" if it succeeds.

        Return "" also if no program is set.
        """
        if not self.program:
            return ""
        try:
            async with asyncio.timeout(self.program_s):
                await run_program(self.program)
        except TimeoutError:
            return f"{self.program}: it took longer than {self.program_s:g} s"
        except (ProgramError, OSError) as error:
            return f"{self.program}: {error}"
        return ""


def _check_memory(workers: int) -> str:
    """Return that the free memory is too small for these workers, or "" if it is enough or not known."""
    left = available_bytes()
    if left is None or left >= workers * WORKER_BYTES:
        return ""
    return f"memory: {left >> 20} MiB are left for {workers} workers, each needs at least {WORKER_BYTES >> 20}"


def _check_disk(folder: str) -> str:
    """Return that the disk of a folder is too full or cannot be read, or ""."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"disk: {folder}: {error.strerror}"
    return "" if free >= DISK_BYTES else f"disk: {free >> 20} MiB are left in {folder}, {DISK_BYTES >> 20} are needed"


async def _echoed(host: str) -> bool:
    """Send bytes to a server of our own at `host`, read them back, and return whether they are the same."""

    async def echo(reader: StreamReader, writer: StreamWriter) -> None:
        """Send all received data back until the end of the stream."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, host, 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        try:
            sending = asyncio.ensure_future(_send(writer))
            received = b""
            while data := await reader.read(1 << 16):
                received += data
            await sending
        finally:
            writer.close()
    return received == _SENT


async def _send(writer: StreamWriter) -> None:
    """Write the test data, and end the stream."""
    writer.write(_SENT)
    await writer.drain()
    writer.write_eof()
