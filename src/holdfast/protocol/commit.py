"""v: what the commit operation of a step returns, the same on every rank in every bit.

Every rank puts in its part of v, one float64 for each lane and each flag, and gets all parts added up in rank order. A
lane is the sum; a flag is up where every rank raised it. A further lane is one more field of Commit, a further flag one
more member of Flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

from msgspec import Meta

from holdfast.protocol.names import Struct

#: of one step; so that those of all steps of a job are a number that a message can hold
MAX_SAMPLES = 1 << 40


class Flag(StrEnum):
    """What all ranks do together at a step boundary, or none."""

    SWAP = "swap"  # armed to swap to the pending group


class Commit(Struct, frozen=True, kw_only=True):
    """v, or one rank's part of it.

    `grad_square`: squared norm of the reduced gradients, before clipping; a rank's part is its shard's. `loss_sum`: of
    all samples. `samples`: how many were computed. `nonfinite`: how many elements of the gradients are not finite.
    `sample_hashes`: sum of the hashes of all micro-batches whose gradients are in (step_samples); -1: not known.
    `flags`: those that every rank raised; of a part, those that the rank raises.
    """

    grad_square: float
    loss_sum: float
    samples: Annotated[int, Meta(ge=-1, le=MAX_SAMPLES)]
    nonfinite: int
    sample_hashes: int = 0
    flags: tuple[Flag, ...] = ()


#: the lanes and their types (whole numbers are exact up to 2**53), in the order in which they cross the wire
LANES: tuple[tuple[str, type[float] | type[int]], ...] = tuple(
    (name, get_type_hints(Commit)[name]) for name in Commit.__struct_fields__ if name != "flags"
)
_FLAGS = tuple(Flag)
#: returns the values of all lanes of a commit
lanes_of: Callable[[Commit], tuple[float | int, ...]] = attrgetter(*(name for name, _ in LANES))


def to_numbers(part: Commit) -> list[float]:
    """Return what a rank puts into the operation."""
    return [*map(float, lanes_of(part)), *[float(flag in part.flags) for flag in _FLAGS]]


def from_sums(sums: Sequence[float], world: int) -> Commit:
    """Return v from the sums, over `world` ranks, of what each put in.

    Raises:
        ValueError: there are more or fewer than lanes and flags.
    """
    if len(sums) != len(LANES) + len(_FLAGS):
        raise ValueError(f"{len(sums)} sums are not those of {len(LANES)} lanes and {len(_FLAGS)} flags")
    # On every step's way: plain loops, which take microseconds.
    lanes: dict[str, Any] = {
        name: value if kind is float else _whole(value) for (name, kind), value in zip(LANES, sums, strict=False)
    }
    flags = [flag for flag, raised in zip(_FLAGS, sums[len(LANES) :], strict=True) if raised == world]
    return Commit(**lanes, flags=tuple(flags))


def _whole(value: float) -> int:
    """Return a count; -1 for what is none (infinite, no number): it equals no count, and ends no process."""
    return int(value) if value.is_integer() else -1
