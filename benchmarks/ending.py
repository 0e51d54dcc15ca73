"""Ends a benchmark on SIGTERM (as sent by `timeout`) with an exception, so that the processes it started are ended."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from holdfast.errors import EXIT_ENDED


def end_in_order() -> None:
    """Exit this process with an exception on SIGTERM."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_ENDED)
