"""Requests to a pool that are repeated while its server restarts, or while its store cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.cli.output import warn
from holdfast.control.client import SilentError
from holdfast.errors import RefusedError

T = TypeVar("T")

#: seconds between two requests
POLL_S = 0.2
#: After this many seconds without an answer, the server counts as gone.
SILENCE_LIMIT_S = 30.0


def retry_query(query: Callable[[], T]) -> T:
    """Repeat a query until the pool answers, and return the result.

    If the pool's store is away, warn once and wait for it.

    Raises:
        UnreachableError: the pool has not answered for `SILENCE_LIMIT_S`. Other errors as `query`.
    """
    until = time.monotonic() + SILENCE_LIMIT_S
    has_warned = False
    while True:
        try:
            return query()
        except SilentError:
            if time.monotonic() > until:
                raise
        except RefusedError as error:  # A query is only refused if the store is away.
            until = time.monotonic() + SILENCE_LIMIT_S
            if not has_warned:
                warn(f"holdfast: {error}")
            has_warned = True
        time.sleep(POLL_S)


def retry_request(request: Callable[[], T]) -> T:
    """Repeat a request until the pool answers, and return the answer. It must be harmless if it arrives twice.

    Raises:
        UnreachableError: the pool has not answered for `SILENCE_LIMIT_S`. Other errors as `request`.
    """
    until = time.monotonic() + SILENCE_LIMIT_S
    while True:
        try:
            return request()
        except SilentError:
            if time.monotonic() > until:
                raise
        time.sleep(POLL_S)
