"""Options that scripts give: one of another type is refused where it comes in, by its name."""

from __future__ import annotations

from numbers import Integral, Real

from holdfast.errors import BadInputError

_SHOWN = 80


def format_value(value: object) -> str:
    """Return a value as an error shows it: as Python writes it, its end left out where that is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_integers(**given: object) -> None:
    """Look at options that must be whole numbers, numpy's among them.

    Raises:
        BadInputError: one is none.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise BadInputError(f"{name} is {value!r}: it must be a whole number")


def check_numbers(**given: object) -> None:
    """Look at options that must be numbers.

    Raises:
        BadInputError: one is none.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadInputError(f"{name} is {value!r}: it must be a number")
