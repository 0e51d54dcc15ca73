"""Reads the tensors of a checkpoint without running anything that a checkpoint says.

torch keeps what it wrote where in a pickle (`.metadata`), and reading a pickle runs what it names. Whoever can write to
the checkpoint directory could name anything. So nothing of torch's is made by that pickle: the few names that torch
writes there stand for inert records, every other name is refused, and what the records hold is checked before torch
gets it. The tensors' bytes are read with torch's own restricted reader (`weights_only`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - part of the format all the same
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.protocol.checkpoint_dir import DamagedCheckpointError

_dcp: Any = checkpoint  # which is not typed

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 << 20
_MAX_DIMENSIONS = 64

#: what reading a pickle raises where the bytes are none
_MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
)

T = TypeVar("T")


class _Record:
    """Stands for an object in the pickle: keeps what it is given, and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Properties(_Record): ...


class _Chunk(_Record): ...


class _Size(_Record): ...


class _Index(_Record): ...


class _Place(_Record): ...


_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED: dict[tuple[str, str], object] = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): _Metadata,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Properties,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _Place,
    ("torch", "Size"): _Size,
    # written, and of no use here: how tensors lay in memory, and where and by whom the checkpoint was made
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    **{(module, f"{kind}Path"): _Record for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{("torch", str(kind)[6:]): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
}


class _RefusedError(Exception):
    """The metadata is none that torch writes; the message says why."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _ALLOWED.get((module_name, global_name))
        if found is None:
            raise _RefusedError(f"it names {module_name}.{global_name}, which no checkpoint needs")
        return found


class _Reader(FileSystemReader):
    """torch's reader, given metadata that was read and checked before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)  # pyright: ignore[reportUnknownMemberType] - torch leaves one argument untyped
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def load_tensors(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors, by name, with what a checkpoint holds; the caller has verified its files.

    Raises:
        DamagedCheckpointError: it holds something else, or something that is not read. Some tensors may be filled.
    """
    metadata = read_metadata(checkpoint)
    try:
        with torch.no_grad():
            _dcp.load(dict(tensors), storage_reader=_Reader(checkpoint, metadata), no_dist=True)
    except CheckpointException as error:
        why = first_cause(error)
        raise DamagedCheckpointError(f"{checkpoint.name}: its tensors cannot be read: {why}") from None


def first_cause(error: CheckpointException) -> str:
    """Return a line that says why, without torch's advice to read it all the same."""
    cause = next(iter(error.failures.values()))[0]
    named = re.search(r"GLOBAL (\S+)", str(cause))
    if named is not None:
        return f"one names {named[1]}, which no tensor needs"
    if isinstance(cause, pickle.UnpicklingError):
        return "one is no tensor"
    return str(cause).partition("\n")[0] or type(cause).__name__


def read_metadata(checkpoint: Path) -> Metadata:
    """Return torch's description of the tensors in a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, or not one that this version writes.
    """
    path = checkpoint / METADATA
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise _RefusedError(f"it is larger than {_MAX_METADATA_BYTES} bytes")
        with path.open("rb") as file:
            return _metadata(_Unpickler(file).load())
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint.name}/{METADATA} cannot be read: {error.strerror}") from None
    except _RefusedError as error:
        raise DamagedCheckpointError(f"{checkpoint.name}/{METADATA} is refused: {error}") from None
    except _MALFORMED as error:
        raise DamagedCheckpointError(f"{checkpoint.name}/{METADATA} is no metadata: {error}") from None


def _metadata(read: object) -> Metadata:
    fields = _fields(read, _Metadata)
    tensors, places = _mapping(fields.get("state_dict_metadata")), _mapping(fields.get("storage_data"))
    return Metadata(
        state_dict_metadata={_typed(name, str): _tensor(str(name), tensor) for name, tensor in tensors.items()},
        storage_data={_index(index): _place(place) for index, place in places.items()},
        storage_meta=StorageMeta(),
        version=None,
    )


def _tensor(name: str, read: object) -> TensorStorageMetadata:
    if not isinstance(read, _Tensor):
        # Where something else is said to lie, torch reads another pickle: without any restriction.
        raise _RefusedError(f"{name} is no tensor")
    fields = _fields(read, _Tensor)
    properties = _typed(fields.get("properties"), _Properties).state
    if not isinstance(properties, tuple) or not properties or not isinstance(properties[0], torch.dtype):
        raise _RefusedError(f"{name} has no type")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=properties[0]),
        size=_size(fields.get("size")),
        chunks=[_chunk(chunk) for chunk in cast(list[object], _typed(fields.get("chunks"), list))],
    )


def _chunk(read: object) -> ChunkStorageMetadata:
    fields = _fields(read, _Chunk)
    return ChunkStorageMetadata(offsets=_size(fields.get("offsets")), sizes=_size(fields.get("sizes")))


def _index(read: object) -> MetadataIndex:
    fields = _fields(read, _Index)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields.get("fqn"), str),
        offset=None if offset is None else _size(offset),
        index=None if index is None else _count(index),
    )


def _place(read: object) -> _StorageInfo:
    fields = _fields(read, _Place)
    path = _typed(fields.get("relative_path"), str)
    if "/" in path or "\\" in path or "\0" in path or path in ("", ".", ".."):
        raise _RefusedError(f"it names the file {path!r}, which lies outside the checkpoint")
    if fields.get("transform_descriptors"):
        raise _RefusedError("its tensors are encoded in a way that no checkpoint of ours is")
    return _StorageInfo(path, _count(fields.get("offset")), _count(fields.get("length")))


def _size(read: object) -> torch.Size:
    arguments = _typed(read, _Size).arguments
    sizes = arguments[0] if len(arguments) == 1 else None
    if not isinstance(sizes, tuple | list) or len(cast(Sequence[object], sizes)) > _MAX_DIMENSIONS:
        raise _RefusedError("a size is no tuple of numbers")
    return torch.Size([_count(size) for size in cast(Sequence[object], sizes)])


def _count(read: object) -> int:
    if not isinstance(read, int) or not 0 <= read < 1 << 62:
        raise _RefusedError(f"a {type(read).__name__} stands where a size belongs, or it is out of all bounds")
    return read


def _fields(read: object, kind: type[_Record]) -> dict[str, object]:
    return cast(dict[str, object], _mapping(_typed(read, kind).state))


def _mapping(value: object) -> dict[object, object]:
    return cast(dict[object, object], _typed(value, dict))


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _RefusedError(f"a {type(value).__name__} stands where a {kind.__name__.strip('_')} belongs")
    return value
