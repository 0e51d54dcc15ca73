"""Checks jobs that clients submit. The own commands of holdfast never submit an invalid one."""

from __future__ import annotations

import os.path
from typing import Any

import msgspec

from holdfast.documents import keys_of, shorten
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec
from holdfast.storage import is_url

_PATHS = tuple(name.split(".") for name, key in keys_of(JobSpec).items() if key.extra.get("path"))


def check_submission(spec: JobSpec) -> None:
    """Check that any node can start a job as submitted.

    Raises:
        BadInputError: the job has no name or script, a relative path, or a text that no system call accepts.
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
                f"{'.'.join(parts)} is {shorten(value)}: nodes have other folders than you; give an absolute path"
            )
    _check_text("", msgspec.to_builtins(spec))


def _check_text(name: str, value: object) -> None:
    """Refuse NUL in any text of a value and its items. `name` is the key of the value, for the message.

    Raises:
        BadInputError: a text contains it.
    """
    if isinstance(value, str) and "\0" in value:
        raise BadInputError(f"{name} is {shorten(value)}: it must not contain NUL")
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            _check_text(f"{name}.{key}".lstrip("."), item)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _check_text(name, item)  # pyright: ignore[reportUnknownArgumentType]
