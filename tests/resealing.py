"""Whoever can write to a checkpoint directory can make a manifest that fits."""

from __future__ import annotations

import hashlib
from pathlib import Path

from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.names import StoredFile, parse_name
from holdfast.storage import LocalStorage


def reseal(checkpoint: Path) -> None:
    """Write a manifest that lists the files of a checkpoint as they are now."""
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != directory.MANIFEST}
    files = [
        StoredFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in found.items()
    ]
    directory.seal(LocalStorage(checkpoint.parent), parse_name(checkpoint.name), files)
