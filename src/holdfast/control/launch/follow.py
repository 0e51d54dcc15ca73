"""Reads the events and requests of a launched job from its coordinator, also after restarts of the coordinator."""

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
    """Client of a job's coordinator. It is an async context manager."""

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
        """Yield the events above number `after` as they come, until the coordinator says that no more can follow.

        If it cannot be reached, or is restarted, ask again.
        """
        while True:
            try:
                # One answer for many events: a request for each step would cost both sides milliseconds.
                path = f"/events?after={after}&wait={_WAIT_S}&stream=1"
                async with self._http.stream("GET", path) as answer:
                    async for line in _split_lines(answer.raise_for_status()):
                        event = decode_event(line)
                        after = event.seq
                        yield event
                    if answer.headers.get(END_HEADER) == "1":
                        return
            except (httpx.TransportError, httpx.HTTPStatusError):
                await asyncio.sleep(_PAUSE_S)  # the coordinator is being started

    async def node_requests(self) -> AsyncIterator[tuple[int, str]]:
        """Yield users' requests for nodes as they come, forever, as a number and a name.

        A number of new nodes comes with the name ""; a node that should start again has its name.
        """
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
                await asyncio.sleep(_ENDING_S)  # the answer is empty and early, because the coordinator is ending

    async def shutdown(self, exit_code: int, why: str, *, save: bool = False) -> bool:
        """Request the end of the job with an exit code and a reason, with `save` after a last checkpoint.

        Return whether the coordinator accepts it; False if none answers.
        """
        request = {"exit_code": exit_code, "why": why, "save": save}
        try:
            answer = await self._http.post("/shutdown", json=request, timeout=1.0)
        except httpx.TransportError:
            return False
        return answer.is_success

    async def _get(self, path: str) -> httpx.Response | None:
        """Return the answer to a GET request. If there is no answer, or it is an error, return None after a pause."""
        try:
            answer = await self._http.get(path)
        except httpx.TransportError:
            await asyncio.sleep(_PAUSE_S)  # the coordinator is being started
            return None
        if not answer.is_success:
            await asyncio.sleep(_PAUSE_S)
            return None
        return answer


async def _split_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield complete lines as they come, without their line ends. A last line without a line end is dropped.

    httpx's own method would also split at Unicode's line separators.
    """
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
