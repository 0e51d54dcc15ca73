"""A benchmark that is told to end (SIGTERM, as `timeout` does) leaves by an exception: what it has started ends."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from holdfast.errors import EXIT_ENDED


def end_in_order() -> None:
    """Have SIGTERM end this process so."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_ENDED)
