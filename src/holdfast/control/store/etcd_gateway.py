"""Calls of etcd's JSON gateway (v3), which every etcd since 3.4 has on its clients' port.

By httpx, which holdfast has anyway: the gateway needs three calls of it, and the etcd clients for Python know one
endpoint only.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import TypeVar

import httpx
import msgspec

from holdfast.control.store.interface import StoreAwayError, StoreError

T = TypeVar("T")

#: seconds for a connection, and for an answer: etcd itself gives a request up after 5 s and twice the election's time
CONNECT_S = 2.0
ANSWER_S = 8.0

#: gRPC's codes for what no later try changes: INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, UNAUTHENTICATED
_REFUSALS = (3, 7, 12, 16)

#: what httpx raises when the server has closed a kept connection meanwhile, as one that was started again has
_STALE = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class _Problem(msgspec.Struct):
    code: int
    message: str = ""


class EtcdGateway:
    """The members of one etcd, of which any may answer; the one that answered last is asked first.

    Its methods may be called by one thread at a time.

    Args:
        endpoints: URLs of members, http or https. answer_s: how long an answer may take, in seconds.
    """

    def __init__(
        self, endpoints: Sequence[str], verify: ssl.SSLContext | bool = True, answer_s: float = ANSWER_S
    ) -> None:
        self._endpoints = list(endpoints)
        # Proxies are for the world outside.
        timeout = httpx.Timeout(answer_s, connect=min(CONNECT_S, answer_s))
        self._http = httpx.Client(timeout=timeout, verify=verify, trust_env=False)

    def call(self, path: str, request: object, kind: type[T]) -> T:
        """Ask the members in turn until one answers.

        A request that changes something may so be carried out more than once: it must be one that bears that.

        Args:
            path: below `/v3/`. request: what msgspec encodes; bytes go in base64, as the gateway wants them.

        Raises:
            StoreAwayError: none answers now; the request may or may not have been carried out.
            StoreError: etcd refuses the request, or what answers is no etcd.
        """
        content, failures = msgspec.json.encode(request), list[str]()
        for endpoint in tuple(self._endpoints):
            try:
                reply = self._post(f"{endpoint}/v3/{path}", content)
            except httpx.TransportError as error:
                failures.append(f"{endpoint}: {str(error) or type(error).__name__}")
                continue
            if reply.is_success:
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                return _decoded(endpoint, reply, kind)
            problem = _decoded(endpoint, reply, _Problem)
            if problem.code in _REFUSALS:
                raise StoreError(f"etcd at {endpoint} refuses: {problem.message}")
            failures.append(f"{endpoint}: {problem.message}")
        raise StoreAwayError(f"etcd does not answer: {'; '.join(failures)}")

    def close(self) -> None:
        """Let go of the connections; the second call does nothing."""
        self._http.close()

    def _post(self, url: str, content: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        try:
            return self._http.post(url, content=content, headers=headers)
        except _STALE:
            return self._http.post(url, content=content, headers=headers)


def _decoded(endpoint: str, reply: httpx.Response, kind: type[T]) -> T:
    try:
        # (not strict: the gateway writes numbers of 64 bits as strings)
        return msgspec.json.decode(reply.content, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise StoreError(
            f"what answers at {endpoint} is no etcd of version 3.4 or newer (HTTP {reply.status_code}): give the URL "
            "of its clients' port"
        ) from None
