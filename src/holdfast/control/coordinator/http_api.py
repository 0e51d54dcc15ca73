"""The coordinator's HTTP API for people and tools, on the port of the agents."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from holdfast.control.api_types import (
    END_HEADER,
    MAX_WAIT_S,
    DrainRequest,
    InjectRequest,
    MoveRequest,
    NodesRequest,
    ShutdownRequest,
    UndrainRequest,
)
from holdfast.control.coordinator.shell import Shell
from holdfast.control.serving.agent_channel import AgentChannel
from holdfast.control.serving.http import HANDLERS, CrowdedError, error_answer, json_answer, read_body, read_number
from holdfast.coordination.inputs import Drain, InjectFault, MoveNodes, SaveState, Shutdown, Undrain
from holdfast.observability.metrics import CONTENT_TYPE
from holdfast.protocol.messages.forecast import MoveForecast

T = TypeVar("T")
#: the most requests that may wait for events or node requests at a time
MAX_WAITING = 256
_JSON_LINES = "application/x-ndjson"


class NodeRequests:
    """Requests for more nodes, for the launcher that starts them. Their numbers keep growing across coordinators."""

    def __init__(self, *, launched: bool) -> None:
        """Start without requests.

        Args:
            launched: whether a launcher is known to exist. Otherwise one exists as soon as it asks for requests.
        """
        self.launcher_seen = launched
        self._requests: list[dict[str, int | str]] = []
        self._last = 0
        self._new = asyncio.Event()
        self._closed = False

    def add(self, count: int, node: str = "") -> int:
        """Add a request for `count` nodes, or for the node with this name, and return its number.

        The number is at least the unix time in microseconds, so that a later coordinator continues above it.
        """
        self._last = max(self._last + 1, time.time_ns() // 1000)
        self._requests.append({"id": self._last, "count": count, "node": node})
        self._new.set()
        return self._last

    async def read_after(self, number: int, wait_s: float) -> list[dict[str, int | str]]:
        """Return the requests above `number`, after waiting up to `wait_s` for one, unless the server ends.

        The caller is a launcher, which is known to exist from now on.
        """
        self.launcher_seen = True
        found = self._above(number)
        if not found and wait_s > 0 and not self._closed:
            self._new.clear()
            waiter = asyncio.ensure_future(self._new.wait())
            await asyncio.wait((waiter,), timeout=wait_s)
            waiter.cancel()
            found = self._above(number)
        return found

    def close(self) -> None:
        """End all waits, because the server ends."""
        self._closed = True
        self._new.set()

    def _above(self, number: int) -> list[dict[str, int | str]]:
        return [request for request in self._requests if int(request["id"]) > number]


class HttpApi:
    """The routes of a job's coordinator.

    Args:
        shell: the shell of the job's machine.
        status: returns the answer to /status.
        foresee: returns the forecast for a drain or a move.
        requests: the requests for more nodes.
        body_s: seconds that the body of a request may take.
    """

    def __init__(
        self,
        shell: Shell,
        status: Callable[[], Awaitable[dict[str, Any]]],
        foresee: Callable[[Drain | MoveNodes], Awaitable[list[MoveForecast]]],
        requests: NodeRequests,
        body_s: float,
    ) -> None:
        self._shell = shell
        self._status = status
        self._foresee = foresee
        self._requests = requests
        self._body_s = body_s
        self._waiting = 0
        #: set once a client has read the last event
        self.read_to_the_end = asyncio.Event()
        #: whether this coordinator has failed before the end of the job, so that another one may add events
        self.failed = False

    def routes(self) -> list[Route]:
        """Return all HTTP routes."""
        return [
            Route("/status", self.status, methods=["GET"]),
            Route("/events", self.events, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/inject", self.inject, methods=["POST"]),
            Route("/drain", self.drain, methods=["POST"]),
            Route("/move", self.move, methods=["POST"]),
            Route("/undrain", self.undrain, methods=["POST"]),
            Route("/checkpoint", self.checkpoint, methods=["POST"]),
            Route("/shutdown", self.shutdown, methods=["POST"]),
            Route("/nodes", self.add_nodes, methods=["POST"]),
            Route("/node-requests", self.node_requests, methods=["GET"]),
        ]

    async def status(self, request: Request) -> Response:
        """Return the job's status."""
        return json_answer(await self._status())

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self._shell.metrics.exposition(self._shell.now()), media_type=CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        """Return the events above `after` as JSON lines. Without one, wait up to `wait` seconds for it.

        With `stream=1` the answer continues with later events for `wait` seconds. A header tells whether no more can
        follow.

        Raises:
            CrowdedError: too many requests wait already.
        """
        after, wait_s = int(read_number(request, "after", 0)), min(read_number(request, "wait", 0.0), MAX_WAIT_S)
        stream = read_number(request, "stream", 0) > 0
        journal = self._shell.journal
        with self._count_waiting(wait_s):
            await journal.wait_beyond(after, wait_s)
        lines = journal.read(after)
        ended = journal.closed and not self.failed and (not lines or _last_seq(lines) == journal.last_seq)
        if ended:
            self.read_to_the_end.set()
        headers = {END_HEADER: "1" if ended else "0"}
        if stream and not ended:
            return StreamingResponse(self._stream(after, wait_s), media_type=_JSON_LINES, headers=headers)
        return Response(b"".join(lines), media_type=_JSON_LINES, headers=headers)

    async def _stream(self, after: int, seconds: float) -> AsyncIterator[bytes]:
        """Yield the events above `after` as JSON lines as they come, for `seconds`, or until the journal is closed."""
        loop, journal = asyncio.get_running_loop(), self._shell.journal
        until = loop.time() + seconds
        with self._count_waiting():
            while True:
                lines = journal.read(after)
                if lines:
                    after = _last_seq(lines)
                    yield b"".join(lines)
                elif journal.closed or loop.time() >= until:
                    return
                await journal.wait_beyond(after, max(until - loop.time(), 0.0))

    async def inject(self, request: Request) -> Response:
        """Inject a fault."""
        body = await read_body(request, InjectRequest, self._body_s)
        return await self._feed(InjectFault(**msgspec.structs.asdict(body)))

    async def drain(self, request: Request) -> Response:
        """Drain the nodes in the body: their ranks go to standbys or the job shrinks. Answer as soon as that is
        decided.

        In a dry run, only return the forecast. Raises as `_feed`.
        """
        body = await read_body(request, DrainRequest, self._body_s)
        order = Drain(nodes=body.nodes)
        return json_answer({"forecast": await self._foresee(order)}) if body.dry_run else await self._feed(order)

    async def move(self, request: Request) -> Response:
        """Move the ranks of nodes to standbys, which may be named; the nodes stay as standbys. Answer as soon as that
        is decided.

        In a dry run, only return the forecast. Raises as `_feed`.
        """
        body = await read_body(request, MoveRequest, self._body_s)
        order = MoveNodes(nodes=body.nodes, to=body.to)
        return json_answer({"forecast": await self._foresee(order)}) if body.dry_run else await self._feed(order)

    async def undrain(self, request: Request) -> Response:
        """Allow a quarantined or drained node to rejoin.

        If a launcher runs, request that it starts the agent of the node again, and answer so. Raises as `_feed`.
        """
        body = await read_body(request, UndrainRequest, self._body_s)
        answer = await self._feed(Undrain(node=body.node))
        if answer.status_code == 200 and self._requests.launcher_seen:
            self._requests.add(1, body.node)
            return json_answer({"started": True})
        return answer

    async def checkpoint(self, request: Request) -> Response:
        """Save a checkpoint."""
        return await self._feed(SaveState())

    async def shutdown(self, request: Request) -> Response:
        """End the job with the exit code and the reason in the body, with `save` after a last checkpoint."""
        body = await read_body(request, ShutdownRequest, self._body_s)
        return await self._feed(Shutdown(exit_code=body.exit_code, why=body.why, save=body.save))

    async def _feed(self, event: InjectFault | Drain | MoveNodes | Undrain | SaveState | Shutdown) -> Response:
        """Pass a request to the machine, and return the answer: ok, or 503 if this coordinator no longer leads the job.

        Raises:
            RefusedError: the store is unavailable.
            BadInputError, UnreachableError, RefusedError: the machine refuses it.
        """
        self._shell.check_store()
        if not await self._shell.feed(event):
            return error_answer(503, "this coordinator no longer leads the job: repeat the request")
        return json_answer({"ok": True})

    async def add_nodes(self, request: Request) -> Response:
        """Queue a request for nodes for the launcher, and return its number. Answer 409 if no launcher exists."""
        body = await read_body(request, NodesRequest, self._body_s)
        if not self._requests.launcher_seen:
            return error_answer(409, "no `holdfast run` starts nodes for this job: start a node with `holdfast agent`")
        return json_answer({"id": self._requests.add(body.count)})

    async def node_requests(self, request: Request) -> Response:
        """Return the requests for nodes above `after`, after waiting up to `wait` seconds for one. For the launcher.

        Raises:
            CrowdedError: too many requests wait already.
        """
        after, wait_s = read_number(request, "after", 0), read_number(request, "wait", 0.0)
        with self._count_waiting(wait_s):
            return json_answer({"requests": await self._requests.read_after(int(after), min(wait_s, MAX_WAIT_S))})

    @contextlib.contextmanager
    def _count_waiting(self, wait_s: float = 0.0) -> Generator[None]:
        """Count a request as waiting while inside. Requests with `wait_s` of 0 are never refused.

        Raises:
            CrowdedError: too many requests wait already.
        """
        if wait_s > 0 and self._waiting >= MAX_WAITING:
            raise CrowdedError(f"{MAX_WAITING} requests wait already: ask again later, or without waiting")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


def build_app(api: HttpApi, agents: AgentChannel) -> ASGIApp:
    """Return the whole application of a coordinator, without authentication."""
    return Starlette(routes=[*api.routes(), WebSocketRoute("/agent", agents.serve)], exception_handlers=HANDLERS)


def _last_seq(lines: list[bytes]) -> int:
    return msgspec.json.decode(lines[-1], type=_Seq).seq


class _Seq(msgspec.Struct):
    seq: int
