"""A checkpoint's parts: each rank's share of the dense state and the rows of the experts that it saves, copied.

The dense state is the same on all ranks of a role: each takes its share of it, cut by bytes between two rows of a
tensor. What several roles have alike the first of them saves. What a part holds is said in its header, in terms of
whole tensors, so that parts can be read by any world, under any layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.checkpoints.tensor_files import CODES, SUFFIX, StoredPiece, make_header
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.state import tree
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.state import Manifest, StateView


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """What one rank saves: the beginning of its file, and the bytes behind it, as `(bytes,)` in host memory."""

    header: bytes
    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return len(self.header) + self.data.numel()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's content."""
        yield self.header
        data = host_bytes(self.data)
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


_CHUNK_BYTES = 4 << 20


def part_name(part: int, parts: int) -> str:
    """Return the name of a part's file."""
    return f"part-{part:05d}-of-{parts:05d}{SUFFIX}"


class _Piece(NamedTuple):
    """A piece of a tensor that is saved: live rows of what is here, where in the whole they begin, and its shape."""

    name: str
    rows: torch.Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...] = ()

    def describe(self, begin: int) -> StoredPiece:
        code, shape = stored_type(self.rows.dtype, self.rows.shape)
        beyond = shape[self.rows.dim() :]  # (bytes of an element that the format has no name for)
        return StoredPiece(
            name=self.name,
            code=code,
            box=Box((*self.offset, *(0 for _ in beyond)), shape),
            whole=(*self.whole, *beyond) if self.whole else (),
            begin=begin,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLayout:
    """Where the pieces of a part are to lie: `header` says it, the live tensors are copied there by `fill`."""

    header: bytes
    nbytes: int
    pieces: Sequence[tuple[StoredPiece, torch.Tensor]]

    @torch.no_grad()
    def copy_pieces(self, data: torch.Tensor) -> None:
        """Copy all pieces to where they are to lie, in `(nbytes,)` bytes of host memory."""
        for piece, tensor in self.pieces:
            room = data[piece.begin : piece.begin + piece.nbytes].view(tensor.dtype)
            room.view(tensor.shape).copy_(tensor)


def copy_part(
    view: StateView,
    part: int,
    parts: int,
    rows: Mapping[str, torch.Tensor] | None = None,
    place: ReplicaPosition = WHOLE_REPLICA,
) -> StatePart:
    """Copy one part of the state, as `lay_out`; when this returns, the state may change."""
    laid = lay_out(view, part, parts, rows, place)
    data = torch.empty(laid.nbytes, dtype=torch.uint8)
    laid.copy_pieces(data)
    return StatePart(header=laid.header, data=data)


def lay_out(
    view: StateView,
    part: int,
    parts: int,
    rows: Mapping[str, torch.Tensor] | None = None,
    place: ReplicaPosition = WHOLE_REPLICA,
) -> PartLayout:
    """Return what one part of the state consists of.

    Args:
        part: which of `parts` that the ranks of this role save, 0-based.
        rows: whole tensors that are saved in this part, by name.
        place: which part of a replica is here.
    """
    pieces = list(_own_pieces(view, part, parts, place))
    pieces += [_Piece(name, tensor, (0,) * tensor.dim()) for name, tensor in (rows or {}).items()]
    stored = [to_stored(piece.rows) for piece in pieces]
    # What takes more bytes an element comes first, so that all elements lie where a processor likes them.
    order = sorted(range(len(pieces)), key=lambda number: -stored[number].element_size())
    described: list[StoredPiece] = []
    end = 0
    for number in order:
        described.append(pieces[number].describe(end))
        end += described[-1].nbytes
    tensors = [stored[number] for number in order]
    return PartLayout(header=make_header(described), nbytes=end, pieces=list(zip(described, tensors, strict=True)))


def _own_pieces(view: StateView, part: int, parts: int, place: ReplicaPosition) -> Iterator[_Piece]:
    """Yield the rows of a part of what this role saves."""
    saved = [number for number in range(len(view.tensors)) if _is_saved(view, number, place)]
    total = sum(view.tensors[number].nbytes for number in saved)
    begin, end = total * part // parts, total * (part + 1) // parts
    names, at = stored_names(view.manifest), 0
    for number in saved:
        name, tensor, spread = names[number], view.tensors[number], view.spread.get(number)
        whole = tuple(spread.shape) if spread is not None else ()
        offset = find_box(name, spread, place).offset if spread is not None else (0,) * tensor.dim()
        nbytes = tensor.nbytes
        if spread is not None and not spread.numel():
            tensor, whole = tensor.reshape(whole), ()  # (of nothing a place may have another shape of nothing)
        if nbytes == 0 or tensor.dim() == 0:
            if begin <= at < end or (part == 0 and at >= total):
                yield _Piece(name, tensor, offset, whole)
        else:
            each = nbytes // tensor.shape[0]
            first, last = (max(0, min(-(-(edge - at) // each), tensor.shape[0])) for edge in (begin, end))
            if first < last:
                yield _Piece(name, tensor[first:last], (offset[0] + first, *offset[1:]), whole)
        at += nbytes


def _is_saved(view: StateView, number: int, place: ReplicaPosition) -> bool:
    """Tell whether this role saves what is here of a tensor: what several have alike, the first of them does."""
    spread = view.spread.get(number)
    if spread is None:
        return place.is_counted_here(view.tensors[number])
    return place.is_counted_here(spread) and (
        view.tensors[number].numel() > 0 or not (spread.numel() or place.local_rank)
    )


def stored_names(manifest: Manifest) -> list[str]:
    """Return what each tensor of a state is called in files: as the model calls it, or by its way through the state.

    No two have a name in common.
    """
    names = [spec.name for spec in manifest.tensors]
    trees = {"optimizer": manifest.optimizer, **{f"extra:{name}": node for name, node in manifest.extra.items()}}
    for prefix, node in trees.items():
        for way, place in tree.tensor_paths(node):
            names[place] = ":".join((prefix, ".".join(way))) if way else prefix
    times = Counter(names)
    return [f"{name}#{place}" if times[name] > 1 else name for place, name in enumerate(names)]


def stored_type(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape that files have for a tensor: one that the format has no name for is bytes."""
    code = CODES.get(str(dtype).removeprefix("torch."))
    return (code, tuple(shape)) if code else ("U8", (*shape, dtype.itemsize))


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as files hold it; it shares memory with one whose elements lie one after the other."""
    if str(tensor.dtype).removeprefix("torch.") in CODES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)
