"""Boxes: the elements of a tensor that a file or a worker has. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Box(NamedTuple):
    """A box of elements of a tensor: the first element and the number of elements along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The index after the last element, along each dimension."""
        return tuple(first + size for first, size in zip(self.offset, self.shape, strict=True))

    def fits_into(self, whole: Sequence[int]) -> bool:
        """Return whether the box lies within a tensor of this shape."""
        return len(whole) == len(self.shape) and all(end <= size for end, size in zip(self.end, whole, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the common elements, or None if the boxes do not overlap."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(ends) - first for first, *ends in zip(offset, self.end, other.end, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, other: Box) -> tuple[slice, ...]:
        """Return its position within another box that contains it."""
        starts = [first - base for first, base in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def split_into_slabs(boxes: Sequence[Box], dimension: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the ranges of a dimension between consecutive edges of boxes, with the indices of the boxes in each.

    The ranges go from the first edge to the last.
    """
    begin: dict[int, list[int]] = {}
    leave: dict[int, list[int]] = {}
    for number, box in enumerate(boxes):
        begin.setdefault(box.offset[dimension], []).append(number)
        leave.setdefault(box.end[dimension], []).append(number)
    edges = sorted(begin.keys() | leave.keys())
    inside: set[int] = set()
    for start, stop in pairwise(edges):
        inside.difference_update(leave.get(start, ()))
        inside.update(begin.get(start, ()))
        yield start, stop, sorted(inside)


def cover_exactly(boxes: Sequence[Box], whole: Sequence[int]) -> bool:
    """Return whether boxes within a tensor of shape `whole` cover it, each element once.

    For a tensor without elements, whether there is any box.
    """
    if not math.prod(whole):
        return bool(boxes)
    some = [box for box in boxes if box.size]
    return sum(box.size for box in some) == math.prod(whole) and _cover_exactly(some, whole, 0)


def _cover_exactly(boxes: Sequence[Box], whole: Sequence[int], dimension: int) -> bool:
    """Return whether boxes cover the tensor's dimensions from `dimension` on, each element once. False without boxes.

    Each box must have elements, and lie within the tensor of shape `whole`. Each range between the boxes' edges is
    checked in the next dimension.
    """
    if len(boxes) == 1:
        return boxes[0].shape[dimension:] == tuple(whole[dimension:])
    if not boxes or dimension == len(whole):
        return False
    end = 0
    for start, stop, inside in split_into_slabs(boxes, dimension):
        if start != end or not _cover_exactly([boxes[number] for number in inside], whole, dimension + 1):
            return False
        end = stop
    return end == whole[dimension]
