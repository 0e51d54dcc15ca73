"""Finds the file of a module that is run in place of a script, without importing anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from msgspec.structs import replace

from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec


def with_script(spec: JobSpec, folder: str) -> JobSpec:
    """Return a job with the file of its module as its script, if it has a module.

    Args:
        folder: searched first for modules, as `python -m` searches the working directory.

    Raises:
        BadInputError: the module does not exist, or the job has a script, too.
    """
    if not spec.module:
        return spec
    if spec.script:
        raise BadInputError(f"script is {spec.script} and module is {spec.module}: give one of them")
    return replace(spec, script=module_file(spec.module, [folder, *sys.path]))


def module_file(name: str, paths: Sequence[str]) -> str:
    """Return the file that `python -m NAME` would run, searched for in `paths` in order.

    Raises:
        BadInputError: the module does not exist.
    """
    found = _find_module_file(name, paths)
    if found is None:
        raise BadInputError(
            f"there is no module {name} of Python in {os.path.abspath(paths[0])} or on its path: "
            "give its name with dots, as `python -m` takes it"
        )
    return found


def _find_module_file(name: str, paths: Sequence[str]) -> str | None:
    """Return the file that `python -m NAME` would run, found without importing any package, or None.

    For a package it is its `__main__` module.
    """
    places: Sequence[str] | None = paths
    known, origin = "", None
    for part in [*name.split("."), "__main__"]:
        if places is None:
            return origin if part == "__main__" else None  # A module that is not a package contains no others.
        known = f"{known}.{part}" if known else part
        spec = PathFinder.find_spec(known, list(places))
        if spec is None:
            return None
        origin, places = spec.origin, spec.submodule_search_locations
    return origin
