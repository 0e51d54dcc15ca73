"""What is refused of a job that a client hands in, whoever that is: our own commands hand in nothing of the kind."""

from __future__ import annotations

import os.path
from typing import Any

import msgspec

from holdfast.documents import keys_of, shorten
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec
from holdfast.storage import is_url

_PATHS = tuple(name.split(".") for name, key in keys_of(JobSpec).items() if key.extra.get("path"))


def check_handed_in(spec: JobSpec) -> None:
    """Refuse a job that no node could start as it is.

    Raises:
        BadInputError: it has no name or script, a path that counts from somebody's folder, or a text that no system
            call takes.
    """
    if not spec.name:
        raise BadInputError('name is "": a job of a pool needs one')
    if not spec.script:
        raise BadInputError('script is "": give the path of a Python file, which is the same on all nodes')
    for parts in _PATHS:
        value: Any = spec
        for part in parts:
            value = getattr(value, part)
        if value and not is_url(value) and not os.path.isabs(value):
            raise BadInputError(
                f"{'.'.join(parts)} is {shorten(value)}: nodes have other folders than you; give it from / on"
            )
    _check_text("", msgspec.to_builtins(spec))


def _check_text(name: str, value: object) -> None:
    if isinstance(value, str) and "\0" in value:
        raise BadInputError(f"{name} is {shorten(value)}: it must hold no NUL")
    if isinstance(value, dict):
        for key, one in value.items():  # pyright: ignore[reportUnknownVariableType]
            _check_text(f"{name}.{key}".lstrip("."), one)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            _check_text(name, one)  # pyright: ignore[reportUnknownArgumentType]
