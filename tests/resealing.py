"""An attacker who can write to a checkpoint directory can create a matching manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.names import StoredFile, parse_name
from holdfast.storage import LocalStorage


def reseal(checkpoint: Path) -> None:
    """Write a manifest for the current files of a checkpoint."""
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != directory.MANIFEST}
    files = [
        StoredFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in found.items()
    ]
    directory.seal(LocalStorage(checkpoint.parent), parse_name(checkpoint.name), files)
