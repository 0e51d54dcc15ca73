"""Warnings that unauthenticated peers can cause: the first of a kind at once, later ones as one line with a count."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_S = 10.0
#: Most kinds that are counted separately. All others are counted together.
MAX_KINDS = 64
_OTHERS = "others"


@dataclass(slots=True)
class _Kind:
    since: float
    count: int = 0
    last: str = ""


class CountedLog:
    """Logs warnings from any thread, and for each kind (such as an address) at most one line per interval.

    `flush` logs how many lines were held back. The owner calls it regularly, and at the end with `everything=True`.
    """

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float], interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._monotonic = monotonic
        self._interval_s = interval_s
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def warn(self, kind: str, text: str) -> None:
        """Log a line, or count it if a line of its kind was logged within the interval."""
        if self.is_first(kind, text):
            self._log.warning("%s", text)

    def is_first(self, kind: str, text: str) -> bool:
        """Return whether to log this line now: True for the first line of its kind in an interval.

        Else count it, for `flush`.

        Finished intervals are flushed first. If there are more than `MAX_KINDS` kinds, further ones share one.
        """
        self.flush()
        with self._lock:
            known = self._kinds.get(kind) or (self._kinds.get(_OTHERS) if len(self._kinds) > MAX_KINDS else None)
            if known is not None:
                known.count += 1
                known.last = text
                return False
            self._kinds[kind if len(self._kinds) < MAX_KINDS else _OTHERS] = _Kind(self._monotonic())
            return True

    def flush(self, *, everything: bool = False) -> None:
        """Log how many lines of each kind were left out, with the last one, and start a new interval for the kind.

        Only kinds with a finished interval, or all if `everything` is set. A kind without such lines is forgotten, so
        that its next line is logged at once.
        """
        now = self._monotonic()
        lines: list[tuple[int, float, str]] = []
        with self._lock:
            for name, kind in list(self._kinds.items()):
                seconds = now - kind.since
                if not everything and seconds < self._interval_s:
                    continue
                if kind.count:
                    lines.append((kind.count, seconds, kind.last))
                    self._kinds[name] = _Kind(now)
                else:
                    del self._kinds[name]
        for count, seconds, last in lines:
            self._log.warning("%d more like this in %.0f s, the last: %s", count, seconds, last)


class CountedRecords(logging.Filter):
    """Lets a library's records through once an interval for each format string; the others are counted."""

    def __init__(self, counted: CountedLog) -> None:
        super().__init__()
        self._counted = counted

    def filter(self, record: logging.LogRecord) -> bool:
        """Count warnings and errors. Records of lower levels pass."""
        return record.levelno < logging.WARNING or self._counted.is_first(str(record.msg), record.getMessage())
