"""Following a coordinator's events from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
from server_bench import PATIENCE_S, CoordinatorProcess, hello, receive_message, send_message

from holdfast.control.api_types import END_HEADER
from holdfast.control.launch.follow import Follower
from holdfast.protocol.events import JobFailed, JobStarted, NodeLeft, ReadEvent, name_of
from made_events import made

Answer = AsyncIterator[bytes] | int


class _Coordinator(httpx.AsyncBaseTransport):
    """Answers requests in order with prepared responses, and records the requests."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.params["after"])
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, int):
            return httpx.Response(answer)
        if answer is None:
            return httpx.Response(200, headers={END_HEADER: "1"})
        return httpx.Response(200, headers={END_HEADER: "0"}, stream=_Body(answer))


class _Body(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part


async def _parts(*parts: bytes, cut: bool = False) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if cut:
        raise httpx.ReadError("the connection is gone")


def _event(seq: int, why: str = "") -> bytes:
    return msgspec.json.encode(made("job_failed", seq=seq, why=why)) + b"\n"


def _followed(coordinator: _Coordinator) -> list[ReadEvent]:
    async def follow() -> list[ReadEvent]:
        async with Follower("http://test", "t", coordinator) as follower:
            return [event async for event in follower.events()]

    return asyncio.run(follow())


def test_events_are_complete_however_the_stream_is_split() -> None:
    lines = _event(1, why="one\u2028line\x85still") + _event(2) + _event(3)
    coordinator = _Coordinator(_parts(*(lines[place : place + 1] for place in range(len(lines)))))
    events = _followed(coordinator)
    assert [event.seq for event in events] == [1, 2, 3]
    assert isinstance(events[0], JobFailed)
    assert events[0].why == "one\u2028line\x85still"
    assert coordinator.asked == ["0", "3"]


def test_a_lost_connection_neither_drops_nor_repeats_events() -> None:
    half = _event(3)[:5]
    coordinator = _Coordinator(_parts(_event(1), _event(2) + half, cut=True), 503, _parts(_event(3)))
    assert [event.seq for event in _followed(coordinator)] == [1, 2, 3]
    assert coordinator.asked == ["0", "2", "2", "3"]


def test_a_coordinator_streams_all_events_in_one_response(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(request: httpx.Request) -> None:
        asked.append(request.url.path)

    async def follow(coordinator: CoordinatorProcess) -> list[str]:
        seen: list[str] = []
        async with Follower(coordinator.entry.url, coordinator.entry.token) as follower:
            follower._http.event_hooks["request"] = [ask]
            async for event in follower.events():
                seen.append(name_of(event))
                if isinstance(event, JobStarted):
                    await asyncio.to_thread(_come_and_go, coordinator)
                if isinstance(event, NodeLeft):
                    assert await follower.shutdown(0, "enough")
        return seen

    with CoordinatorProcess(tmp_path, nodes=9, launched=True) as coordinator:
        seen = asyncio.run(asyncio.wait_for(follow(coordinator), PATIENCE_S))
        assert coordinator.wait() == 0
    # The job's end may be reported before the node has left.
    assert [name for name in seen if name != "job_finished"] == ["job_started", "failure_detected", "node_left"]
    assert asked == ["/events", "/shutdown", "/events"]  # The last request is told that no event will follow.


def _come_and_go(coordinator: CoordinatorProcess) -> None:
    with coordinator.agent() as agent:
        send_message(agent, hello("n0"))
        receive_message(agent)
