"""Whether nodes have the same data, by their summaries of one numbered micro-batch."""

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


def difference(here: BatchSummary, job: BatchSummary) -> str:
    """Return in what the data here are not the job's, or "" if they are equal or cannot be compared."""
    if not here or not job:
        return ""
    for mine, theirs in zip_longest(here, job):
        if mine is None or theirs is None:
            return f"micro-batch 0 of step 1 has {len(here)} parts, the job's has {len(job)}"
        if (mine.name, mine.form) != (theirs.name, theirs.form):
            return f"{_where(mine)} is {mine.form}, the job's is {theirs.form}"
        if not _equals(mine, theirs):
            return f"{_where(mine)} ({mine.form}) has other values than the job's"
    return ""


def split_by_data(summaries: Sequence[tuple[T, BatchSummary]]) -> list[list[T]]:
    """Return groups with equal data, the largest first. Those whose data cannot be compared are in none."""
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


def _equals(mine: PartSummary, theirs: PartSummary) -> bool:
    if mine.digest != theirs.digest or len(mine.sums) != len(theirs.sums):
        return False
    room = TOLERANCE * max(mine.norm, theirs.norm)
    # A sum that is not a number equals none: the comparison must not be turned round.
    return all(abs(one - other) <= room for one, other in zip(mine.sums, theirs.sums, strict=True))
