"""Reads the tensors of a checkpoint into existing tensors, at any world size, without executing anything.

Of a tensor that is spread over a replica group only the local part is read, from any division into boxes.

Everyone who can write to the checkpoint directory could put malicious files there. So a file's description is compared
with the wanted tensors before any byte is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Iterable, Mapping
from typing import BinaryIO, Protocol

import torch

from holdfast.protocol.checkpoints.boxes import Box, cover_exactly
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.checkpoints.tensor_files import SUFFIX, StoredPiece, read_header
from holdfast.runtime.checkpoints.global_terms import LocalPart
from holdfast.runtime.checkpoints.parts import stored_type
from holdfast.runtime.state.memory import is_directly_readable
from holdfast.storage import Storage, error_text


def load_tensors(
    storage: Storage, checkpoint: str, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, LocalPart] | None = None
) -> None:
    """Fill tensors, by name, from all files of a checkpoint that the caller has verified. Other tensors in the files
    are ignored.

    Args:
        parts: the local parts, for tensors that are not complete.

    Raises:
        DamagedCheckpointError: a file cannot be read, or does not match, or elements of a tensor are missing or present
            twice. Some tensors may be filled.
    """
    _, files = read_manifest(storage, checkpoint)
    filling = BoxReader(tensors, parts or {})
    for file in files:
        if file.name.endswith(SUFFIX):
            file_name = f"{checkpoint}/{file.name}"
            try:
                with open_verified(storage, checkpoint, file) as stream:
                    filling.read_file(stream, file_name, file.bytes)
            except OSError as error:
                raise DamagedCheckpointError(f"{file_name} cannot be read: {error_text(error)}") from None
    if lacking := filling.missing_tensor:
        raise DamagedCheckpointError(f"{checkpoint} does not hold all of {lacking}, once")


def open_verified(storage: Storage, checkpoint: str, file: StoredFile) -> BinaryIO:
    """Open a file of a checkpoint. A remote file is read into memory, and its hash compared; a local one is opened as
    it is, because its hash was compared before.

    Raises:
        DamagedCheckpointError: it has other content.
        OSError: it cannot be read.
    """
    if storage.local:
        return storage.open(f"{checkpoint}/{file.name}")
    data = storage.read(f"{checkpoint}/{file.name}", file.bytes)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise DamagedCheckpointError(f"{checkpoint}/{file.name} has other content than was written")
    return io.BytesIO(data)


class SeekableBytes(Protocol):
    """The source from which pieces of tensors are read."""

    def seek(self, offset: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...


class BoxReader:
    """Reads tensors from files that contain boxes of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, LocalPart]) -> None:
        """Start without files.

        Args:
            tensors: by name.
            parts: the local parts, for tensors that are not complete.
        """
        whole = {name: LocalPart(Box.of_whole(tensor.shape), tuple(tensor.shape)) for name, tensor in tensors.items()}
        self._tensors = tensors
        self._parts = {**whole, **parts}
        #: all boxes of each tensor, including unwanted ones
        self._found: dict[str, list[Box]] = {name: [] for name in tensors}

    @property
    def missing_tensor(self) -> str:
        """The name of a tensor of which some elements were missing or present twice, or ""."""
        return next((name for name in self._found if not cover_exactly(self._found[name], self._parts[name].whole)), "")

    def read_file(self, stream: BinaryIO, file_name: str, size: int) -> None:
        """Read the wanted pieces of one file into the tensors.

        Args:
            file_name: its name in messages.
            size: its bytes.

        Raises:
            DamagedCheckpointError: its header is malformed, or a piece does not belong to its tensor.
        """
        pieces, start = read_header(stream, size, file_name)
        self.read_pieces(stream, file_name, pieces, start)

    def byte_ranges(self, file_name: str, pieces: Iterable[StoredPiece]) -> list[tuple[int, int]]:
        """Return the start and the length, in bytes, of each range that `read_pieces` would read. Starts count from the
        first byte of the file's data, after its header. Pieces of unknown tensors, and pieces outside of this worker's
        local parts, are left out.

        Raises:
            DamagedCheckpointError: a piece does not belong to its tensor.
        """
        found: list[tuple[int, int]] = []
        for piece in pieces:
            tensor, part = self._tensors.get(piece.name), self._parts.get(piece.name)
            if tensor is not None and part is not None:
                box = _check_piece(file_name, piece, tensor, part.whole)
                if wanted := box.intersect(part.box):
                    start, rows = _overlapping_rows(box, wanted)
                    found.append((piece.begin + start * tensor.itemsize, rows.size * tensor.itemsize))
        return found

    def read_pieces(self, stream: SeekableBytes, file_name: str, pieces: Iterable[StoredPiece], start: int) -> None:
        """Read the wanted parts of these pieces into the tensors; pieces of unknown tensors are ignored. All other
        pieces count for `missing_tensor`.

        Args:
            file_name: the file's name in messages.
            start: offset of the file's data in the stream, to which the positions of pieces are relative.

        Raises:
            DamagedCheckpointError: a piece does not belong to its tensor.
            OSError: the stream is too short.
        """
        for piece in pieces:
            if piece.name not in self._tensors:
                continue
            tensor, part = self._tensors[piece.name], self._parts[piece.name]
            box = _check_piece(file_name, piece, tensor, part.whole)
            self._found[piece.name].append(box)
            if wanted := box.intersect(part.box):
                _read_box(stream, start + piece.begin, box, tensor[wanted.slices_in(part.box)], wanted)


