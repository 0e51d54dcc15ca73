"""HTTP as all servers here speak it: who gets in, how bodies are read, what errors are answered with."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.control.api_types import MAX_BODY_BYTES
from holdfast.control.serving.doorkeeper import Address
from holdfast.counted_log import CountedLog
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import MALFORMED

T = TypeVar("T")
#: how long a refusal takes
REFUSAL_S = 0.1


def _nobody(_: bytes) -> bool:
    return False


def _given(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCheck:
    """Who gets in. known: told whose connection has shown the token. log: of those who have not.

    others: tells whether somebody who shows another one gets in as well; what is open to that one others decide.
    """

    token: str
    known: Callable[[Address | None], None]
    log: CountedLog
    open_metrics: bool
    others: Callable[[bytes], bool] = _nobody

    def shown(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request's headers show a token with which one gets in."""
        return self.owns(headers) or self.others(_given(headers))

    def owns(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether they show this server's own."""
        return hmac.compare_digest(_given(headers), b"Bearer " + self.token.encode())


class TokenGate:
    """Lets only requests with the token through, before anything of them is parsed."""

    def __init__(self, app: ASGIApp, gate: TokenCheck) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._gate.shown(scope["headers"]):
            self._gate.known(scope["client"])
            await self._app(scope, receive, send)
            return
        if self._gate.open_metrics and scope["type"] == "http" and scope["path"] == "/metrics":
            await self._app(scope, receive, _closing(send))
            return
        host = scope["client"][0] if scope["client"] else "somebody"
        self._gate.log.warn(f"{host} token", f"a request from {host} without the right token is refused")
        # Whoever tries tokens gets as many answers as there are places for strangers, a few times a second.
        await asyncio.sleep(REFUSAL_S)
        await error_answer(401, "the token is missing or wrong")(scope, receive, _closing(send))


def _closing(send: Send) -> Send:
    """Say that the connection ends with this answer: a stranger's is not kept for another request."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


class CrowdedError(Exception):
    """Too many requests wait; the message says how many."""


async def _crowded(request: Request, error: Exception) -> Response:
    return error_answer(503, str(error))


async def _nowhere(request: Request, error: Exception) -> Response:
    return error_answer(404, str(error))


async def _refused(request: Request, error: Exception) -> Response:
    return error_answer(409, str(error))


async def _bad_input(request: Request, error: Exception) -> Response:
    # Of a request that is refused half-read, nothing more is waited for.
    return error_answer(400, str(error), {"connection": "close"})


def json_answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def error_answer(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=headers)


def number_of(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise BadInputError(f"{name} is {text!r}: it must be a number from 0 on")
    return number


async def body_of(request: Request, kind: type[T], limit_s: float) -> T:
    """Read and check a small JSON body; an empty one is `{}`."""
    data = b""
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise BadInputError(f"the request is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise BadInputError(f"the request did not end within {limit_s:g} s") from None
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except MALFORMED as error:
        raise BadInputError(f"the request is malformed: {error}") from None


#: what the errors of this house are answered with
HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    BadInputError: _bad_input,
    UnreachableError: _nowhere,
    RefusedError: _refused,
    CrowdedError: _crowded,
}
