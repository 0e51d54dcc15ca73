"""Checks of options that scripts give. A wrong type is refused with the option's name."""

from __future__ import annotations

from numbers import Integral, Real

from holdfast.errors import BadInputError

_SHOWN = 80


def format_value(value: object) -> str:
    """Return a value's repr for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_integers(**given: object) -> None:
    """Check that options, given by name, are integers, of Python or numpy; a bool is not one.

    Raises:
        BadInputError: one is not an integer.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise BadInputError(f"{name} is {value!r}: it must be a whole number")


def check_numbers(**given: object) -> None:
    """Check that options, given by name, are real numbers, of Python or numpy; a bool is not one.

    Raises:
        BadInputError: one is not a number.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadInputError(f"{name} is {value!r}: it must be a number")
