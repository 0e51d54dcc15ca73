"""Join the parts of a checkpoint into one file with whole tensors. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.protocol.checkpoints.boxes import Box, cover_exactly, split_into_slabs
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.tensor_files import ITEM_BYTES, SUFFIX, StoredPiece, make_header, read_header
from holdfast.storage import Storage, error_text

_READ_BYTES = 4 << 20
#: prefixes of tensors that do not belong to the model
OPTIMIZER, EXTRA, EXPERTS = "optimizer:", "extra:", "experts:"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBox:
    """A box of a tensor, with the file and the offset of its bytes, which are stored row by row."""

    box: Box
    path: str
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeTensor:
    """A tensor with its pieces."""

    piece: StoredPiece
    placed: tuple[PlacedBox, ...]


def is_of_model(name: str) -> bool:
    """Return whether a tensor belongs to the model, and not to its optimizer or to the script's extra state."""
    if name.startswith(EXPERTS):
        return name.count(".") == 2  # layer, expert, weight; the optimizer's tensors have one more
    return not name.startswith((OPTIMIZER, EXTRA))


def read_whole_tensors(storage: Storage, checkpoint: str) -> list[WholeTensor]:
    """Return all tensors of a checkpoint, each with its pieces, without reading their contents. Files of other kinds
    are left out.

    They are sorted by bytes per element (most first), then by name.

    Raises:
        DamagedCheckpointError: a part is missing or malformed, or the pieces of a tensor do not cover it exactly.
    """
    _, files = read_manifest(storage, checkpoint)
    found: dict[str, list[tuple[StoredPiece, PlacedBox]]] = {}
    for file in files:
        path = f"{checkpoint}/{file.name}"
        if not file.name.endswith(SUFFIX):
            continue
        try:
            with storage.open(path) as stream:
                pieces, start = read_header(stream, file.bytes, path)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error_text(error)}") from None
        for piece in pieces:
            placed = PlacedBox(box=piece.box, path=path, offset=start + piece.begin)
            found.setdefault(piece.name, []).append((piece, placed))
    joined = [_join(checkpoint, found[name]) for name in sorted(found)]
    return sorted(joined, key=lambda tensor: -ITEM_BYTES[tensor.piece.code])


def _join(checkpoint: str, found: list[tuple[StoredPiece, PlacedBox]]) -> WholeTensor:
    """Return the tensor of these pieces. If no whole shape is stored, the last ends of the pieces give it.

    Raises `DamagedCheckpointError` if types or shapes differ, or the pieces do not cover it, each element once.
    """
    pieces, placed = zip(*found, strict=True)
    first: StoredPiece = pieces[0]
    boxes = [piece.box for piece in pieces]
    kinds = {(piece.code, piece.whole, len(piece.box.shape)) for piece in pieces}
    ends = zip(*(box.end for box in boxes), strict=True) if len(kinds) == 1 else ()
    whole = first.whole or tuple(map(max, ends))
    if len(kinds) > 1 or not cover_exactly(boxes, whole):
        raise DamagedCheckpointError(f"{checkpoint}: the pieces of {first.name} do not make one tensor")
    return WholeTensor(piece=replace(first, box=Box.of_whole(whole), whole=(), begin=0), placed=placed)


def join_into_file(
    storage: Storage, checkpoint: str, wanted: Callable[[str], bool]
) -> tuple[list[StoredPiece], Iterator[bytes]]:
    """Return the pieces of a file with the whole tensors whose names are `wanted`, and its content.

    The content is a header, then all bytes, which are read from the checkpoint only as it is consumed.

    Raises:
        DamagedCheckpointError: as `read_whole_tensors`; also while the content is read.
    """
    tensors = [tensor for tensor in read_whole_tensors(storage, checkpoint) if wanted(tensor.piece.name)]
    described: list[StoredPiece] = []
    end = 0
    for tensor in tensors:
        described.append(replace(tensor.piece, begin=end))
        end += tensor.piece.nbytes

    def content() -> Iterator[bytes]:
        """Yield the header, then the bytes of each tensor, which are read from storage only now."""
        yield make_header(described)
        for tensor in tensors:
            yield from _read_tensor(storage, tensor)

    return described, content()


