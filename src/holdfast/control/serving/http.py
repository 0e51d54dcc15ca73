"""The HTTP rules of all servers: authentication, reading of bodies, and answers to errors."""

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
from holdfast.control.serving.connection_limits import Address
from holdfast.counted_log import CountedLog
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import MALFORMED

T = TypeVar("T")
#: delay of each refusal, in seconds
REFUSAL_S = 0.1


def _refuse_all(_: bytes) -> bool:
    return False


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCheck:
    """The tokens that a server accepts."""

    #: the token of this server
    token: str
    #: called with the address of each connection that has sent a valid token
    on_authenticated: Callable[[Address | None], None]
    #: log of requests without a valid token
    log: CountedLog
    #: whether /metrics needs no token
    open_metrics: bool
    #: returns whether another `authorization` header is accepted as well; the handlers restrict its use
    accepts_other: Callable[[bytes], bool] = _refuse_all

    def has_access(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether the headers of a request contain any accepted token."""
        return self.has_own_token(headers) or self.accepts_other(_authorization(headers))

    def has_own_token(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether they contain the token of this server."""
        return hmac.compare_digest(_authorization(headers), b"Bearer " + self.token.encode())


class TokenGate:
    """Passes on only requests with an accepted token, before anything of them is parsed."""

    def __init__(self, app: ASGIApp, gate: TokenCheck) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has an accepted token, and report its connection as authenticated.

        /metrics may need none. Answer other requests 401 after a delay, and end their connection.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._gate.has_access(scope["headers"]):
            self._gate.on_authenticated(scope["client"])
            await self._app(scope, receive, send)
            return
        if self._gate.open_metrics and scope["type"] == "http" and scope["path"] == "/metrics":
            await self._app(scope, receive, _with_close_header(send))
            return
        host = scope["client"][0] if scope["client"] else "an unknown address"
        self._gate.log.warn(f"{host} token", f"a request from {host} without a valid token is refused")
        # This limits guesses of tokens: the connection limit, divided by this delay, answers per second.
        await asyncio.sleep(REFUSAL_S)
        await error_answer(401, "the token is missing or wrong")(scope, receive, _with_close_header(send))


def _with_close_header(send: Send) -> Send:
    """Return a `send` that adds a header to the answer: no further request can use the connection."""

    async def closing(message: Message) -> None:
        """Send a message of the answer; its start gets the header."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


class CrowdedError(Exception):
    """Too many requests wait. The message contains their number."""


async def _on_crowded(request: Request, error: Exception) -> Response:
    return error_answer(503, str(error))


async def _on_unreachable(request: Request, error: Exception) -> Response:
    return error_answer(404, str(error))


async def _on_refused(request: Request, error: Exception) -> Response:
    return error_answer(409, str(error))


async def _on_bad_input(request: Request, error: Exception) -> Response:
    # The rest of a request that was refused half-read is not read.
    return error_answer(400, str(error), {"connection": "close"})


def json_answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def error_answer(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=headers)


def read_number(request: Request, name: str, default: float) -> float:
    """Return a query parameter as a number, or the default if it is missing.

    Raises:
        BadInputError: it is not a number between 0 and 1e18.
    """
    text = request.query_params.get(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise BadInputError(f"{name} is {text!r}: it must be a number of at least 0")
    return number


async def read_body(request: Request, kind: type[T], limit_s: float) -> T:
    """Read and decode a JSON body of at most `MAX_BODY_BYTES`, within `limit_s`. An empty body counts as `{}`.

    Raises:
        BadInputError: it is too large, too slow or malformed.
    """
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


#: the answers to the exceptions of holdfast
HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    BadInputError: _on_bad_input,
    UnreachableError: _on_unreachable,
    RefusedError: _on_refused,
    CrowdedError: _on_crowded,
}