def _check_piece(file_name: str, piece: StoredPiece, tensor: torch.Tensor, whole: tuple[int, ...]) -> Box:
    """Return which box of the whole tensor's elements a piece in a file contains.

    Args:
        whole: shape of the whole tensor, of which `tensor` may be a local part.

    Raises:
        DamagedCheckpointError: the piece has another dtype, another whole shape, or lies outside of the tensor.
    """
    code, shape = stored_type(tensor.dtype, whole)
    box, beyond = piece.box, shape[len(whole) :]
    fits = piece.code == code and box.fits_into(shape) and box.shape[len(whole) :] == beyond
    if not fits or piece.whole not in ((), shape):
        of_whole = f" of {piece.whole}" if piece.whole else ""
        raise DamagedCheckpointError(
            f"{file_name}: {piece.name} is {piece.code} {box.shape} at {box.offset}{of_whole}, not of {code} {shape}"
        )
    return Box(box.offset[: len(whole)], box.shape[: len(whole)])


def _overlapping_rows(box: Box, wanted: Box) -> tuple[int, Box]:
    """Return the number of elements of a box before the rows that overlap `wanted`, and these rows as a box.

    Rows are along the first axis and include unwanted columns. `wanted` must be inside the box. A scalar is its only
    row.
    """
    if not box.shape:
        return 0, box
    rows = Box((wanted.offset[0], *box.offset[1:]), (wanted.shape[0], *box.shape[1:]))
    return (wanted.offset[0] - box.offset[0]) * (box.size // box.shape[0]), rows


@torch.no_grad()
def _read_box(stream: SeekableBytes, start: int, box: Box, into: torch.Tensor, wanted: Box) -> None:
    """Read the wanted part of a box into a tensor; only the rows that overlap it are read, directly if they are
    contiguous there.

    Args:
        start: offset of the box in the stream.
        into: a tensor of the wanted box's shape.

    Raises:
        OSError: the stream is too short.
    """
    before, rows = _overlapping_rows(box, wanted)
    start += before * into.itemsize
    direct = rows.shape == wanted.shape and is_directly_readable(into)
    room = into.detach() if direct else torch.empty(rows.shape, dtype=into.dtype)
    stream.seek(start)
    nbytes = rows.size * into.itemsize
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise OSError(errno.EIO, "the file is too short")
    room.reshape(-1).view(torch.uint8).numpy().data[:] = data
    if not direct:
        into.copy_(room[wanted.slices_in(rows)])
