"""The tensors of a checkpoint made whole again from its parts, for a file of their own; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.tensor_files import ITEM_BYTES, SUFFIX, StoredRows, header_of, read_header
from holdfast.storage import Storage, said

_READ_BYTES = 4 << 20
#: what else than the model's is in a checkpoint, by how it begins
OPTIMIZER, EXTRA, EXPERTS = "optimizer:", "extra:", "experts:"


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeTensor:
    """A tensor, and where its bytes lie, in their order: path, offset, length."""

    rows: StoredRows
    pieces: tuple[tuple[str, int, int], ...]


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
    found: dict[str, list[tuple[StoredRows, tuple[str, int, int]]]] = {}
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
            found.setdefault(piece.name, []).append((piece, (path, start + piece.begin, piece.nbytes)))
    joined = [_joined(checkpoint, found[name]) for name in sorted(found)]
    return sorted(joined, key=lambda tensor: -ITEM_BYTES[tensor.rows.code])


def _joined(checkpoint: str, pieces: list[tuple[StoredRows, tuple[str, int, int]]]) -> WholeTensor:
    ordered = sorted(pieces, key=lambda piece: piece[0].first)
    first, end = ordered[0][0], 0
    for rows, _ in ordered:
        same = (rows.code, rows.shape[1:], len(rows.shape)) == (first.code, first.shape[1:], len(first.shape))
        if rows.first != end or not same or (len(ordered) > 1 and not rows.shape):
            raise DamagedCheckpointError(f"{checkpoint}: the rows of {rows.name} do not make one tensor")
        end += rows.shape[0] if rows.shape else 1
    shape = (end, *first.shape[1:]) if first.shape else ()
    return WholeTensor(rows=replace(first, shape=shape, begin=0), pieces=tuple(place for _, place in ordered))


def joined_file(
    storage: Storage, checkpoint: str, wanted: Callable[[str], bool]
) -> tuple[list[StoredRows], Iterator[bytes]]:
    """Return what a file with these tensors holds, and its content: a header, then all bytes.

    Raises:
        DamagedCheckpointError: as `whole_tensors`; while the content is read, too.
    """
    tensors = [tensor for tensor in whole_tensors(storage, checkpoint) if wanted(tensor.rows.name)]
    described: list[StoredRows] = []
    end = 0
    for tensor in tensors:
        described.append(replace(tensor.rows, begin=end))
        end += math.prod(tensor.rows.shape) * ITEM_BYTES[tensor.rows.code]

    def content() -> Iterator[bytes]:
        yield header_of(described)
        for tensor in tensors:
            for path, offset, length in tensor.pieces:
                yield from _bytes_of(storage, path, offset, length)

    return described, content()


def _bytes_of(storage: Storage, path: str, offset: int, length: int) -> Iterator[bytes]:
    with storage.open(path) as stream:
        stream.seek(offset)
        while length:
            data = stream.read(min(length, _READ_BYTES))
            if not data:
                raise DamagedCheckpointError(f"{path} ends too early")
            length -= len(data)
            yield data
