"""Quantities as users write them, read in one place."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple, cast, get_args

_DURATION = re.compile(r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-z]*)")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*(?:([kMGT])(i?)B)?")


def parse_duration(text: str) -> float:
    """Return the seconds of a text: a plain number (`90`), or one with a unit: `500ms`, `90s`, `15m`, `4h`, `2d`.

    Raises:
        ValueError: the text is malformed, negative or not finite.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or found[2] not in _SECONDS or not math.isfinite(float(found[1])):
        raise ValueError(f"{text!r} is not a duration")
    return float(found[1]) * _SECONDS[found[2]]


def parse_hours(text: str) -> float:
    """Return the hours of a text: a number of hours (`300`), or with a unit of time: `90m`, `300h`, `40d`.

    Raises:
        ValueError: the text is malformed, negative or not finite.
    """
    found, seconds = _DURATION.fullmatch(text.strip()), parse_duration(text)
    return float(found[1]) if found is not None and not found[2] else seconds / _SECONDS["h"]


def parse_size(text: str) -> float:
    """Return the bytes of a text: a plain number, or one with a unit.

    The units are kB, MB, GB, TB (powers of 1000) and kiB, MiB, GiB, TiB (powers of 1024), in exactly this case.

    Raises:
        ValueError: the text is malformed, or the number is not finite.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not math.isfinite(float(found[1])):
        raise ValueError(f"{text!r} is not a size")
    power = " kMGT".index(found[2]) if found[2] else 0
    return float(found[1]) * (1024 if found[3] else 1000) ** power


WorkUnit = Literal["token", "micro-batch"]


class WorkTime(NamedTuple):
    """Seconds per unit of work."""

    seconds: float
    unit: WorkUnit

    def of(self, unit: WorkUnit) -> float:
        """Return the seconds of a unit, or 0 if they belong to another unit."""
        return self.seconds if unit == self.unit else 0.0


def parse_work_time(text: str) -> WorkTime:
    """Read seconds for each token or each micro-batch: `0.0005/token`, `0.1/micro-batch`; `0` for none.

    Raises:
        ValueError: the text is malformed, negative, or lacks the unit.
    """
    number, slash, unit = text.strip().partition("/")
    seconds = float(number)
    if (unit not in get_args(WorkUnit) and (slash or seconds)) or not 0 <= seconds < math.inf:
        raise ValueError(f"{text!r} is not a time for each token or micro-batch")
    return WorkTime(seconds, cast(WorkUnit, unit or "token"))
