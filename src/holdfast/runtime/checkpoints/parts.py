"""A checkpoint's parts: each rank's share of the dense state and the rows of the experts that it saves, copied.

The dense state is the same on every rank: each takes its share of it, cut by bytes between two rows of a tensor. What a
part holds is said in its header, so that parts can be read by any world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.protocol.checkpoints.tensor_files import CODES, SUFFIX, StoredRows, header_of
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


def copy_part(view: StateView, part: int, parts: int, rows: Mapping[str, torch.Tensor] | None = None) -> StatePart:
    """Copy one part of the state; when this returns, the state may change.

    Args:
        part: which of `parts`, 0-based.
        rows: whole tensors that are saved in this part, by name.
    """
    pieces = [(name, first, as_stored(tensor)) for name, first, tensor in _share(view, part, parts)]
    pieces += [(name, 0, as_stored(tensor)) for name, tensor in (rows or {}).items()]
    # What takes more bytes an element comes first, so that all elements lie where a processor likes them.
    pieces.sort(key=lambda piece: -piece[2].element_size())
    described: list[StoredRows] = []
    end = 0
    for name, first, tensor in pieces:
        code, shape = stored_as(tensor.dtype, tensor.shape)
        described.append(StoredRows(name=name, code=code, shape=shape, first=first, begin=end))
        end += described[-1].nbytes
    data = torch.empty(end, dtype=torch.uint8)
    with torch.no_grad():
        for piece, (_, _, tensor) in zip(described, pieces, strict=True):
            room = data[piece.begin : piece.begin + piece.nbytes].view(tensor.dtype)
            room.view(tensor.shape).copy_(tensor)
    return StatePart(header=header_of(described), data=data)


def _share(view: StateView, part: int, parts: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the rows of a part: name of the tensor, the first row, and the live rows."""
    total = view.nbytes
    begin, end = total * part // parts, total * (part + 1) // parts
    at = 0
    for name, tensor in zip(stored_names(view.manifest), view.tensors, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0 or tensor.dim() == 0:
            if begin <= at < end or (part == 0 and at >= total):
                yield name, 0, tensor
        else:
            each = nbytes // tensor.shape[0]
            first, last = (max(0, min(-(-(edge - at) // each), tensor.shape[0])) for edge in (begin, end))
            if first < last:
                yield name, first, tensor[first:last]
        at += nbytes


def stored_names(manifest: Manifest) -> list[str]:
    """Return what each tensor of a state is called in files: as the model calls it, or by its way through the state.

    No two have a name in common.
    """
    names = [spec.name for spec in manifest.tensors]
    trees = {"optimizer": manifest.optimizer, **{f"extra:{name}": node for name, node in manifest.extra.items()}}
    for prefix, node in trees.items():
        for way, place in tree.ways(node):
            names[place] = ":".join((prefix, ".".join(way))) if way else prefix
    times = Counter(names)
    return [f"{name}#{place}" if times[name] > 1 else name for place, name in enumerate(names)]


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape that files have for a tensor: one that the format has no name for is bytes."""
    code = CODES.get(str(dtype).removeprefix("torch."))
    return (code, tuple(shape)) if code else ("U8", (*shape, dtype.itemsize))


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as files hold it; it shares memory with one whose elements lie one after the other."""
    if str(tensor.dtype).removeprefix("torch.") in CODES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)