def _read_tensor(storage: Storage, tensor: WholeTensor) -> Iterator[bytes]:
    """Yield the bytes of a whole tensor, row by row."""
    item, placed = ITEM_BYTES[tensor.piece.code], [one for one in tensor.placed if one.box.size]
    boxes = [one.box for one in placed]
    if not tensor.piece.box.shape:
        yield from (data for one in placed for data in _read_bytes(storage, one.path, one.offset, item))
        return
    for start, stop, inside in split_into_slabs(boxes, 0):
        beside = _ColumnPieces([placed[number] for number in inside], item)
        at_once = stop - start if len(inside) == 1 else max(1, _READ_BYTES // beside.row_bytes)
        for first in range(start, stop, at_once):
            yield from beside.rows(storage, first, min(at_once, stop - first))


class _ColumnPieces:
    """Pieces of a tensor that have different columns of the same rows."""

    def __init__(self, placed: Sequence[PlacedBox], item: int) -> None:
        """Compute the bytes of a row, in each piece and in total; `item` is the bytes of an element."""
        self._placed = placed
        self._bytes = [math.prod(one.box.shape[1:]) * item for one in placed]
        self._item = item
        self.row_bytes = sum(self._bytes)

    def rows(self, storage: Storage, first: int, count: int) -> Iterator[bytes]:
        """Yield the bytes of `count` rows of the tensor from row `first` on.

        The rows of one piece are read in chunks. Rows of several pieces are put together in memory, in one chunk.
        """
        found = [
            _read_bytes(storage, one.path, one.offset + (first - one.box.offset[0]) * size, count * size)
            for one, size in zip(self._placed, self._bytes, strict=True)
        ]
        if len(found) == 1:
            yield from found[0]
            return
        parts = [memoryview(b"".join(chunks)) for chunks in found]
        runs = [(parts[number], self._bytes[number], start, length) for number, start, length in self._runs]
        yield b"".join(
            part[row * size + start : row * size + start + length]
            for row in range(count)
            for part, size, start, length in runs
        )

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """The parts of a row, in order: the index of the piece, the offset in its row, and the number of bytes."""
        runs = _runs([one.box for one in self._placed], list(range(len(self._placed))), 1)
        return [(number, start * self._item, length * self._item) for number, start, length in runs]


def _runs(boxes: Sequence[Box], numbers: Sequence[int], dimension: int) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of boxes in order, in runs: number of the box, first element, number of elements.

    The boxes cover everything from `dimension` on. `numbers`: the numbers of the boxes. The first element is counted
    within the box, from `dimension` on.
    """
    for start, stop, inside in split_into_slabs(boxes, dimension):
        inner = [math.prod(boxes[number].shape[dimension + 1 :]) for number in inside]
        if len(inside) == 1:
            (number,), (size,) = inside, inner
            yield numbers[number], (start - boxes[number].offset[dimension]) * size, (stop - start) * size
            continue
        here = [boxes[number] for number in inside]
        sizes = {
            numbers[number]: (boxes[number].offset[dimension], size) for number, size in zip(inside, inner, strict=True)
        }
        runs = list(_runs(here, [numbers[number] for number in inside], dimension + 1))
        for at in range(start, stop):
            for number, first, length in runs:
                base, size = sizes[number]
                yield number, (at - base) * size + first, length


def _read_bytes(storage: Storage, path: str, offset: int, length: int) -> Iterator[bytes]:
    """Yield a range of a stored file, in chunks; raise `DamagedCheckpointError` if the file is too short."""
    with storage.open(path) as stream:
        stream.seek(offset)
        while length:
            data = stream.read(min(length, _READ_BYTES))
            if not data:
                raise DamagedCheckpointError(f"{path} ends too early")
            length -= len(data)
            yield data
