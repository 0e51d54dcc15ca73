"""What a checkpoint directory looks like, and whether a checkpoint in it is whole. Knows files only, no torch.

Each checkpoint is a directory (`checkpoint_names`). Its `manifest.json` lists every file with size and SHA-256, so that
one that was cut short is recognised.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import BadInputError, HoldfastError
from holdfast.protocol.checkpoint_names import FINAL, WRITING, CheckpointName, on_one_lineage, parse_name

MANIFEST = "manifest.json"
FORMAT = 1

_MAX_MANIFEST_BYTES = 16 << 20


class DamagedCheckpointError(HoldfastError):
    """A checkpoint cannot be used; the message says why."""


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


def find_checkpoints(directory: Path) -> list[CheckpointName]:
    """Return all checkpoints under their final names, oldest first; whether they are whole is not looked at."""
    return sorted(name for entry in _entries(directory) if (name := _named(entry, FINAL)) and entry.is_dir())


def intact_checkpoints(directory: Path, damaged: Callable[[DamagedCheckpointError], None]) -> list[CheckpointName]:
    """Return those that can be used, on one lineage, oldest first; tell of each that is damaged, newest first."""
    intact: list[CheckpointName] = []
    for name in reversed(find_checkpoints(directory)):
        try:
            verify(directory / name.final)
        except DamagedCheckpointError as error:
            damaged(error)
            continue
        intact.append(name)
    return on_one_lineage(intact)


def write_manifest(checkpoint: Path, step: int) -> int:
    """List all files of a checkpoint that is completely written, force them to disk, and return their size."""
    files: dict[str, dict[str, int | str]] = {}
    total = 0
    for path in sorted(_files(checkpoint)):
        size = path.stat().st_size
        files[str(path.relative_to(checkpoint))] = {"bytes": size, "sha256": _digest(path)}
        total += size
        _sync(path)
    text = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)
    manifest = checkpoint / MANIFEST
    manifest.write_text(text)
    _sync(manifest)
    _sync(checkpoint)
    return total


def verify(checkpoint: Path) -> int:
    """Check a checkpoint against its manifest and return its step.

    Raises:
        DamagedCheckpointError: a file is missing, of another size, or has other content; or the manifest itself.
    """
    step, files = _read_manifest(checkpoint)
    for name, (size, digest) in files.items():
        path = checkpoint / name
        try:
            actual = _size(path)
            if actual != size:
                raise DamagedCheckpointError(f"{checkpoint.name}/{name} has {actual} bytes, not {size}: cut short")
            if _digest(path) != digest:
                raise DamagedCheckpointError(f"{checkpoint.name}/{name} has other content than was written")
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint.name}/{name} cannot be read: {error.strerror}") from None
        except ValueError:
            raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} names a file {name!r}: none can be") from None
    return step


def keep(directory: Path, name: CheckpointName) -> None:
    """Give an accepted checkpoint its final name, durably. Repeating it does no harm.

    Raises:
        OSError: it is gone, or cannot be renamed.
        DamagedCheckpointError: it is not whole any more.
    """
    final = directory / name.final
    if not final.exists():
        os.replace(directory / name.writing, final)
        _sync(directory)
    verify(final)


def remove(directory: Path, names: Iterable[str]) -> None:
    """Remove these checkpoints, kept or not; one that is gone already is no error.

    Raises:
        ValueError: one is no name of a checkpoint; nothing was removed.
    """
    names = list(names)
    for name in names:
        parse_name(name)
    for name in names:
        shutil.rmtree(directory / name, ignore_errors=True)


def remove_unfinished(directory: Path, before: CheckpointName) -> None:
    """Remove what never got its final name and is older than a kept checkpoint."""
    for entry in _entries(directory):
        name = _named(entry, WRITING)
        if name and name < before:
            shutil.rmtree(entry, ignore_errors=True)


def _read_manifest(checkpoint: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    path = checkpoint / MANIFEST
    try:
        if _size(path) > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} is too large")
        value = json.loads(path.read_text())
        if value["format"] != FORMAT:
            raise DamagedCheckpointError(f"{checkpoint.name} has format {value['format']}: this version reads {FORMAT}")
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in value["files"].items()}
        step = int(value["step"])
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} is no manifest: it was cut short") from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise DamagedCheckpointError(f"{checkpoint.name}/{MANIFEST} names a file outside the checkpoint")
    return step, files


def _named(entry: Path, head: str) -> CheckpointName | None:
    """Return what the name of an entry says, None where it is no checkpoint's, or no such one's."""
    try:
        return parse_name(entry.name) if entry.name.startswith(head) else None
    except ValueError:
        return None


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]


def _size(path: Path) -> int:
    """Return the size of a file; a pipe or a device would be read for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return status.st_size


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
