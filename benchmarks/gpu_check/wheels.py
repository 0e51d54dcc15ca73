"""Packages of a folder of wheels made importable without pip: a wheel is an archive of what it installs."""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.gpu_check.options import NotPossibleError


def unpack_wheels(wheels: Path, target: Path) -> int:
    """Unpack all wheels of a folder into another one; return their number.

    Raises:
        NotPossibleError: there are none.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise NotPossibleError(f"--wheels {wheels}: the folder has no wheels; fill it with benchmarks/gpu_wheels.sh")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return len(found)
