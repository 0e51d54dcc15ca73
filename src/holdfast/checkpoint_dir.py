"""What a checkpoint directory looks like, and whether a checkpoint in it is whole. Knows files only, no torch.

A checkpoint is written under `.writing-STEP-NONCE`, and gets its final name `step-STEP` once the coordinator has
accepted it. Its `manifest.json` lists every file with size and SHA-256, so that one that was cut short is recognised.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import BadInputError, HoldfastError

MANIFEST = "manifest.json"
FORMAT = 1
KEEP = 2

_FINAL = re.compile(r"^step-([0-9]{8,15})$")
_WRITING = re.compile(r"^\.writing-([0-9]{8,15})-[0-9a-f]{1,32}$")
_MAX_MANIFEST_BYTES = 16 << 20


class DamagedCheckpointError(HoldfastError):
    """A checkpoint cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint under its final name."""

    step: int
    name: str


def final_name(step: int) -> str:
    """Return the name of the kept checkpoint of a step."""
    return f"step-{step:08d}"


def writing_name(step: int, nonce: str) -> str:
    """Return the temporary name of a checkpoint; the nonce (hex) is new for each attempt."""
    return f".writing-{step:08d}-{nonce}"


def require_name(name: str) -> str:
    """Return a name that came from elsewhere, if it is one of ours: never a path.

    Raises:
        ValueError: it is not.
    """
    if not (_FINAL.match(name) or _WRITING.match(name)):
        raise ValueError(f"{name!r} is no name of a checkpoint")
    return name


def make_directory(directory: Path) -> None:
    """Make sure that checkpoints can be written to a directory.

    Raises:
        BadInputError: it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"the checkpoint directory {directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BadInputError(f"the checkpoint directory {directory} is not writable")


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """Return all checkpoints under their final names, oldest first; whether they are whole is not looked at."""
    found = []
    for entry in _entries(directory):
        match = _FINAL.match(entry.name)
        if match and entry.is_dir():
            found.append(FoundCheckpoint(step=int(match[1]), name=entry.name))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def write_manifest(checkpoint: Path, step: int) -> int:
    """List all files of a checkpoint that is completely written, force them to disk, and return their size."""
    files = {}
    for path in sorted(_files(checkpoint)):
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        _sync(path)
    text = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)
    manifest = checkpoint / MANIFEST
    manifest.write_text(text)
    _sync(manifest)
    _sync(checkpoint)
    return sum(entry["bytes"] for entry in files.values())


def verify(checkpoint: Path) -> int:
    """Check a checkpoint against its manifest and return its step.

    Raises:
        DamagedCheckpointError: a file is missing, of another size, or has other content; or the manifest itself.
    """
    step, files = _read_manifest(checkpoint)
    for name, (size, digest) in files.items():
        path = checkpoint / name
        try:
            actual = path.stat().st_size
            if actual != size:
                raise DamagedCheckpointError(f"{checkpoint.name}/{name} has {actual} bytes, not {size}: cut short")
            if _digest(path) != digest:
                raise DamagedCheckpointError(f"{checkpoint.name}/{name} has other content than was written")
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint.name}/{name} cannot be read: {error.strerror}") from None
    return step


def keep(directory: Path, name: str, step: int) -> str:
    """Give an accepted checkpoint its final name, durably, and return that. Repeating it does no harm.

    Raises:
        OSError: it is gone, or cannot be renamed.
    """
    final = directory / final_name(step)
    source = directory / require_name(name)
    if final.exists() and source.exists():
        # The same step, written again after a roll-back: the newer one is on the decided lineage.
        shutil.rmtree(final)
    if not final.exists():
        os.replace(source, final)
        _sync(directory)
    return final.name


def prune(directory: Path, *, newest: int = KEEP) -> None:
    """Remove all but the newest checkpoints, and unfinished ones up to the newest one's step."""
    found = find_checkpoints(directory)
    for old in found[: max(0, len(found) - newest)]:
        shutil.rmtree(directory / old.name, ignore_errors=True)
    for entry in _entries(directory):
        match = _WRITING.match(entry.name)
        if match and found and int(match[1]) <= found[-1].step:
            shutil.rmtree(entry, ignore_errors=True)


def _read_manifest(checkpoint: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    path = checkpoint / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} is too large")
        value = json.loads(path.read_text())
        if value["format"] != FORMAT:
            raise DamagedCheckpointError(f"{checkpoint.name} has format {value['format']}: this version reads {FORMAT}")
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in value["files"].items()}
        step = int(value["step"])
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} is no manifest: it was cut short") from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} names a file outside the checkpoint")
    return step, files


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
