"""The checkpoint directory: find, write, verify and remove checkpoints. Without torch.

Each checkpoint is a folder (`names`). Its `manifest.json` lists all files with size and SHA-256, so that a truncated
file is noticed. It is written last: a folder without it does not count as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from holdfast.errors import HoldfastError
from holdfast.protocol.checkpoints.names import CheckpointName, StoredFile, newest_lineage, parse_name
from holdfast.storage import Chunk, Storage, error_text

MANIFEST = "manifest.json"
FORMAT = 2

_MAX_MANIFEST_BYTES = 16 << 20
_READ_BYTES = 1 << 20


class DamagedCheckpointError(HoldfastError):
    """A checkpoint cannot be used; the message says why."""


def find_checkpoints(storage: Storage) -> list[CheckpointName]:
    """Return all checkpoints that count, oldest first. They are not verified.

    Raises:
        OSError: the directory cannot be listed.
    """
    return [name for name, complete in list_folders(storage) if complete]


def list_folders(storage: Storage) -> list[tuple[CheckpointName, bool]]:
    """Return all folders of checkpoints, oldest first, and whether each has a manifest.

    Raises:
        OSError: the directory cannot be listed.
    """
    named = sorted(name for entry in storage.entries() if (name := _parse_entry(entry)))
    return [(name, MANIFEST in storage.entries(name.folder)) for name in named]


def find_usable_checkpoints(
    storage: Storage, damaged: Callable[[DamagedCheckpointError], None]
) -> list[CheckpointName]:
    """Return the intact checkpoints, oldest first, without steps that the job has rolled back.

    The contents of files are verified only in local storage.

    Args:
        damaged: called for each damaged checkpoint, newest first.

    Raises:
        OSError: the directory cannot be listed.
    """
    intact: list[CheckpointName] = []
    for name in reversed(find_checkpoints(storage)):
        try:
            verify(storage, name.folder, contents=storage.local)
        except DamagedCheckpointError as error:
            damaged(error)
            continue
        intact.append(name)
    return newest_lineage(intact)


def write_file(storage: Storage, checkpoint: str, name: str, chunks: Iterable[Chunk]) -> StoredFile:
    """Write one file of a checkpoint, and return its entry for the manifest.

    Raises:
        OSError: the file cannot be written.
    """
    digest, size = hashlib.sha256(), 0

    def passing() -> Iterator[Chunk]:
        """Yield the chunks, and add them to the digest and the size."""
        nonlocal size
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    storage.write(f"{checkpoint}/{name}", passing())
    return StoredFile(name=name, bytes=size, sha256=digest.hexdigest())


def seal(
    storage: Storage, name: CheckpointName, files: Sequence[StoredFile], moved: Callable[[], None] = lambda: None
) -> None:
    """Write the manifest, after all files were written, so that the checkpoint counts; then verify it.

    Contents are read only in local storage. May be repeated.

    Args:
        moved: called repeatedly while the files are read.

    Raises:
        OSError: the manifest cannot be written.
        DamagedCheckpointError: the files do not match the manifest.
    """
    listed = {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in sorted(files, key=lambda f: f.name)}
    text = json.dumps({"format": FORMAT, "step": name.step, "files": listed}, indent=1)
    storage.write(f"{name.folder}/{MANIFEST}", [text.encode()])
    verify(storage, name.folder, contents=storage.local, moved=moved)


def verify(
    storage: Storage, checkpoint: str, *, contents: bool = True, moved: Callable[[], None] = lambda: None
) -> int:
    """Check a checkpoint against its manifest and return its step.

    Args:
        contents: read all files; else only their sizes are checked.
        moved: called before each file and while it is read, to report progress.

    Raises:
        DamagedCheckpointError: the manifest or a file is missing or cannot be read, or a file differs in size or
            content.
    """
    step, files = read_manifest(storage, checkpoint)
    for file in files:
        try:
            moved()
            actual = storage.size(f"{checkpoint}/{file.name}")
            if actual != file.bytes:
                raise DamagedCheckpointError(
                    f"{checkpoint}/{file.name} has {actual} bytes, not {file.bytes}: cut short"
                )
            if contents and _digest(storage, f"{checkpoint}/{file.name}", moved) != file.sha256:
                raise DamagedCheckpointError(f"{checkpoint}/{file.name} has other content than was written")
        except OSError as error:
            raise DamagedCheckpointError(f"{checkpoint}/{file.name} cannot be read: {error_text(error)}") from None
    return step


def read_manifest(storage: Storage, checkpoint: str) -> tuple[int, tuple[StoredFile, ...]]:
    """Return the step of a checkpoint, and its files.

    Raises:
        DamagedCheckpointError: the manifest is missing, cannot be read, is malformed, or is of another format.
    """
    try:
        value = json.loads(storage.read(f"{checkpoint}/{MANIFEST}", _MAX_MANIFEST_BYTES))
        if value["format"] != FORMAT:
            raise DamagedCheckpointError(f"{checkpoint} has format {value['format']}: this version reads {FORMAT}")
        listed = [{**entry, "name": name} for name, entry in value["files"].items()]
        step = int(value["step"])
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint}/{MANIFEST} cannot be read: {error_text(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedCheckpointError(f"{checkpoint}/{MANIFEST} is no manifest: it was cut short") from None
    try:
        return step, msgspec.convert(listed, tuple[StoredFile, ...])
    except msgspec.ValidationError as error:
        raise DamagedCheckpointError(f"{checkpoint}/{MANIFEST} names a file that no checkpoint has: {error}") from None


def remove(storage: Storage, names: Iterable[str]) -> None:
    """Remove these checkpoints, sealed or not. A missing one is ignored.

    Raises:
        ValueError: a name is not the name of a checkpoint; nothing was removed.
        OSError: a checkpoint cannot be removed.
    """
    names = list(names)
    for name in names:
        parse_name(name)
    for name in names:
        # The manifest first: a part of a checkpoint must not look complete.
        storage.remove(f"{name}/{MANIFEST}")
        storage.remove(name)


def remove_unfinished(storage: Storage, before: CheckpointName) -> None:
    """Remove unsealed checkpoints of earlier generations than a sealed one's.

    Those of its own generation stay: another thread or node may be sealing one of them right now. The worker that still
    writes one removes it (`CheckpointStore`), or is asked to.

    Raises:
        OSError: the directory cannot be listed, or a folder cannot be removed.
    """
    for name, complete in list_folders(storage):
        if (name.term, name.generation) < (before.term, before.generation) and not complete:
            storage.remove(name.folder)


def _parse_entry(entry: str) -> CheckpointName | None:
    """Return the checkpoint's name, or None if a directory entry is not named like a checkpoint."""
    try:
        return parse_name(entry)
    except ValueError:
        return None


def _digest(storage: Storage, path: str, moved: Callable[[], None]) -> str:
    """Return the SHA-256 of a stored file in hexadecimal; call `moved` after each MiB read."""
    digest = hashlib.sha256()
    with storage.open(path) as file:
        for chunk in iter(partial(file.read, _READ_BYTES), b""):
            digest.update(chunk)
            moved()
    return digest.hexdigest()
