"""A node and a hostile or broken pool: the node starts only complete requests and keeps little memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.pool import FromNode, NodeGrant, NodeState, PoolHello, PoolRefusal
from holdfast.protocol.names import MAX_MESSAGE_BYTES
from holdfast.protocol.pool.launch import PooledLaunch

DEADLINE_S = 60.0
#: The most bytes by which a node may grow, whatever it receives.
MOST_GROWTH = 60 << 20

_NODE = """
import json, sys
from holdfast.control.pool_node.pool_agent import run_pool_agent
from holdfast.control.pool_node.settings import PoolNodeSettings
say = lambda line: print(line, file=sys.stderr, flush=True)
sys.exit(run_pool_agent(PoolNodeSettings(**json.loads(sys.argv[1])), say))
"""
_decoder = msgspec.msgpack.Decoder(FromNode)


class FakePool:
    """Accepts nodes, sends scripted messages, and answers launch requests with `launch`."""

    def __init__(self) -> None:
        self.url = ""
        self.hellos: list[PoolHello] = []
        self.stands: list[NodeState] = []
        self.launch: bytes = b"{}"
        self.headers: dict[str, str] = {}
        self.status = HTTPStatus.OK
        self.asked: list[str] = []
        self._nodes: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self._changed = asyncio.Condition()

    async def node(self) -> ServerConnection:
        """Return the next connection of the node, after its Hello."""
        return await asyncio.wait_for(self._nodes.get(), DEADLINE_S)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: bool(condition())), DEADLINE_S)
            except TimeoutError:
                raise AssertionError(
                    f"waited too long for {what}: {self.hellos}, {self.stands}, {self.asked}"
                ) from None

    async def serve(self, connection: ServerConnection) -> None:
        try:
            async for data in connection:
                assert isinstance(data, bytes)
                await self._heard(connection, _decoder.decode(data))
        except ConnectionClosed:
            pass

    async def _heard(self, connection: ServerConnection, message: FromNode) -> None:
        async with self._changed:
            if isinstance(message, PoolHello):
                self.hellos.append(message)
                self._nodes.put_nowait(connection)
            elif isinstance(message, NodeState):
                self.stands.append(message)
            self._changed.notify_all()

    async def answer(self, _: ServerConnection, request: Request) -> Response | None:
        if request.path == "/agent":
            none = Headers({"Content-Length": "0", "Connection": "close"})
            return None if self.status == HTTPStatus.OK else Response(self.status.value, "", none, b"")
        async with self._changed:
            self.asked.append(request.path)
            self._changed.notify_all()
        headers = Headers({"Content-Length": str(len(self.launch)), "Connection": "close", **self.headers})
        return Response(302 if "Location" in self.headers else 200, "", headers, self.launch)


@asynccontextmanager
async def pool_and_node(folder: Path) -> AsyncGenerator[tuple[FakePool, subprocess.Popen[bytes]]]:
    pool = FakePool()
    async with serve(pool.serve, "127.0.0.1", 0, process_request=pool.answer, ping_interval=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        pool.url = f"http://127.0.0.1:{port}"
        settings = {"pool": pool.url, "token": "t", "node": "n0", "folder": str(folder), "shows": False}
        settings |= {"preload": ()}  # No job starts here.
        with (folder / "node.log").open("wb") as log:
            node = subprocess.Popen([sys.executable, "-c", _NODE, json.dumps(settings)], stderr=log)
        try:
            yield pool, node
        finally:
            node.kill()
            await asyncio.to_thread(node.wait, DEADLINE_S)


def run(folder: Path, test: Callable[[FakePool, subprocess.Popen[bytes]], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with pool_and_node(folder) as (pool, node):
            await test(pool, node)

    asyncio.run(all_of_it())


async def say(connection: ServerConnection, message: Any) -> None:
    await connection.send(msgspec.msgpack.encode(message))


def grant(number: int, job: str = "one", version: int = 0, **changes: Any) -> NodeGrant:
    return NodeGrant(term=1, version=version or number, grant=number, job=job if number else "", **changes)


def launch(**changes: Any) -> bytes:
    spec = JobSpec(name="one", script="/nowhere/train.py")
    whole = PooledLaunch(submission=0, spec=spec, token="t", address="/jobs/one/job")
    return msgspec.json.encode(msgspec.structs.replace(whole, **changes))


def in_use(node: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def children(node: subprocess.Popen[bytes]) -> list[str]:
    """Return the command lines of the node's children, except the zygote of its next grant."""
    found: list[str] = []
    for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # The process has just ended.
            deadline = time.monotonic() + 2.0
            while not (words := Path(f"/proc/{pid}/cmdline").read_text()) and time.monotonic() < deadline:
                time.sleep(0.01)  # The process is just starting.
            found.append(words.replace("\0", " "))
    return [words for words in found if "holdfast.control.agent.zygote" not in words]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"x" * (MAX_MESSAGE_BYTES + 1),
        msgspec.msgpack.encode({"type": "NodeGrant", "term": 1, "version": 1, "grant": 1, "job": "../../etc"}),
        msgspec.msgpack.encode({"type": "NodeGrant", "term": 1, "version": 1, "grant": -1, "job": "one"}),
        msgspec.msgpack.encode({"type": "NodeGrant", "term": 1, "version": 1, "grant": 1, "job": "x" * 65}),
        msgspec.msgpack.encode({"type": "StartWorker"}),
    ],
    ids=["empty", "no message", "deep", "large", "a path", "negative", "long", "unknown"],
)
def test_a_node_reconnects_after_an_invalid_message(tmp_path: Path, data: bytes) -> None:
    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        first = await pool.node()
        await first.send(data)
        await pool.node()
        assert [hello.stands for hello in pool.hellos] == [NodeState()] * 2
        assert pool.hellos[0].session == pool.hellos[1].session
        assert node.poll() is None
        assert pool.asked == []

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("answer", "headers"),
    [
        (b"", {}),
        (b"[" * 500_000, {}),
        (b" " * 40_000_000, {}),
        (launch(submission=7), {}),
        (launch(spec=JobSpec(name="other", script="/nowhere/train.py")), {}),
        (launch(address="@127.0.0.1:1/jobs"), {}),
        (launch(address="http://127.0.0.1:1"), {}),
        (launch().replace(b'"name":"one"', b'"name":"../one"'), {}),
        (b"", {"Location": "http://127.0.0.1:1/elsewhere"}),
        (b"\x1f\x8b\x08" + b"\0" * 1000, {"Content-Encoding": "gzip"}),
    ],
    ids=["empty", "deep", "large", "submission", "job", "host", "url", "name", "elsewhere", "packed"],
)
def test_a_launch_that_does_not_match_the_grant_is_not_started(
    tmp_path: Path, answer: bytes, headers: dict[str, str]
) -> None:
    """The node asks again until the grant ends, and keeps nothing of it."""

    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        pool.launch, pool.headers = answer, headers
        connection = await pool.node()
        before = in_use(node)
        await say(connection, grant(1))
        await pool.until(lambda: len(pool.asked) >= 3, "the third request")
        assert set(pool.asked) == {"/jobs/one/launch"}
        assert children(node) == []
        assert in_use(node) - before < MOST_GROWTH
        await say(connection, grant(0, version=2))
        await pool.until(lambda: NodeState(ended=1) in pool.stands, "the grant's end")
        assert node.poll() is None

    run(tmp_path, test)


