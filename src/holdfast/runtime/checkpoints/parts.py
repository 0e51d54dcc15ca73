"""A checkpoint's parts: each rank's share of the dense state, and the rows of the experts that it saves.

The dense state is the same on all ranks of a role: each rank saves a share of it, cut by bytes between two rows of a
tensor. Tensors that several roles have are saved by the first of them. A part's header describes its content in terms
of whole tensors, so that any world can read it under any layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.checkpoints.tensor_files import CODES, SUFFIX, StoredPiece, make_header
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.state import tree
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.state import Manifest, StateView


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """The content of one rank's file."""

    #: the beginning of the file
    header: bytes
    #: the following bytes, `(bytes,)` in host memory
    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + self.data.numel()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's content: the header, then the data in chunks."""
        yield self.header
        data = host_bytes(self.data)
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


_CHUNK_BYTES = 4 << 20


def part_name(part: int, parts: int) -> str:
    """Return the name of a part's file."""
    return f"part-{part:05d}-of-{parts:05d}{SUFFIX}"


class _Piece(NamedTuple):
    """A piece of a tensor that is saved."""

    name: str
    #: live rows of the local part
    rows: torch.Tensor
    #: start of the rows in the whole tensor
    offset: tuple[int, ...]
    #: shape of the whole tensor, or () if `rows` are complete
    whole: tuple[int, ...] = ()

    def describe(self, begin: int) -> StoredPiece:
        """Return the description of the piece in a file in which its bytes start at `begin`. If the format does not
        support the dtype, it is described as bytes, with one more dimension.
        """
        code, shape = stored_type(self.rows.dtype, self.rows.shape)
        beyond = shape[self.rows.dim() :]  # A trailing dimension of bytes, if the format does not support the dtype.
        return StoredPiece(
            name=self.name,
            code=code,
            box=Box((*self.offset, *(0 for _ in beyond)), shape),
            whole=(*self.whole, *beyond) if self.whole else (),
            begin=begin,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLayout:
    """The positions of the pieces of a part."""

    #: describes the pieces and their positions
    header: bytes
    nbytes: int
    pieces: Sequence[tuple[StoredPiece, torch.Tensor]]

    @torch.no_grad()
    def copy_pieces(self, data: torch.Tensor) -> None:
        """Copy all pieces from their tensors into `data`, `(nbytes,)` uint8 in host memory, each to its position."""
        for piece, tensor in self.pieces:
            room = data[piece.begin : piece.begin + piece.nbytes].view(tensor.dtype)
            room.view(tensor.shape).copy_(tensor)


def copy_part(
    view: StateView,
    part: int,
    parts: int,
    rows: Mapping[str, torch.Tensor] | None = None,
    position: ReplicaPosition = WHOLE_REPLICA,
) -> StatePart:
    """Copy one part of the state, and the whole tensors in `rows`, into new host memory, with the arguments of
    `lay_out`; when this returns, the state may change.

    Raises:
        RuntimeError: there is not enough memory.
    """
    laid = lay_out(view, part, parts, rows, position)
    data = torch.empty(laid.nbytes, dtype=torch.uint8)
    laid.copy_pieces(data)
    return StatePart(header=laid.header, data=data)


def lay_out(
    view: StateView,
    part: int,
    parts: int,
    rows: Mapping[str, torch.Tensor] | None = None,
    position: ReplicaPosition = WHOLE_REPLICA,
) -> PartLayout:
    """Return the header of one part of the state, and the live tensors that belong into it, with their positions.
    Nothing is copied.

    Args:
        part: 0-based index of the part, among the `parts` of this role's ranks, which have the same local rank.
        rows: whole tensors that are also saved in this part, by name.
        position: the part of a replica on this worker.
    """
    pieces = list(_own_pieces(view, part, parts, position))
    pieces += [_Piece(name, tensor, (0,) * tensor.dim()) for name, tensor in (rows or {}).items()]
    stored = [to_stored(piece.rows) for piece in pieces]
    # Tensors with larger elements come first, so that all elements are aligned.
    order = sorted(range(len(pieces)), key=lambda number: -stored[number].element_size())
    described: list[StoredPiece] = []
    end = 0
    for number in order:
        described.append(pieces[number].describe(end))
        end += described[-1].nbytes
    tensors = [stored[number] for number in order]
    return PartLayout(header=make_header(described), nbytes=end, pieces=list(zip(described, tensors, strict=True)))


def _own_pieces(view: StateView, part: int, parts: int, position: ReplicaPosition) -> Iterator[_Piece]:
    """Yield the pieces in part `part` of `parts` of the tensors that this role (local rank) saves, see `_is_saved`: a
    nearly equal share of all their bytes, cut between two rows of a tensor. A scalar or an empty tensor is in exactly
    one part.
    """
    saved = [number for number in range(len(view.tensors)) if _is_saved(view, number, position)]
    total = sum(view.tensors[number].nbytes for number in saved)
    begin, end = total * part // parts, total * (part + 1) // parts
    names, at = stored_names(view.manifest), 0
    for number in saved:
        name, tensor, spread = names[number], view.tensors[number], view.spread.get(number)
        whole = tuple(spread.shape) if spread is not None else ()
        offset = find_box(name, spread, position).offset if spread is not None else (0,) * tensor.dim()
        nbytes = tensor.nbytes
        if spread is not None and not spread.numel():
            tensor, whole = tensor.reshape(whole), ()  # The local part of an empty tensor may have another shape.
        if nbytes == 0 or tensor.dim() == 0:
            if begin <= at < end or (part == 0 and at >= total):
                yield _Piece(name, tensor, offset, whole)
        else:
            each = nbytes // tensor.shape[0]
            first, last = (max(0, min(-(-(edge - at) // each), tensor.shape[0])) for edge in (begin, end))
            if first < last:
                yield _Piece(name, tensor[first:last], (offset[0] + first, *offset[1:]), whole)
        at += nbytes


def _is_saved(view: StateView, number: int, position: ReplicaPosition) -> bool:
    """Return whether this role (local rank) saves its local part of the tensor with this number. If several roles have
    the same part, only the first one saves it. An empty part is only saved if the whole tensor is empty, and only by
    local rank 0.
    """
    spread = view.spread.get(number)
    if spread is None:
        return position.is_counted_here(view.tensors[number])
    return position.is_counted_here(spread) and (
        view.tensors[number].numel() > 0 or not (spread.numel() or position.local_rank)
    )


def stored_names(manifest: Manifest) -> list[str]:
    """Return the unique name of each tensor in files: the model's name, or the path through the state, such as
    "optimizer:state.0.exp_avg"; names that occur twice also have the index.
    """
    names = [spec.name for spec in manifest.tensors]
    trees = {"optimizer": manifest.optimizer, **{f"extra:{name}": node for name, node in manifest.extra.items()}}
    for prefix, node in trees.items():
        for way, place in tree.tensor_paths(node):
            names[place] = ":".join((prefix, ".".join(way))) if way else prefix
    times = Counter(names)
    return [f"{name}#{place}" if times[name] > 1 else name for place, name in enumerate(names)]


def stored_type(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's type code and shape in files; a dtype that the format does not support becomes bytes."""
    code = CODES.get(str(dtype).removeprefix("torch."))
    return (code, tuple(shape)) if code else ("U8", (*shape, dtype.itemsize))


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as stored in files: itself, or bytes with one more dimension if the format does not support its
    dtype. The memory of a contiguous tensor is shared.
    """
    if str(tensor.dtype).removeprefix("torch.") in CODES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)
