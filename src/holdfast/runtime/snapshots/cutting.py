"""Which bytes of the state a member copies: the list of tensors laid end to end, cut into as many parts as members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from holdfast.protocol.names import Count
from holdfast.runtime.moe.holding.shards import LayerSpec

#: parts begin at multiples of it
ALIGNMENT = 64


class PartManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a part's body is: the bytes from `start` on of the state whose `Manifest`, encoded, is `state`.

    Behind them are the rows of these `experts`, (layer, expert), of each those that `specs` says of its layer.
    """

    state: bytes
    start: Count
    specs: tuple[LayerSpec, ...] = ()
    experts: tuple[tuple[Count, Count], ...] = ()


def part_range(nbytes: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a part begins and ends."""
    first, last = (-(-nbytes * number // parts // ALIGNMENT) * ALIGNMENT for number in (part, part + 1))
    return min(first, nbytes), nbytes if part + 1 == parts else min(last, nbytes)


def copy_range(tensors: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
    """Copy the bytes from `start` on, of tensors laid end to end, as many as fit `target`, which is of bytes."""
    for tensor, first, last, at in _overlaps(tensors, start, start + target.numel()):
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        source = flat.reshape(-1).view(torch.uint8)[first:last]
        target[at : at + last - first].copy_(source)


def _overlaps(tensors: Sequence[torch.Tensor], start: int, end: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Yield each tensor that has bytes in a range: which of its own these are, and where in the range they begin."""
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        first, last = max(start - at, 0), min(end - at, size)
        if first < last:
            yield tensor, first, last, at + first - start
        at += size
        if at >= end:
            return