def test_only_the_newest_of_thousands_of_grants_runs(tmp_path: Path) -> None:
    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        pool.launch = launch()
        connection = await pool.node()
        before = in_use(node)
        for number in range(1, 3001):
            await say(connection, grant(number))
        await say(connection, grant(0, version=3001))
        # Messages older than the newest one are ignored.
        await say(connection, grant(4000, version=1))
        await say(connection, grant(3002, version=3002))
        await pool.until(lambda: pool.stands and pool.stands[-1].runs == 3002, "the newest grant")
        await say(connection, grant(0, version=3003))
        await pool.until(lambda: pool.stands[-1].ended == 3002, "the end of all")
        assert not pool.stands[-1].runs
        assert 4000 not in {stands.runs for stands in pool.stands}
        assert children(node) == []
        assert in_use(node) - before < MOST_GROWTH

    run(tmp_path, test)


def test_a_refused_node_prints_the_reason_and_ends(tmp_path: Path) -> None:
    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        connection = await pool.node()
        await say(connection, PoolRefusal(why="node n0 speaks version 4, and the pool 5: install the same holdfast"))
        assert await asyncio.to_thread(node.wait, DEADLINE_S) == 2
        assert "n0: node n0 speaks version 4" in (tmp_path / "node.log").read_text()

    run(tmp_path, test)


def test_a_new_node_whose_token_is_refused_prints_the_reason_and_ends(tmp_path: Path) -> None:
    """A node that was welcome before stays instead: that pool will come back."""

    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        pool.status = HTTPStatus.UNAUTHORIZED
        assert await asyncio.to_thread(node.wait, DEADLINE_S) == 2
        assert "refuses the token" in (tmp_path / "node.log").read_text()

    run(tmp_path, test)

    async def again(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        connection = await pool.node()
        await say(connection, grant(0, version=1))
        pool.status = HTTPStatus.UNAUTHORIZED
        connection.transport.abort()
        await asyncio.sleep(0.5)
        pool.status = HTTPStatus.OK
        await pool.node()
        assert node.poll() is None
        assert (pool.hellos[-1].term, pool.hellos[-1].version) == (1, 1)

    run(tmp_path, again)


def test_a_node_reports_that_a_missing_script_has_appeared(tmp_path: Path) -> None:
    async def test(pool: FakePool, node: subprocess.Popen[bytes]) -> None:
        script = tmp_path / "train.py"
        pool.launch = launch(spec=JobSpec(name="one", script=str(script)))
        connection = await pool.node()
        await say(connection, grant(1))
        await pool.until(lambda: pool.asked, "the question what to start")
        await say(connection, grant(0, version=2))
        await pool.until(lambda: NodeState(ended=1) in pool.stands, "the grant's end")
        script.write_text("")
        await pool.until(lambda: NodeState(ended=1, changes=1) in pool.stands, "that it has come")
        assert node.poll() is None

    run(tmp_path, test)
