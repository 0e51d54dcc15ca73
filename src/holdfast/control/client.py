"""A client of the HTTP API of a coordinator, for commands."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.control.api_types import (
    END_HEADER,
    DrainRequest,
    InjectRequest,
    MoveRequest,
    NodesRequest,
    ShutdownRequest,
    UndrainRequest,
)
from holdfast.control.registry import JobEntry
from holdfast.errors import BadInputError, HoldfastError, RefusedError, UnreachableError
from holdfast.observability.event_lines import decode_event
from holdfast.protocol.events import ReadEvent
from holdfast.protocol.messages.forecast import MoveForecast
from holdfast.protocol.names import MALFORMED

T = TypeVar("T")
#: URL of a server; the coordinator of a pool's job has a path
_URL = re.compile(r"https?://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/jobs/[A-Za-z0-9._-]{1,64}/job)?/?")
_MOST_PORT = 65535
_POLL_S = 20.0
_RETRY_PAUSE_S = 0.2
_NO_SUCH_THING = 404
#: the error for each status code; BadInputError for all others
_REFUSALS: dict[int, type[HoldfastError]] = {_NO_SUCH_THING: UnreachableError, 409: RefusedError, 503: RefusedError}


class UntrustedError(HoldfastError):
    """A server answers, but cannot prove over TLS that it is the coordinator."""


class SilentError(UnreachableError):
    """No server answers. A restarting one may answer soon."""


class _EventNumber(msgspec.Struct):
    """The number of an event in a line of the journal."""

    seq: int


class _Started(msgspec.Struct):
    started: bool = False


class _NodeRequest(msgspec.Struct):
    """A request for more nodes."""

    id: int
    count: int = 0


class _NodeRequests(msgspec.Struct):
    requests: list[_NodeRequest]


class _Forecasts(msgspec.Struct):
    forecast: list[MoveForecast]


class ServerClient:
    """A client of one server, a job's coordinator or a pool. Use it as a context manager.

    All methods raise BadInputError for an invalid request, RefusedError if it cannot be executed now, UnreachableError
    if no server answers or it does not know the node or job, and UntrustedError if TLS fails.
    """

    what = "coordinator"

    def __init__(self, job: JobEntry, *, timeout_s: float = 10.0, clock: Clock | None = None) -> None:
        check_url(self.what, job.url)
        self._job = job
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        verify: ssl.SSLContext | bool = True
        if job.tls_ca:
            try:
                verify = ssl.create_default_context(cafile=job.tls_ca)
            except (OSError, ssl.SSLError) as error:
                raise BadInputError(f"the certificate {job.tls_ca} cannot be used: {error}") from None
        self._http = httpx.Client(
            base_url=job.url,
            headers={"Authorization": f"Bearer {job.token}"},
            timeout=timeout_s,
            verify=verify,
            # Proxies are for external servers; the token must not pass through one.
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _request(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0) -> httpx.Response:
        """Send a request, with `body` as JSON (None: without a body), and return the answer if it is a success.

        Args:
            wait_s: seconds that the server may take longer than usual, because it waits for news.

        Raises:
            UntrustedError: the server cannot prove its identity over TLS.
            SilentError: no server answers.
            UnreachableError, RefusedError, BadInputError: the server refuses, with 404, with 409 or 503, or otherwise.
        """
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = self._http.request(method, path, content=content, timeout=self._timeout_s + wait_s)
        except (httpx.RequestError, UnicodeError) as error:  # UnicodeError: an invalid host name
            if _is_tls_failure(error):
                raise UntrustedError(
                    f"{self._job.url} is not trusted: {error}; give its certificate with --tls-ca"
                ) from None
            raise SilentError(f"no {self.what} answers at {self._job.url}: {error}") from None
        if answer.is_success:
            return answer
        refusal = _REFUSALS.get(answer.status_code, BadInputError)
        raise refusal(f"the {self.what} at {self._job.url} refuses: {_refusal_reason(answer)}")

    def _decode(self, content: bytes, kind: type[T]) -> T:
        """Decode a JSON answer. Raises UnreachableError for other content: the server is not one of holdfast."""
        try:
            return msgspec.json.decode(content, type=kind)
        except MALFORMED:
            raise self._not_holdfast_error() from None

    def _not_holdfast_error(self) -> UnreachableError:
        return UnreachableError(f"the server at {self._job.url} is not a {self.what} of holdfast")


class CoordinatorClient(ServerClient):
    """A client of a job's coordinator."""

    def status(self) -> dict[str, Any]:
        """Return the job's status, decoded from JSON. Raises UnreachableError if another kind of server answers."""
        answer = self._decode(self._request("GET", "/status").content, dict[str, Any])
        if not isinstance(answer.get("job"), str):
            raise self._not_holdfast_error()
        return answer

    def inject(
        self,
        fault: str,
        node: str,
        *,
        worker: int | None = None,
        step: int | None = None,
        phase: str = "",
        times: float = 3.0,
        by_s: float = 3600.0,
    ) -> None:
        """Inject a fault."""
        request = InjectRequest(fault=fault, node=node, worker=worker, step=step, phase=phase, times=times, by_s=by_s)
        self._request("POST", "/inject", request)

    def add_nodes(self, count: int = 1) -> int:
        """Ask the launcher for more nodes, and return the number of the request."""
        answer = self._request("POST", "/nodes", NodesRequest(count=count))
        return self._decode(answer.content, _NodeRequest).id

    def forecast(self, nodes: Sequence[str], to: Sequence[str] = (), *, stays: bool) -> list[MoveForecast]:
        """Return the forecasts for `drain`, or for `move` if `stays`, without draining or moving any node.

        Args:
            nodes: the nodes to drain or move.
            to: the standbys to move to. Ignored for `drain`.
            stays: whether the nodes stay as standbys, as with `move`.
        """
        request = MoveRequest(nodes=tuple(nodes), to=tuple(to), dry_run=True)
        drain = DrainRequest(nodes=tuple(nodes), dry_run=True)
        answer = self._request("POST", "/move", request) if stays else self._request("POST", "/drain", drain)
        return self._decode(answer.content, _Forecasts).forecast

    def drain(self, nodes: Sequence[str]) -> None:
        """Drain nodes. The event `node_left` reports the end for each."""
        self._request("POST", "/drain", DrainRequest(nodes=tuple(nodes)))

    def move(self, nodes: Sequence[str], to: Sequence[str] = ()) -> None:
        """Move nodes: their ranks go to standbys. The event `node_moved` reports the end for each."""
        self._request("POST", "/move", MoveRequest(nodes=tuple(nodes), to=tuple(to)))

    def undrain(self, node: str) -> bool:
        """Allow a quarantined or drained node to rejoin. Return whether its agent will be started again."""
        return self._decode(self._request("POST", "/undrain", UndrainRequest(node=node)).content, _Started).started

    def node_requests(self, after: int, wait_s: float = _POLL_S) -> list[tuple[int, int]]:
        """Return (number, count) of the node requests above `after`, after waiting for one. For the launcher."""
        answer = self._request("GET", f"/node-requests?after={after}&wait={wait_s}", wait_s=wait_s)
        return [(request.id, request.count) for request in self._decode(answer.content, _NodeRequests).requests]

    def checkpoint(self) -> None:
        """Save a checkpoint. The event `checkpoint_saved` reports its end."""
        self._request("POST", "/checkpoint")

    def shutdown(self, exit_code: int, why: str, *, save: bool = False) -> None:
        """End the job. With `save`, save a last checkpoint first."""
        self._request("POST", "/shutdown", ShutdownRequest(exit_code=exit_code, why=why, save=save))

    def events(self, after: int = 0, *, follow: bool = False, patience_s: float = 30.0) -> Iterator[ReadEvent]:
        """Yield the events of the lines that `event_lines` yields."""
        return map(decode_event, self.event_lines(after, follow=follow, patience_s=patience_s))

    def await_event(self, after: int, wait_s: float) -> None:
        """Return once there are events above number `after`, or after `wait_s`."""
        self._request("GET", f"/events?after={after}&wait={wait_s}", wait_s=wait_s)

    def event_lines(self, after: int = 0, *, follow: bool = False, patience_s: float = 30.0) -> Iterator[bytes]:
        """Yield the events above number `after` as JSON lines, up to the newest event, or to the job's end.

        Args:
            after: number of an event.
            follow: whether to wait for later events until the job ends.
            patience_s: while following, seconds without a coordinator after which UnreachableError is raised. Shorter
                absences, such as restarts, are survived. Without `follow` it is raised at once.
        """
        lost_at: float | None = None
        while True:
            wait_s = _POLL_S if follow else 0.0
            try:
                answer = self._request("GET", f"/events?after={after}&wait={wait_s}", wait_s=wait_s)
            except UnreachableError:
                lost_at = self._clock.monotonic() if lost_at is None else lost_at
                if not follow or self._clock.monotonic() - lost_at > patience_s:
                    raise
                time.sleep(_RETRY_PAUSE_S)
                continue
            lost_at = None
            lines = answer.content.splitlines()
            for line in lines:
                after = self._decode(line, _EventNumber).seq
                yield line
            if answer.headers.get(END_HEADER) == "1" or (not follow and not lines):
                return


def check_url(what: str, url: str) -> None:
    """Check that a URL can be the address of a server.

    Args:
        what: "coordinator" or "pool".
        url: the URL.

    Raises:
        BadInputError: it has another form.
    """
    if not _is_url(url):
        raise BadInputError(f"the {what}'s URL is {url!r}: it must be http://HOST:PORT or https://HOST:PORT")


def _is_url(text: str) -> bool:
    """Return whether a text is the http(s) URL of a server, with a port, and no path except that of a pool's job."""
    try:
        return _URL.fullmatch(text) is not None and (httpx.URL(text).port or 0) <= _MOST_PORT
    except httpx.InvalidURL:
        return False


def _is_tls_failure(error: BaseException | None) -> bool:
    """Return whether an error, or an error that led to it, is an SSLError."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def _refusal_reason(answer: httpx.Response) -> str:
    """Return why a server refuses a request: `error` of its JSON answer, else the HTTP status, with advice for 404."""
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        if answer.status_code == _NO_SUCH_THING:
            return "it does not know this resource (HTTP 404); if it is a pool, name the job (-j NAME)"
        return f"HTTP {answer.status_code}"
