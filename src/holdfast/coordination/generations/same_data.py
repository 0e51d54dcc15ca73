"""Comparison of the nodes' data, by their summaries of one numbered micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

from holdfast.protocol.batch_summary import BatchSummary, PartSummary

T = TypeVar("T")

#: Sums may differ by this share of the norm. Float noise between processors is far below it. The sums of other data
#: differ by about the norm.
TOLERANCE = 0.02

ADVICE = (
    "every node must make or read the same data: call torch.manual_seed(...) before random data are made, and read the "
    "same files everywhere"
)


def difference(here: BatchSummary, other: BatchSummary, whose: str = "the job's") -> str:
    """Return how the data here differ from others, or "" if they are equal or one is unknown.

    Compared are the parts' names, forms, digests and, within a tolerance, sums.

    Args:
        whose: the name of the other micro-batch in the result.
    """
    if not here or not other:
        return ""
    for mine, theirs in zip_longest(here, other):
        if mine is None or theirs is None:
            return f"micro-batch 0 of step 1 has {len(here)} parts, {whose} has {len(other)}"
        if (mine.name, mine.form) != (theirs.name, theirs.form):
            there = theirs.form if mine.name == theirs.name else f"part {theirs.name}, {theirs.form}"
            return f"{_where(mine)} is {mine.form}, {whose} is {there}"
        if not _is_equal(mine, theirs):
            return f"{_where(mine)} ({mine.form}) has other values than {whose}"
    return ""


def split_by_data(summaries: Sequence[tuple[T, BatchSummary]]) -> list[list[T]]:
    """Return groups with equal data, the largest first. If a summary is empty, its owner is in no group."""
    groups: list[tuple[BatchSummary, list[T]]] = []
    for one, summary in summaries:
        if not summary:
            continue
        same = next((members for known, members in groups if not difference(summary, known)), None)
        if same is None:
            groups.append((summary, [one]))
        else:
            same.append(one)
    return sorted((members for _, members in groups), key=len, reverse=True)


def _where(part: PartSummary) -> str:
    return f"part {part.name} of micro-batch 0 of step 1"


def _is_equal(mine: PartSummary, theirs: PartSummary) -> bool:
    """Return whether two parts have equal values: the same digest, and sums that differ by float noise at most."""
    if mine.digest != theirs.digest or len(mine.sums) != len(theirs.sums):
        return False
    room = TOLERANCE * max(mine.norm, theirs.norm)
    # Not `not any(... > room)`: a sum that is NaN equals no other.
    return all(abs(one - other) <= room for one, other in zip(mine.sums, theirs.sums, strict=True))
