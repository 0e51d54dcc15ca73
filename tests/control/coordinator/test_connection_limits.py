"""Limits on unauthenticated connections, in one loop with a scripted protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from holdfast.control.coordinator.server import open_listener
from holdfast.control.serving.connection_limits import ConnectionLimiter, ConnectionLimits, check_room
from holdfast.counted_log import CountedLog
from holdfast.errors import BadInputError

DEADLINE_S = 30.0
LOG = logging.getLogger("holdfast.test_connection_limits")


class Greeter(asyncio.Protocol):
    """A protocol that sends a greeting and nothing else."""

    def __init__(self, on_lost: Callable[[], object]) -> None:
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")


class Visitor:
    """The client side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        name = writer.get_extra_info("sockname")
        self.address = (str(name[0]), int(name[1]))

    async def greeted(self) -> None:
        assert await asyncio.wait_for(self._reader.readexactly(5), DEADLINE_S) == b"hello"

    async def dropped(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(self._reader.read(1), DEADLINE_S) == b""

    @property
    def there(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None

    def leave(self) -> None:
        self._writer.transport.abort()


class Door:
    """A connection limiter, and a way to connect to it from any loopback address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.listener = open_listener("127.0.0.1", 0)
        self.keeper = ConnectionLimiter(self.listener, Greeter, None, CountedLog(LOG, time.monotonic), limits)
        self._visitors: list[Visitor] = []

    async def come(self, host: str = "127.0.0.1", *, known: bool = False) -> Visitor:
        port = self.listener.getsockname()[1]
        visitor = Visitor(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)))
        self._visitors.append(visitor)
        await visitor.greeted()
        if known:
            self.keeper.on_authenticated(visitor.address)
        return visitor

    def close(self) -> None:
        for visitor in self._visitors:
            visitor.leave()
        self.listener.close()


def play(story: Callable[[Door], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        door = Door(ConnectionLimits(**{"pending": 4, "seconds": 60.0, "a_second": 1e9, **limits}))  # type: ignore[arg-type]
        try:
            with door.keeper.accepting():
                await asyncio.wait_for(story(door), DEADLINE_S)
        finally:
            door.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_the_oldest_unauthenticated_connection_is_dropped_at_the_limit() -> None:
    async def story(door: Door) -> None:
        visitors = [await door.come() for _ in range(6)]
        for visitor in visitors[:2]:
            await visitor.dropped()
        assert all(visitor.there for visitor in visitors[2:])

    play(story)


def test_authenticated_connections_do_not_count_toward_the_limit() -> None:
    async def story(door: Door) -> None:
        known = [await door.come(known=True) for _ in range(10)]
        strangers = [await door.come() for _ in range(5)]
        await strangers[0].dropped()
        assert all(visitor.there for visitor in [*known, *strangers[1:]])

    play(story)


def test_the_address_with_the_most_unauthenticated_connections_loses_some() -> None:
    async def story(door: Door) -> None:
        quiet = await door.come("127.0.0.2")
        crowd = [await door.come("127.0.0.3") for _ in range(20)]
        for visitor in crowd[:-3]:
            await visitor.dropped()
        assert quiet.there
        assert all(visitor.there for visitor in crowd[-3:])

    play(story)


def test_unauthenticated_connections_are_dropped_after_a_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def story(door: Door) -> None:
        known, *strangers = [await door.come(known=place == 0) for place in range(4)]
        for visitor in strangers:
            await visitor.dropped()
        assert known.there

    play(story, seconds=2.0)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith("is dropped: no token arrived within the limit of 2 s")
    assert caplog.messages[1].startswith("2 more like this")


def test_connections_that_arrived_together_are_dropped_at_different_times() -> None:
    """Clients that are dropped together would reconnect together, forever."""

    async def story(door: Door) -> None:
        began = time.monotonic()
        crowd = [await door.come() for _ in range(40)]
        left: list[float] = []

        async def watch(visitor: Visitor) -> None:
            await visitor.dropped()
            left.append(time.monotonic() - began)

        await asyncio.gather(*map(watch, crowd))
        assert min(left) >= 1.0
        assert max(left) - min(left) > 0.2

    play(story, pending=40, seconds=2.0)


def test_new_connections_wait_so_that_earlier_ones_can_authenticate() -> None:
    """Later connections wait in the kernel meanwhile."""

    async def story(door: Door) -> None:
        first = [await door.come() for _ in range(4)]
        port = door.listener.getsockname()[1]
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(5)
        assert time.monotonic() - began > 0.2
        await first[0].dropped()
        writer.transport.abort()

    play(story, a_second=8.0)


def test_a_closed_connection_frees_its_slot() -> None:
    async def story(door: Door) -> None:
        stays = await door.come()
        for _ in range(20):
            visitor = await door.come()
            visitor.leave()
            await asyncio.sleep(0.01)
        assert stays.there

    play(story)


def test_a_closed_limiter_accepts_no_connections() -> None:
    async def run() -> None:
        door = Door(ConnectionLimits())
        with door.keeper.accepting():
            await door.come()
        with socket.create_connection(door.listener.getsockname()) as late:
            late.setblocking(False)
            await asyncio.sleep(0.05)
            with pytest.raises(BlockingIOError):
                late.recv(1)
        door.close()

    asyncio.run(run())


def test_a_job_with_more_nodes_than_can_connect_is_refused_at_the_start() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1104, before[1]))
    try:
        assert check_room(4, 1024) == ""
        warning = check_room(4, 1025)
        assert warning.startswith("the job may get 1025 nodes, and only 1024 nodes can connect")
        with pytest.raises(BadInputError, match=r"starts with 1025 nodes, and only 1024 .* raise it \(ulimit -n\)"):
            check_room(1025, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
