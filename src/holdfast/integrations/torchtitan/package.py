"""torchtitan's own modules, imported by name: it is optional, and where it is missing that is said with what to do."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from holdfast import BadInputError

#: the only one that this was written for and tested with: much of what is used here has no promise behind it
VERSION = "0.3"
_INSTALL = "pip install 'holdfast[torchtitan]'"


def module(name: str) -> Any:
    """Import a module of torchtitan.

    Args:
        name: within the package, as in "models.llama3".

    Raises:
        BadInputError: torchtitan is not there, or of another version, or lacks something that it needs.
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
