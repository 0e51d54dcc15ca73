"""Files of tensors in the safetensors format: the length of the header, the header in JSON, then the bytes.

All readers of safetensors can read these files. A file may have only a box of a tensor: some rows, or some columns of
some rows. Then its header contains the offset in the format of `torch.distributed.checkpoint`, so that its
HuggingFaceStorageReader reads a folder of such files as one state. If several workers of a node share a tensor (a
layout), the header also contains the whole shape. No content is executed, and the header is checked before use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError

SUFFIX = ".safetensors"
#: bytes of an element, by the type names of the format
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
#: the type names of the format, by type of torch
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
#: keys under which torch finds the offset of each tensor
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
#: whole shapes, by name of the tensor
_WHOLE = "holdfast whole shapes"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """A box of a tensor, or all of it.

    code: the format's name of its type. whole: the tensor's shape, () where it is not said. begin: where the bytes lie,
    counted from behind the header.
    """

    name: str
    code: str
    box: Box
    whole: tuple[int, ...] = ()
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.box.size * ITEM_BYTES[self.code]


def make_header(pieces: Sequence[StoredPiece]) -> bytes:
    """Return the bytes before the first tensor: the header's length, then the header, padded to 8 bytes.

    It describes the type, shape and position of each piece, its offset in the whole tensor and, if given, the whole
    shape.

    Raises:
        ValueError: the pieces do not follow each other without a gap in this order, or two have one name.
    """
    end = 0
    described: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    for piece in pieces:
        if piece.begin != end or piece.name in described:
            raise ValueError(f"{piece.name} begins at {piece.begin}, not at {end}, or is there twice")
        end += piece.nbytes
        described[piece.name] = {"dtype": piece.code, "shape": piece.box.shape, "data_offsets": (piece.begin, end)}
        offsets[piece.name] = {_OFFSETS: piece.box.offset}
    about = {"format": "pt", _SHARDING: json.dumps(offsets)}
    if whole := {piece.name: piece.whole for piece in pieces if piece.whole}:
        about[_WHOLE] = json.dumps(whole)
    text = json.dumps({"__metadata__": about, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(file: BinaryIO, size: int, name: str) -> tuple[tuple[StoredPiece, ...], int]:
    """Return the pieces of a file with `size` bytes, and the offset of its first tensor.

    Args:
        name: the file's name in error messages.

    Raises:
        DamagedCheckpointError: the file is not in this format, or is inconsistent.
        OSError: the file cannot be read.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise DamagedCheckpointError(f"{name} holds no tensors: its header has {length} bytes")
    try:
        said = cast(dict[str, Any], json.loads(file.read(length)))
        about = said.pop("__metadata__", {})
        first: Any = json.loads(about[_SHARDING]) if _SHARDING in about else {}
        whole: Any = json.loads(about[_WHOLE]) if _WHOLE in about else {}
        pieces = tuple(sorted((_piece(one, said[one], first, whole) for one in said), key=lambda piece: piece.begin))
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


def _piece(name: str, said: Any, first: Any, whole: Any) -> StoredPiece:
    """Return a piece from its entry `said` in a header. `first` has the offsets and `whole` the whole shapes, by name.

    Without an offset, the piece starts at the first element. Raises `ValueError`, `KeyError` or `TypeError` for an
    unknown type, or if dimensions, the whole shape or the number of bytes do not fit.
    """
    code, shape = str(said["dtype"]), _counts(said["shape"])
    if code not in ITEM_BYTES or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has the type {code!r} and {len(shape)} dimensions")
    begin, end = _counts(said["data_offsets"])
    offset = _counts(first[name][_OFFSETS]) if name in first else (0,) * len(shape)
    if len(offset) != len(shape):
        raise ValueError(f"{name!r} has {len(shape)} dimensions, and begins at {len(offset)}")
    box, all_of = Box(offset, shape), _counts(whole[name]) if name in whole else ()
    if all_of and not box.fits_into(all_of):
        raise ValueError(f"{name!r} is of the shape {all_of}, and has {shape} from {offset} on")
    piece = StoredPiece(name=name, code=code, box=box, whole=all_of, begin=begin)
    if end - begin != piece.nbytes:
        raise ValueError(f"{name!r} has {end - begin} bytes, not {piece.nbytes}")
    return piece


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: object) -> int:
    """Return the value; raise `ValueError` unless it is an integer from 0 to 2**62 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} stands where a size belongs")
    return value
