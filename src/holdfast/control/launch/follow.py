"""The launched job's news, for an event loop: following it outlives restarts, and ends when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from holdfast.control.api_types import END_HEADER
from holdfast.observability.event_lines import decode_event
from holdfast.protocol.events import ReadEvent

_WAIT_S = 20.0
_PAUSE_S = 0.2
_ENDING_S = 1.0


class Follower:
    """One coordinator's news; use as an async context manager."""

    def __init__(self, url: str, token: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_WAIT_S + 10.0,
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Follower:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def events(self, after: int = 0) -> AsyncIterator[ReadEvent]:
        """Yield the events above number `after` until none can follow."""
        while True:
            try:
                # One answer for many events: a request for each step's would cost both sides milliseconds.
                path = f"/events?after={after}&wait={_WAIT_S}&stream=1"
                async with self._http.stream("GET", path) as answer:
                    async for line in _lines(answer.raise_for_status()):
                        event = decode_event(line)
                        after = event.seq
                        yield event
                    if answer.headers.get(END_HEADER) == "1":
                        return
            except (httpx.TransportError, httpx.HTTPStatusError):
                await asyncio.sleep(_PAUSE_S)  # it is being (re)started

    async def node_requests(self) -> AsyncIterator[tuple[int, str]]:
        """Yield the number of nodes that a user adds, or the name of a node that a user lets return."""
        after = 0
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            answer = await self._get(f"/node-requests?after={after}&wait={_WAIT_S}")
            requests: list[dict[str, Any]] = answer.json()["requests"] if answer is not None else []
            for request in requests:
                after = request["id"]
                yield request["count"], request["node"]
            if not requests and loop.time() - asked_at < _WAIT_S / 2:
                await asyncio.sleep(_ENDING_S)  # nothing, and before its time: the coordinator wants to end

    async def shutdown(self, exit_code: int, why: str, *, save: bool = False) -> bool:
        """End the job, `save` after a last checkpoint; False where no coordinator answers."""
        request = {"exit_code": exit_code, "why": why, "save": save}
        try:
            answer = await self._http.post("/shutdown", json=request, timeout=1.0)
        except httpx.TransportError:
            return False
        return answer.is_success

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            answer = await self._http.get(path)
        except httpx.TransportError:
            await asyncio.sleep(_PAUSE_S)  # it is being (re)started
            return None
        if not answer.is_success:
            await asyncio.sleep(_PAUSE_S)
            return None
        return answer


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield whole lines as they come. (httpx's own would cut at Unicode's line separators too.)"""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
