"""The tensors of a checkpoint made whole again from its parts, for a file of their own; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.protocol.checkpoints.boxes import Box, make_up, slabs
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.tensor_files import ITEM_BYTES, SUFFIX, StoredPiece, header_of, read_header
from holdfast.storage import Storage, said

_READ_BYTES = 4 << 20
#: what else than the model's is in a checkpoint, by how it begins
OPTIMIZER, EXTRA, EXPERTS = "optimizer:", "extra:", "experts:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A box of a tensor, and where its bytes lie, one row after the other: path, and offset there."""

    box: Box
    path: str
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeTensor:
    """A tensor, and what it is made of."""

    piece: StoredPiece
    placed: tuple[Placed, ...]


def is_models(name: str) -> bool:
    """Tell whether a tensor belongs to the model, rather than to its optimizer or to what a script has added."""
    if name.startswith(EXPERTS):
        return name.count(".") == 2  # layer, expert, weight; what the optimizer keeps of it has one more
    return not name.startswith((OPTIMIZER, EXTRA))


def whole_tensors(storage: Storage, checkpoint: str) -> list[WholeTensor]:
    """Return all tensors of a checkpoint, those whose elements take most bytes first, then by name.

    Raises:
        DamagedCheckpointError: a part is missing, or holds what it should not.
    """
    _, files = read_manifest(storage, checkpoint)
    found: dict[str, list[tuple[StoredPiece, Placed]]] = {}
    for file in files:
        path = f"{checkpoint}/{file.name}"
        if not file.name.endswith(SUFFIX):
            continue
        try:
            with storage.open(path) as stream:
                pieces, start = read_header(stream, file.bytes, path)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {said(error)}") from None
        for piece in pieces:
            placed = Placed(box=piece.box, path=path, offset=start + piece.begin)
            found.setdefault(piece.name, []).append((piece, placed))
    joined = [_joined(checkpoint, found[name]) for name in sorted(found)]
    return sorted(joined, key=lambda tensor: -ITEM_BYTES[tensor.piece.code])


def _joined(checkpoint: str, found: list[tuple[StoredPiece, Placed]]) -> WholeTensor:
    pieces, placed = zip(*found, strict=True)
    first: StoredPiece = pieces[0]
    boxes = [piece.box for piece in pieces]
    kinds = {(piece.code, piece.whole, len(piece.box.shape)) for piece in pieces}
    ends = zip(*(box.end for box in boxes), strict=True) if len(kinds) == 1 else ()
    whole = first.whole or tuple(map(max, ends))
    if len(kinds) > 1 or not make_up(boxes, whole):
        raise DamagedCheckpointError(f"{checkpoint}: the pieces of {first.name} do not make one tensor")
    return WholeTensor(piece=replace(first, box=Box.all_of(whole), whole=(), begin=0), placed=placed)


def joined_file(
    storage: Storage, checkpoint: str, wanted: Callable[[str], bool]
) -> tuple[list[StoredPiece], Iterator[bytes]]:
    """Return what a file with these tensors holds, and its content: a header, then all bytes.

    Raises:
        DamagedCheckpointError: as `whole_tensors`; while the content is read, too.
    """
    tensors = [tensor for tensor in whole_tensors(storage, checkpoint) if wanted(tensor.piece.name)]
    described: list[StoredPiece] = []
    end = 0
    for tensor in tensors:
        described.append(replace(tensor.piece, begin=end))
        end += tensor.piece.nbytes

    def content() -> Iterator[bytes]:
        yield header_of(described)
        for tensor in tensors:
            yield from _content(storage, tensor)

    return described, content()


def _content(storage: Storage, tensor: WholeTensor) -> Iterator[bytes]:
    """Yield the bytes of a whole tensor, one row after the other."""
    item, placed = ITEM_BYTES[tensor.piece.code], [one for one in tensor.placed if one.box.size]
    boxes = [one.box for one in placed]
    if not tensor.piece.box.shape:
        yield from (data for one in placed for data in _bytes_of(storage, one.path, one.offset, item))
        return
    for start, stop, inside in slabs(boxes, 0):
        beside = _Beside([placed[number] for number in inside], item)
        at_once = stop - start if len(inside) == 1 else max(1, _READ_BYTES // beside.row_bytes)
        for first in range(start, stop, at_once):
            yield from beside.rows(storage, first, min(at_once, stop - first))


class _Beside:
    """Pieces of a tensor that have some rows in common, each another part of them."""

    def __init__(self, placed: Sequence[Placed], item: int) -> None:
        self._placed = placed
        self._bytes = [math.prod(one.box.shape[1:]) * item for one in placed]
        self._item = item
        self.row_bytes = sum(self._bytes)

    def rows(self, storage: Storage, first: int, count: int) -> Iterator[bytes]:
        """Yield so many rows, from one on; of several pieces these are in memory at once."""
        found = [
            _bytes_of(storage, one.path, one.offset + (first - one.box.offset[0]) * size, count * size)
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
        """What a row consists of, in its order: of which piece's row, from where on, how many bytes."""
        runs = _runs([one.box for one in self._placed], list(range(len(self._placed))), 1)
        return [(number, start * self._item, length * self._item) for number, start, length in runs]


def _runs(boxes: Sequence[Box], numbers: Sequence[int], dimension: int) -> Iterator[tuple[int, int, int]]:
    """Yield in their order the elements of boxes that make up all from a dimension on, in runs: whose, which, how many.

    `numbers`: of the boxes. Which: counted in what one box has from that dimension on.
    """
    for start, stop, inside in slabs(boxes, dimension):
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


def _bytes_of(storage: Storage, path: str, offset: int, length: int) -> Iterator[bytes]:
    with storage.open(path) as stream:
        stream.seek(offset)
        while length:
            data = stream.read(min(length, _READ_BYTES))
            if not data:
                raise DamagedCheckpointError(f"{path} ends too early")
            length -= len(data)
            yield data
