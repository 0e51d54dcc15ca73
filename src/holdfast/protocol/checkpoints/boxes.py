"""Boxes: which elements of a tensor a file has, or a worker. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Box(NamedTuple):
    """Some elements of a tensor: along each dimension, the first one and how many."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Box:
        """Return that of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Along each dimension, what follows the last one."""
        return tuple(first + size for first, size in zip(self.offset, self.shape, strict=True))

    def within(self, whole: Sequence[int]) -> bool:
        """Tell whether a tensor of this shape has it."""
        return len(whole) == len(self.shape) and all(end <= size for end, size in zip(self.end, whole, strict=True))

    def common(self, other: Box) -> Box | None:
        """Return what both have of one tensor, None where that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(ends) - first for first, *ends in zip(offset, self.end, other.end, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def seen_from(self, other: Box) -> tuple[slice, ...]:
        """Return where it lies in what another one has, which has all of it."""
        starts = [first - base for first, base in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def slabs(boxes: Sequence[Box], dimension: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the ranges of a dimension between two edges of boxes, from the first edge to the last, and who is in each.

    Those are given by their numbers, in the boxes' order.
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


def make_up(boxes: Sequence[Box], whole: Sequence[int]) -> bool:
    """Tell whether boxes, all of them within a tensor, are all of it, each element once."""
    if not math.prod(whole):
        return bool(boxes)
    some = [box for box in boxes if box.size]
    return sum(box.size for box in some) == math.prod(whole) and _make_up(some, whole, 0)


def _make_up(boxes: Sequence[Box], whole: Sequence[int], dimension: int) -> bool:
    if len(boxes) == 1:
        return boxes[0].shape[dimension:] == tuple(whole[dimension:])
    if not boxes or dimension == len(whole):
        return False
    end = 0
    for start, stop, inside in slabs(boxes, dimension):
        if start != end or not _make_up([boxes[number] for number in inside], whole, dimension + 1):
            return False
        end = stop
    return end == whole[dimension]
