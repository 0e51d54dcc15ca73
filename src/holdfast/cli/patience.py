"""Looking at a pool again and again: neither a server that is started again nor a store that is away ends a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.cli.output import warn
from holdfast.control.client import SilentError
from holdfast.errors import RefusedError

T = TypeVar("T")

#: what is waited for is looked at so often
LOOK_AGAIN_S = 0.2
#: for so long a server that is started again is waited for
PATIENCE_S = 30.0


def patiently(look: Callable[[], T]) -> T:
    """Return what a look at a pool finds, once there is somebody to ask; training goes on meanwhile.

    Raises:
        UnreachableError: nobody has answered for half a minute; or as `look`.
    """
    until, said = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return look()
        except SilentError:
            if time.monotonic() > until:
                raise
        except RefusedError as error:  # (who only looks is refused nothing, but where the store is away)
            until = time.monotonic() + PATIENCE_S
            if not said:
                warn(f"holdfast: {error}")
            said = True
        time.sleep(LOOK_AGAIN_S)


def heard(ask: Callable[[], T]) -> T:
    """Return what comes of asking a pool for something that may be asked twice, once there is somebody to ask.

    Raises:
        UnreachableError: nobody has answered for half a minute; or as `ask`.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except SilentError:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_AGAIN_S)
