"""Reads the tensors of a checkpoint into tensors that are there, at any world size, without running anything.

Of a tensor that is spread over a unit's places what belongs here is read, whichever boxes of it lie there.

Whoever can write to the checkpoint directory can put there what he likes: what a file says it holds is compared with
what is wanted before a byte is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Mapping
from typing import BinaryIO

import torch

from holdfast.protocol.checkpoints.boxes import Box, make_up
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, read_manifest
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.checkpoints.tensor_files import SUFFIX, StoredPiece, read_header
from holdfast.runtime.checkpoints.global_terms import LocalPart
from holdfast.runtime.checkpoints.parts import stored_as
from holdfast.runtime.state.memory import directly_readable
from holdfast.storage import Storage, said


def load_tensors(
    storage: Storage, checkpoint: str, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, LocalPart] | None = None
) -> None:
    """Fill tensors, by name, with what a checkpoint holds; the caller has verified it.

    Args:
        parts: which parts of the checkpoint's tensors those are that are not all of them.

    Raises:
        DamagedCheckpointError: it holds something else, or cannot be read. Some tensors may be filled.
    """
    _, files = read_manifest(storage, checkpoint)
    whole = {name: LocalPart(Box.all_of(tensor.shape), tuple(tensor.shape)) for name, tensor in tensors.items()}
    filling = _Filling(tensors, whole | dict(parts or {}))
    for file in files:
        if file.name.endswith(SUFFIX):
            called = f"{checkpoint}/{file.name}"
            try:
                with opened(storage, checkpoint, file) as stream:
                    filling.take(stream, called, file.bytes)
            except OSError as error:
                raise DamagedCheckpointError(f"{called} cannot be read: {said(error)}") from None
    for name in tensors:
        if not filling.has(name):
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


class _Filling:
    """Tensors on their way in."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, LocalPart]) -> None:
        self._tensors, self._parts = tensors, parts
        #: what was there of each, whether it was wanted here or not
        self._found: dict[str, list[Box]] = {name: [] for name in tensors}

    def has(self, name: str) -> bool:
        """Tell whether all of a whole tensor was there, each element once."""
        return make_up(self._found[name], self._parts[name].whole)

    def take(self, stream: BinaryIO, called: str, size: int) -> None:
        """Read from one file what is wanted of it."""
        pieces, start = read_header(stream, size, called)
        for piece in pieces:
            if piece.name not in self._tensors:
                continue
            tensor, part = self._tensors[piece.name], self._parts[piece.name]
            box = _checked(called, piece, tensor, part.whole)
            self._found[piece.name].append(box)
            if wanted := box.common(part.box):
                _fill(stream, start + piece.begin, box, tensor[wanted.seen_from(part.box)], wanted)


def _checked(called: str, piece: StoredPiece, tensor: torch.Tensor, whole: tuple[int, ...]) -> Box:
    """Return which box of a tensor of this shape a piece is.

    Raises:
        DamagedCheckpointError: it is none.
    """
    code, shape = stored_as(tensor.dtype, whole)
    box, beyond = piece.box, shape[len(whole) :]
    fits = piece.code == code and box.within(shape) and box.shape[len(whole) :] == beyond
    if not fits or piece.whole not in ((), shape):
        said_whole = f" of {piece.whole}" if piece.whole else ""
        raise DamagedCheckpointError(
            f"{called}: {piece.name} is {piece.code} {box.shape} at {box.offset}{said_whole}, not of {code} {shape}"
        )
    return Box(box.offset[: len(whole)], box.shape[: len(whole)])


@torch.no_grad()
def _fill(stream: BinaryIO, start: int, box: Box, into: torch.Tensor, wanted: Box) -> None:
    """Read what is wanted of a box whose bytes begin somewhere; no more rows of it are read than have some of that."""
    rows = box
    if box.shape:
        rows = Box((wanted.offset[0], *box.offset[1:]), (wanted.shape[0], *box.shape[1:]))
        before = wanted.offset[0] - box.offset[0]
        start += before * (box.size // box.shape[0]) * into.itemsize
    direct = rows.shape == wanted.shape and directly_readable(into)
    room = into.detach() if direct else torch.empty(rows.shape, dtype=into.dtype)
    stream.seek(start)
    nbytes = rows.size * into.itemsize
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise OSError(errno.EIO, "it ends too early")
    room.reshape(-1).view(torch.uint8).numpy().data[:] = data
    if not direct:
        into.copy_(room[wanted.seen_from(rows)])
