"""Reads the tensors of a checkpoint into tensors that are there, at any world size, without running anything.

Whoever can write to the checkpoint directory can put there what he likes: what a file says it holds is compared with
what is wanted before a byte is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import torch

from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.checkpoints.tensor_files import SUFFIX, StoredRows, read_header
from holdfast.runtime.checkpoints.parts import stored_as
from holdfast.runtime.state.memory import directly_readable
from holdfast.storage import Storage, said


def load_tensors(storage: Storage, checkpoint: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, by name, with what a checkpoint holds; the caller has verified it.

    Raises:
        DamagedCheckpointError: it holds something else, or cannot be read. Some tensors may be filled.
    """
    _, files = read_manifest(storage, checkpoint)
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for file in files:
        if file.name.endswith(SUFFIX):
            called = f"{checkpoint}/{file.name}"
            try:
                with opened(storage, checkpoint, file) as stream:
                    _take(stream, called, file.bytes, tensors, found)
            except OSError as error:
                raise DamagedCheckpointError(f"{called} cannot be read: {said(error)}") from None
    for name, tensor in tensors.items():
        if not _whole(found[name], tensor):
            raise DamagedCheckpointError(f"{checkpoint} does not hold all of {name}, once")


def opened(storage: Storage, checkpoint: str, file: StoredFile) -> BinaryIO:
    """Open a file whose content is known to be what was written: one that lies far away is fetched, and looked at.

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


def _take(
    stream: BinaryIO,
    called: str,
    size: int,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, list[tuple[int, int]]],
) -> None:
    """Read from one file what is wanted of it, and note in `found` which rows came."""
    pieces, start = read_header(stream, size, called)
    for piece in pieces:
        tensor = tensors.get(piece.name)
        if tensor is None:
            continue
        code, shape = stored_as(tensor.dtype, tensor.shape)
        if (piece.code, piece.shape[1:], len(piece.shape)) != (code, shape[1:], len(shape)):
            raise DamagedCheckpointError(f"{called}: {piece.name} is {piece.code} {piece.shape}, not {code} {shape}")
        rows = range(piece.first, piece.first + piece.shape[0]) if tensor.dim() else range(1)
        if rows.stop > _rows(tensor) or (not tensor.dim() and piece.shape != shape):
            raise DamagedCheckpointError(f"{called}: {piece.name} has rows {piece.first} to {rows.stop} of {shape}")
        stream.seek(start + piece.begin)
        _fill(stream, piece, tensor[rows.start : rows.stop] if tensor.dim() else tensor)
        found[piece.name].append((rows.start, rows.stop))


@torch.no_grad()
def _fill(stream: BinaryIO, piece: StoredRows, rows: torch.Tensor) -> None:
    target = rows.detach() if directly_readable(rows) else torch.empty(rows.shape, dtype=rows.dtype)
    if piece.nbytes:
        room = target.reshape(-1).view(torch.uint8).numpy().data
        data = stream.read(piece.nbytes)
        if len(data) != piece.nbytes:
            raise OSError(errno.EIO, "it ends too early")
        room[:] = data
    if target.data_ptr() != rows.data_ptr():
        rows.copy_(target)


def _whole(rows: Sequence[tuple[int, int]], tensor: torch.Tensor) -> bool:
    """Tell whether these rows are all of a tensor's, each once."""
    end = 0
    for first, last in sorted(rows):
        if first != end:
            return False
        end = last
    return bool(rows) and end == _rows(tensor)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1
