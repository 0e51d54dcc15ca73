"""Imports torchtitan's modules by name. torchtitan is optional: if it is missing, the error says how to install it."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from holdfast import BadInputError

#: the only supported version: the integration uses much of torchtitan that is not a stable interface
VERSION = "0.3"
_INSTALL = "pip install 'holdfast[torchtitan]'"


def import_module(name: str) -> Any:
    """Import a module of torchtitan.

    Args:
        name: within the package, as in "models.llama3".

    Raises:
        BadInputError: torchtitan is not installed, has another version, or one of its dependencies is missing.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise BadInputError(f"torchtitan is not installed: {_INSTALL}") from None
    if not f"{found}.".startswith(f"{VERSION}."):
        raise BadInputError(
            f"torchtitan {found} is installed, and holdfast.integrations.torchtitan is for {VERSION}: {_INSTALL}"
        )
    try:
        return importlib.import_module(f"torchtitan.{name}")
    except ImportError as error:
        raise BadInputError(f"torchtitan.{name} cannot be imported ({error}): {_INSTALL}") from error
