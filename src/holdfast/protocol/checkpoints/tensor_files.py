"""Tensors in files, as safetensors has them: the length of a header, the header in JSON, then nothing but bytes.

Whatever reads safetensors reads these files. A file may hold some rows only of a tensor: then it says from which one
on, in the words of `torch.distributed.checkpoint`, whose HuggingFaceStorageReader reads a folder of them as one state.
Nothing in them is ever run; what the header says is checked before anybody believes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from holdfast.protocol.checkpoints.directory import DamagedCheckpointError

SUFFIX = ".safetensors"
#: bytes of an element, by the format's names of types
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
#: those names, of the types of torch that have one
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64
#: where torch looks for the first row, by name of the tensor
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Some rows of a tensor, or all of them.

    code: the format's name of its type. shape: of these rows. first: which row of the tensor the first one is.
    begin: where the bytes lie, counted from behind the header.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    first: int = 0
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Their size."""
        return math.prod(self.shape) * ITEM_BYTES[self.code]


def header_of(pieces: Sequence[StoredRows]) -> bytes:
    """Return what stands before the bytes of these pieces, which follow each other without a gap, in this order.

    Raises:
        ValueError: they do not.
    """
    end = 0
    described: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    for piece in pieces:
        if piece.begin != end or piece.name in described:
            raise ValueError(f"{piece.name} begins at {piece.begin}, not at {end}, or is there twice")
        end += piece.nbytes
        described[piece.name] = {"dtype": piece.code, "shape": piece.shape, "data_offsets": (piece.begin, end)}
        offsets[piece.name] = {_OFFSETS: (piece.first, *(0 for _ in piece.shape[1:]))[: len(piece.shape)]}
    about = {"format": "pt", _SHARDING: json.dumps(offsets)}
    text = json.dumps({"__metadata__": about, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(file: BinaryIO, size: int, name: str) -> tuple[tuple[StoredRows, ...], int]:
    """Return what a file of so many bytes holds, and where its bytes begin.

    Args:
        name: what complaints call it.

    Raises:
        DamagedCheckpointError: it is no such file, or holds something that does not fit.
        OSError: it cannot be read.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise DamagedCheckpointError(f"{name} holds no tensors: its header has {length} bytes")
    try:
        said = cast(dict[str, Any], json.loads(file.read(length)))
        about = said.pop("__metadata__", {})
        first: Any = json.loads(about[_SHARDING]) if _SHARDING in about else {}
        pieces = tuple(sorted((_piece(one, said[one], first) for one in said), key=lambda piece: piece.begin))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{name} holds no tensors: {type(error).__name__}: {error}"[:300]) from None
    end = 0
    for piece in pieces:
        if piece.begin != end:
            raise DamagedCheckpointError(f"{name}: {piece.name} does not lie behind the tensor before it")
        end += piece.nbytes
    if start + end != size:
        raise DamagedCheckpointError(f"{name} has {size} bytes, its tensors {end} behind a header of {start}")
    return pieces, start


def _piece(name: str, said: Any, first: Any) -> StoredRows:
    code, shape = str(said["dtype"]), tuple(_count(size) for size in said["shape"])
    if code not in ITEM_BYTES or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has the type {code!r} and {len(shape)} dimensions")
    begin, end = (_count(place) for place in said["data_offsets"])
    offsets = [_count(place) for place in first[name][_OFFSETS]] if name in first else []
    if any(offsets[1:]):
        raise ValueError(f"{name!r} is cut in another way than by rows")
    piece = StoredRows(name=name, code=code, shape=shape, first=offsets[0] if offsets else 0, begin=begin)
    if end - begin != piece.nbytes:
        raise ValueError(f"{name!r} has {end - begin} bytes, not {piece.nbytes}")
    return piece


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} stands where a size belongs")
    return value
