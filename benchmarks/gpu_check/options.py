"""The interface of a check: its options, its figures, and the exceptions that it raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

#: The measurements of a check by name; must be serializable as JSON.
Figures: TypeAlias = dict[str, Any]
Device = Literal["cuda", "cpu"]

#: Exit code of a check that cannot run on this machine.
NOT_POSSIBLE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of one check."""

    device: Device
    #: Whether to use small sizes and few repetitions.
    quick: bool
    #: An empty folder for the check's files.
    folder: Path


class NotPossibleError(Exception):
    """This machine lacks something that the check needs; the message names it."""


class CheckFailedError(Exception):
    """A result is wrong; the message has the value and the bound."""


def require(holds: bool, problem: str) -> None:
    """Raise `CheckFailedError` with this problem unless the condition holds."""
    if not holds:
        raise CheckFailedError(problem)
