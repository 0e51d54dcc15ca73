"""Division of the state into parts: the concatenated bytes of all tensors, one part per member."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from holdfast.protocol.names import Count
from holdfast.runtime.moe.expert_shards.shards import LayerSpec

#: parts start at multiples of this
ALIGNMENT = 64


class PartManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The content of a part: a range of the dense state, then the rows of experts."""

    #: the encoded `Manifest` of the dense state
    state: bytes
    #: offset of the part in the dense state
    start: Count
    #: the tensors of each layer's experts
    specs: tuple[LayerSpec, ...] = ()
    #: (layer, expert) of the rows after the dense state
    experts: tuple[tuple[Count, Count], ...] = ()


def part_range(nbytes: int, part: int, parts: int) -> tuple[int, int]:
    """Return start and end, in bytes, of one of `parts` nearly equal parts of a state of `nbytes`. Starts are multiples
    of `ALIGNMENT`; a part may be empty.
    """
    first, last = (-(-nbytes * number // parts // ALIGNMENT) * ALIGNMENT for number in (part, part + 1))
    return min(first, nbytes), nbytes if part + 1 == parts else min(last, nbytes)


def copy_range(tensors: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
    """Copy a range of concatenated tensors, from byte `start`, into a tensor of bytes of the same length."""
    for tensor, first, last, at in _overlaps(tensors, start, start + target.numel()):
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        source = flat.reshape(-1).view(torch.uint8)[first:last]
        target[at : at + last - first].copy_(source)


def _overlaps(tensors: Sequence[torch.Tensor], start: int, end: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Yield each tensor of a concatenation that overlaps a range of bytes, with start and end of the overlap within the
    tensor, and its start within the range.
    """
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        first, last = max(start - at, 0), min(end - at, size)
        if first < last:
            yield tensor, first, last, at + first - start
        at += size
        if at >= end:
            return
