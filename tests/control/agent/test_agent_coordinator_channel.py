"""An agent's WebSocket to the coordinator, against the `websockets` library's own server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from holdfast.control.agent.channel import (
    MAX_UNSENT_BYTES,
    ChannelRefusedError,
    PartJoiner,
    PartsError,
    open_channel,
    websocket_url,
)
from holdfast.control.serving.machine_shell import split_message
from holdfast.coordination.generations.plan_delta import change_of
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage, Heartbeat, Leave, Part, Welcome
from holdfast.protocol.messages.orders import Posted
from holdfast.protocol.messages.plans import PrepareNode
from holdfast.protocol.names import MAX_MESSAGE_BYTES, MAX_PART_BYTES
from holdfast.protocol.plan import GenerationPlan, Member

DEADLINE = 60.0
WELCOME = Welcome(term=1, lease_s=1.0, heartbeat_s=0.1, committed=0)
Handler = Callable[[ServerConnection], Awaitable[None]]


class Client:
    """Records the messages that the owner of a channel receives."""

    def __init__(self) -> None:
        self.messages: list[CoordinatorMessage] = []
        self.changed = asyncio.Event()

    def on_message(self, message: CoordinatorMessage) -> None:
        self.messages.append(message)
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.messages) < count:
                self.changed.clear()
                await self.changed.wait()


async def with_server(handler: Handler, story: Callable[[str], Awaitable[None]]) -> None:
    async with serve(handler, "127.0.0.1", 0, compression=None, max_size=MAX_MESSAGE_BYTES) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        await asyncio.wait_for(story(url), DEADLINE)


def test_messages_are_exchanged_with_a_token_and_large_ones_are_joined() -> None:
    large = Posted(generation=1, keys={"k": b"x" * 65536})

    async def handler(connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.path == "/agent"
        assert connection.request.headers["Authorization"] == "Bearer t0ken"
        data = await connection.recv()
        assert isinstance(data, bytes)
        assert msgspec.msgpack.decode(data, type=Heartbeat) == Heartbeat()
        await connection.send(msgspec.msgpack.encode(WELCOME))
        data = msgspec.msgpack.encode(large)
        await connection.send([data[:10], data[10:30000], data[30000:]])
        await connection.wait_closed()

    async def story(url: str) -> None:
        client = Client()
        channel = await open_channel(url, "t0ken", client.on_message)
        channel.send(Heartbeat())
        await client.wait_for(2)
        assert client.messages == [WELCOME, large]
        channel.close()
        await channel.wait_closed()

    asyncio.run(with_server(handler, story))


def test_a_replay_waits_for_buffer_space_and_later_messages_follow_it() -> None:
    """A replay of 30,000 steps exceeds the limit of unsent bytes; the agent must not end its own connection."""
    page = Leave(reason="page", detail="x" * 8192)
    count = 2 * MAX_UNSENT_BYTES // 8192
    made = 0

    def pages() -> Iterator[Leave]:
        nonlocal made
        for _ in range(count):
            made += 1
            yield page

    received: list[AgentMessage] = []
    let_go = asyncio.Event()

    async def handler(connection: ServerConnection) -> None:
        await let_go.wait()
        async for data in connection:
            assert isinstance(data, bytes)
            received.append(msgspec.msgpack.decode(data, type=AgentMessage))
            if isinstance(received[-1], Heartbeat):
                await connection.close()

    async def story(url: str) -> None:
        channel = await open_channel(url, "t0ken", lambda message: None)
        channel.replay(pages())
        channel.send(Heartbeat())
        while made < 8 or not channel._paused:
            await asyncio.sleep(0)
        assert made < count // 2, "the replay did not wait for room"
        let_go.set()
        await channel.wait_closed()

    asyncio.run(with_server(handler, story))
    assert len(received) == count + 1
    assert received[-1] == Heartbeat()


def test_a_channel_closes_if_its_peer_does_not_read() -> None:
    given_up = asyncio.Event()

    async def handler(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await given_up.wait()
        connection.transport.abort()  # A peer that does not read cannot notice a close.

    async def story(url: str) -> None:
        channel = await open_channel(url, "t0ken", lambda message: None)
        channel.replay(Leave(reason="page", detail="x" * 8192) for _ in range(2 * MAX_UNSENT_BYTES // 8192))
        for _ in range(MAX_UNSENT_BYTES // 8192 + 1):
            channel.send(Leave(reason="meanwhile", detail="x" * 8192))
        await channel.wait_closed()
        given_up.set()

    asyncio.run(with_server(handler, story))


def test_sending_while_the_peer_closes_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(connection: ServerConnection) -> None:
        await connection.close()

    async def story(url: str) -> None:
        channel = await open_channel(url, "t0ken", lambda message: None)
        while not channel.closed.done():
            channel.send(Heartbeat())
            await asyncio.sleep(0)
        channel.send(Heartbeat())
        channel.close()
        channel.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(with_server(handler, story))
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_sending_after_an_unfinished_close_is_not_an_error() -> None:
    """The protocol refuses to send after the other side has announced its close."""

    async def handler(connection: ServerConnection) -> None:
        await connection.send(msgspec.msgpack.encode(WELCOME))
        connection.protocol.send_close()
        connection.transport.write(b"".join(connection.protocol.data_to_send()))
        await connection.wait_closed()

    async def story(url: str) -> None:
        client = Client()
        channel = await open_channel(url, "t0ken", client.on_message)
        await client.wait_for(1)
        while channel._protocol.state.name == "OPEN":
            await asyncio.sleep(0)
        channel.send(Leave(reason="finished"))
        channel.close()
        await channel.wait_closed()

    asyncio.run(with_server(handler, story))


@pytest.mark.parametrize("size", [MAX_MESSAGE_BYTES + 1, 4 * MAX_MESSAGE_BYTES])
def test_an_oversized_message_ends_the_connection(size: int) -> None:
    async def handler(connection: ServerConnection) -> None:
        try:
            await connection.send(b"x" * size)
            await connection.wait_closed()
        except ConnectionClosed:
            pass

    async def story(url: str) -> None:
        client = Client()
        channel = await open_channel(url, "t0ken", client.on_message)
        await channel.wait_closed()
        assert client.messages == []

    asyncio.run(with_server(handler, story))


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=100), st.builds(lambda at, b: _mutated(at, b), st.integers(0, 1000), st.integers(0, 255))
    )
)
def test_random_bytes_are_a_valid_message_or_end_the_connection(data: bytes) -> None:
    async def handler(connection: ServerConnection) -> None:
        await connection.send(data)
        await connection.close()

    async def story(url: str) -> None:
        client = Client()
        channel = await open_channel(url, "t0ken", client.on_message)
        await channel.wait_closed()
        assert all(isinstance(message, CoordinatorMessage) for message in client.messages)

    asyncio.run(with_server(handler, story))


def _mutated(at: int, byte: int) -> bytes:
    data = bytearray(msgspec.msgpack.encode(WELCOME))
    data[at % len(data)] = byte
    return bytes(data)


def test_a_refused_connection_raises_an_os_error() -> None:
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(open_channel("http://127.0.0.1:9", "t", lambda message: None))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-x\r\n\r\n"])
def test_another_server_on_the_port_is_refused(answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def story() -> None:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ChannelRefusedError):
                await asyncio.wait_for(open_channel(url, "t", lambda message: None), DEADLINE)

    asyncio.run(story())


def test_websocket_urls() -> None:
    assert websocket_url("http://127.0.0.1:80/") == "ws://127.0.0.1:80/agent"
    assert websocket_url("https://[::1]:80") == "wss://[::1]:80/agent"


# ---- large messages ----


def large_plan(workers: int) -> PrepareNode:
    members = tuple(Member(worker=f"n{n}/0/ab", host="h" * 100, state_port=1) for n in range(workers))
    return PrepareNode(plan=change_of(GenerationPlan(term=1, generation=1, members=members), None))


def test_a_large_message_is_sent_in_parts() -> None:
    plan = large_plan(30_000)
    data = msgspec.msgpack.encode(plan)
    parts = split_message(data)
    assert len(data) > 3 * MAX_MESSAGE_BYTES
    assert len(parts) == -(-len(data) // (MAX_PART_BYTES - 64))
    assert max(map(len, parts)) <= MAX_PART_BYTES
    assert split_message(data[:1000]) == [data[:1000]]

    async def handler(connection: ServerConnection) -> None:
        for part in parts:
            await connection.send(part)
        await connection.send(msgspec.msgpack.encode(WELCOME))
        await connection.wait_closed()

    async def story(url: str) -> None:
        client = Client()
        channel = await open_channel(url, "t0ken", client.on_message)
        await client.wait_for(2)
        assert client.messages == [plan, WELCOME]
        channel.close()
        await channel.wait_closed()

    asyncio.run(with_server(handler, story))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([Part(data=b"x", left=1), WELCOME], "Welcome came where 1 more parts should"),
        ([Part(data=b"x", left=2), Part(data=b"x", left=0)], "after which 0 follow, not 1"),
        ([Part(data=b"", left=1 << 40)], "a message of 1099511627777 parts: 2048 at most are taken"),
        ([Part(data=b"x" * 60, left=9), Part(data=b"x" * 60, left=8)], "more than 100 bytes"),
        ([Part(data=msgspec.msgpack.encode(Part(data=b"", left=0)), left=0)], "a part of parts"),
    ],
)
def test_inconsistent_parts_are_refused(messages: list[CoordinatorMessage], why: str) -> None:
    joiner = PartJoiner(max_bytes=100)
    assert [joiner.add(message) for message in messages[:-1]] == [None] * len(messages[:-1])
    with pytest.raises(PartsError, match=why):
        joiner.add(messages[-1])


def test_parts_that_join_to_an_invalid_message_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        PartJoiner().add(Part(data=b"no message", left=0))
