"""Calls of etcd's JSON gateway (v3), which every etcd since 3.4 has on its clients' port.

By httpx, which holdfast has anyway: the gateway needs three calls of it, and the etcd clients for Python know one
endpoint only.
"""

from __future__ import annotations

from typing import TypeVar

import httpx
import msgspec

from holdfast.control.store.etcd_place import EtcdPlace
from holdfast.control.store.interface import StoreAwayError, StoreError

T = TypeVar("T")

#: seconds for a connection, and for an answer: etcd itself gives a request up after 5 s and twice the election's time
CONNECT_S = 2.0
ANSWER_S = 8.0

#: gRPC's codes for what no later try changes: INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, UNAUTHENTICATED
_DENIED, _UNAUTHENTICATED = 7, 16
_REFUSALS = (3, _DENIED, 12, _UNAUTHENTICATED)
#: what etcd says (as INVALID_ARGUMENT) to a token of before its users or roles were changed
_OLD_TOKEN = "revision of auth store is old"

#: what httpx raises when the server has closed a kept connection meanwhile, as one that was started again has
_STALE = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class EtcdRefusalError(StoreError):
    """Etcd refuses the request. A repetition does not help; its administrator may."""


class _Problem(msgspec.Struct):
    code: int
    message: str = ""
    #: it is about who asks, not about what
    of_user: bool = False


class _Session(msgspec.Struct):
    token: str


class EtcdGateway:
    """The members of one etcd. Any member may answer; the last one that answered is asked first.

    Its methods may be called by one thread at a time.

    Etcd ends a user's session after five idle minutes, or when a member restarts. Then the session is opened again, and
    the refused request is repeated. If etcd once accepted the user and does not now, it counts as unreachable:
    passwords and roles are changed by hand, and may be right again soon.

    Args:
        place: addresses, prefix and credentials.
        answer_s: most seconds for an answer.

    Raises:
        BadInputError: a certificate cannot be used.
    """

    def __init__(self, place: EtcdPlace, answer_s: float = ANSWER_S) -> None:
        self._place = place
        self._endpoints = list(place.endpoints)
        self._session = ""
        self._was_in = False
        # Proxies are for the world outside.
        timeout = httpx.Timeout(answer_s, connect=min(CONNECT_S, answer_s))
        self._http = httpx.Client(timeout=timeout, verify=place.trust(), trust_env=False)

    def call(self, path: str, request: object, kind: type[T]) -> T:
        """Ask the members in turn until one answers.

        A request may be carried out more than once, so a repetition must be harmless.

        Args:
            path: below `/v3/`.
            request: encoded by msgspec; bytes become base64, as the gateway expects.
            kind: type of the decoded answer.

        Raises:
            StoreAwayError: no member answers, or all refuse a user that was accepted before; the request may or may not
                have been carried out.
            EtcdRefusalError: etcd refuses the request, or its user.
            StoreError: the server is not an etcd.
        """
        content, failures = msgspec.json.encode(request), list[str]()
        for endpoint in tuple(self._endpoints):
            try:
                reply = self._ask(endpoint, path, content)
            except httpx.TransportError as error:
                failures.append(f"{endpoint}: {str(error) or type(error).__name__}")
                continue
            if isinstance(reply, _Problem):
                why = f"{reply.message}{self._remedy(reply)}"
                if reply.code in _REFUSALS and not (self._was_in and reply.of_user):
                    raise EtcdRefusalError(f"etcd at {endpoint} refuses: {why}")
                failures.append(f"{endpoint}: {why}")
                continue
            self._was_in = True
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            return _decode(endpoint, reply, kind)
        raise StoreAwayError(f"etcd does not answer: {'; '.join(failures)}")

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        self._http.close()

    def _ask(self, endpoint: str, path: str, content: bytes) -> httpx.Response | _Problem:
        """Send a request to one member, and return its answer or its problem.

        If there is a user, log in first. If the session has expired, log in again and repeat the request once. Raises
        as `_post`.
        """
        if self._place.user and not self._session and (problem := self._log_in(endpoint)):
            return problem
        reply = self._post(endpoint, path, content)
        if isinstance(reply, _Problem) and self._place.user and _has_expired(reply):
            return self._log_in(endpoint) or self._post(endpoint, path, content)
        return reply

    def _log_in(self, endpoint: str) -> _Problem | None:
        """Open a session with the user's password. Return the problem if the password cannot be read or etcd refuses
        it, else None.

        Raises as `_post`.
        """
        self._session = ""
        try:
            password = self._place.password()
        except (OSError, ValueError) as error:
            return _Problem(_UNAUTHENTICATED, str(getattr(error, "strerror", None) or error), of_user=True)
        who = {"name": self._place.user, "password": password}
        reply = self._post(endpoint, "auth/authenticate", msgspec.json.encode(who))
        if isinstance(reply, _Problem):
            reply.of_user = True
            return reply
        self._session = _decode(endpoint, reply, _Session).token
        return None

    def _remedy(self, problem: _Problem) -> str:
        """Return text for the end of a problem's message: what to do, or which user was refused. "" without advice."""
        place = self._place
        if not place.user:
            return "; give ?user=NAME&password_file=FILE" if "user name is empty" in problem.message else ""
        if problem.code == _DENIED:
            return f"; grant a role of user {place.user} to read and write the prefix {place.prefix}/"
        return f" (user {place.user}, with the password in {place.password_file})"

    def _post(self, endpoint: str, path: str, content: bytes) -> httpx.Response | _Problem:
        """Send a request to one member in the present session, and return its answer or its problem.

        Repeat it once if the server has closed the kept connection.

        Raises:
            httpx.TransportError: the member does not answer.
            StoreError: it is not an etcd.
        """
        url, headers = f"{endpoint}/v3/{path}", {"Content-Type": "application/json"}
        if self._session:
            headers["Authorization"] = self._session
        try:
            reply = self._http.post(url, content=content, headers=headers)
        except _STALE:
            reply = self._http.post(url, content=content, headers=headers)
        if reply.is_success:
            return reply
        problem = _decode(endpoint, reply, _Problem)
        problem.of_user = problem.code in (_DENIED, _UNAUTHENTICATED)
        return problem


def _has_expired(problem: _Problem) -> bool:
    """Return whether a session has ended, so that a new session may succeed."""
    return problem.code == _UNAUTHENTICATED or _OLD_TOKEN in problem.message


def _decode(endpoint: str, reply: httpx.Response, kind: type[T]) -> T:
    """Decode a JSON answer. Raises StoreError for other content: no etcd answers at the endpoint."""
    try:
        # Not strict, because the gateway writes numbers of 64 bits as strings.
        return msgspec.json.decode(reply.content, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise StoreError(
            f"what answers at {endpoint} is no etcd of version 3.4 or newer (HTTP {reply.status_code}): give the URL "
            "of its clients' port"
        ) from None
