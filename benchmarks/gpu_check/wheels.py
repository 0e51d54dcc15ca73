"""Makes the packages in a folder of wheels importable without pip: a wheel is an archive of a package's files."""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu_check.options import NotPossibleError

_REMEDY = "collect the wheels for this machine with benchmarks/gpu_wheels.sh"


def unpack_wheels(wheels: Path, target: Path) -> int:
    """Unpack all wheels of a folder into another one; return their number.

    Raises:
        NotPossibleError: the folder has no wheels, or one is broken or for another machine.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        problem = "the folder has no wheels" if wheels.is_dir() else "the folder does not exist"
        raise NotPossibleError(f"--wheels {wheels}: {problem}; {_REMEDY}")
    for wheel in found:
        if not _fits_here(wheel):
            here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
            raise NotPossibleError(f"--wheels: {wheel} is not for {here}; {_REMEDY}")
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise NotPossibleError(f"--wheels: {wheel} cannot be unpacked: {error}; {_REMEDY}") from None
    return len(found)


def _fits_here(wheel: Path) -> bool:
    """Return whether the tags in a wheel's name, `NAME-VERSION-PYTHON-ABI-PLATFORM`, match this machine."""
    *_, abi, system = wheel.stem.split("-")
    of_this_python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    is_for_python = bool({"none", "abi3", of_this_python}.intersection(abi.split(".")))
    is_for_system = system == "any" or ("linux" in system and platform.machine() in system)
    return is_for_python and is_for_system
