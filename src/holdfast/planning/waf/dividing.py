"""Eq. 5: the best division of nodes among jobs, and the next best one, by exact dynamic programming.

`S(i, j)` is the best value of the first i jobs with j nodes. Idle nodes are one more part with value 0 (errata 1). The
value of the best other division is computed with it, so that each plan comes with the alternative that was given up. If
several divisions have the same value, a job keeps its previous nodes.

A number of nodes is left out if a job gains no more with it than with fewer: the remaining nodes may gain something
elsewhere. So the work grows with the numbers that are useful. A step of many micro-batches has few useful numbers,
since its rounds are whole.

Axes: m jobs, n nodes. `(2, n + 1)` arrays are indexed by the number of nodes. Row 0 is the best value and row 1 the
next best; -inf marks a missing value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray, indices

#: The numbers of nodes for which sums are computed together.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Split:
    """One way to end a division of nodes among groups of jobs."""

    #: The value of the division.
    value: float
    #: The nodes of the last group.
    nodes: int
    #: The row of the first group that goes with it: 0 for its best values, 1 for its next best.
    rest: int
    #: The row of the last group.
    last: int = 0


@dataclass(frozen=True, slots=True)
class DivisionTable:
    """All values `S` of some jobs, added one after the other."""

    #: `(m + 1, 2, n + 1)` values of the first 0..m jobs.
    best: FloatArray
    #: `(m, 2, n + 1)` nodes of the last of these jobs.
    took: IntArray
    #: `(m, 2, n + 1)` the row of the jobs before it that goes with `took`.
    rest: IntArray

    def trace(self, jobs: int, nodes: int, row: int = 0) -> list[int]:
        """Return the nodes of each of the first `jobs` if they share `nodes`; row 1 gives the next best division."""
        sizes: list[int] = []
        for job in range(jobs - 1, -1, -1):
            sizes.append(int(self.took[job, row, nodes]))
            row = int(self.rest[job, row, nodes])
            nodes -= sizes[-1]
        return sizes[::-1]


def build_division_table(
    rewards: Sequence[FloatArray], nodes: int, had: Sequence[int], *, idle: bool, next_best: bool = True
) -> DivisionTable:
    """Return the values `S` of the jobs, in O(m n k) for k <= n useful numbers of nodes.

    Args:
        rewards: `(n + 1,)` of each job.
        nodes: The number of nodes n.
        had: The present nodes of each job, preferred among equal values.
        idle: Whether nodes may stay idle; if not, the jobs have all of them.
        next_best: Whether to compute row 1, which takes most of the time.
    """
    best = np.full((len(rewards) + 1, 2, nodes + 1), -np.inf)
    best[0, 0, : nodes + 1 if idle else 1] = 0.0
    took = np.zeros((len(rewards), 2, nodes + 1), dtype=np.int64)
    rest = np.zeros_like(took)
    for job, reward in enumerate(rewards):
        if next_best:
            _add_job(best[job], reward, had[job], (best[job + 1], took[job], rest[job]))
        else:
            _add_job_best_only(best[job, 0], reward, had[job], (best[job + 1, 0], took[job, 0]))
    return DivisionTable(best, took, rest)


def combine_groups(first: FloatArray, last: FloatArray) -> FloatArray:
    """Return the best and the next best value of two groups of jobs together, for 0..n nodes.

    Both arguments and the result are `(2, n + 1)`: row 0 is the best value and row 1 the next best, -inf if there is
    none.
    """
    sums = _pairwise_sums(first[0], last[0])
    best, second = _top_two(sums)
    others = (_pairwise_sums(first[1], last[0]).max(axis=1), _pairwise_sums(first[0], last[1]).max(axis=1))
    return np.stack([best, np.maximum(second, np.maximum(*others))])


def best_splits(first: FloatArray, last: FloatArray, nodes: int, preferred: int = 0) -> list[Split]:
    """Return the best and the next best way to share `nodes` between two groups, in O(n).

    The list has fewer than two ways if there are no more; a way with the value -inf is impossible.

    Args:
        first: `(2, n + 1)` best and next best values of the first group.
        last: `(2, n + 1)` best and next best values of the last group.
        nodes: The nodes to share.
        preferred: The nodes of the last group that win among equal values; otherwise the fewest win.
    """
    found: list[Split] = []
    for rest, row in ((0, 0), (1, 0), (0, 1)):
        sums = first[rest, nodes::-1] + last[row, : nodes + 1]
        leading = np.argpartition(-sums, min(1, nodes))[:2].tolist()
        leading += [int(sums.argmax()), min(preferred, nodes)]
        found += [Split(float(sums[k]), int(k), rest, row) for k in set(leading)]
    found.sort(key=lambda pick: (-pick.value, pick.nodes != preferred, pick.nodes, pick.rest, pick.last))
    return found[:2]


def useful_sizes(reward: FloatArray, had: int) -> IntArray:
    """Return the numbers of nodes with more reward than every smaller number, ascending.

    `had` comes first, even if it is not useful; it is left out if it is not allowed (-inf) or not in `reward`.
    """
    before = np.concatenate([[-np.inf], np.maximum.accumulate(reward)[:-1]])
    more = np.flatnonzero(reward > before)
    if had < reward.size and reward[had] > -np.inf:
        # It comes first, so that it wins among equals.
        more = np.concatenate([[had], more[more != had]])
    return more


def single_job_values(reward: FloatArray) -> FloatArray:
    """Return a single job's `(2, n + 1)` for `best_splits` as the last group, if it takes exactly that many nodes."""
    return np.stack([reward, np.full(reward.size, -np.inf)])


def _add_job(
    before: FloatArray, reward: FloatArray, preferred: int, into: tuple[FloatArray, IntArray, IntArray]
) -> None:
    """Add a job with each of its useful numbers of nodes to the jobs before it, whose values are `before` `(2, n + 1)`.

    Write the best and the next best values, its nodes and the rows of the others to the tables `into`.
    """
    best, took, rest = into
    worth = useful_sizes(reward, preferred)
    firsts, seconds = _shifted_view(before[0]), _shifted_view(before[1])
    # With j nodes a job has at most j. So a block of rows needs no later columns, and fits into the processor's cache.
    for begin in range(0, reward.size, _BLOCK):
        block = slice(begin, min(begin + _BLOCK, reward.size))
        order = worth[worth < block.stop]
        if not order.size:
            continue
        sums = firsts[block][:, order] + reward[order]
        at = sums.argmax(axis=1)
        rows = indices(at.size)
        best[0, block], took[0, block] = sums[rows, at], order[at]
        sums[rows, at] = -np.inf
        second = sums.argmax(axis=1)
        others = seconds[block][:, order] + reward[order]
        third = others.argmax(axis=1)
        worse = others[rows, third] > sums[rows, second]
        best[1, block] = np.where(worse, others[rows, third], sums[rows, second])
        took[1, block] = np.where(worse, order[third], order[second])
        rest[1, block] = worse


def _add_job_best_only(
    before: FloatArray, reward: FloatArray, preferred: int, into: tuple[FloatArray, IntArray]
) -> None:
    """Add a job as `_add_job` does, without the next best values; this makes no table of all pairs of numbers.

    `before` is `(n + 1,)`. The values and the job's nodes are written to `into`, whose values must be -inf before.
    """
    best, took = into
    for number in useful_sizes(reward, preferred).tolist():
        offered = before[: before.size - number] + reward[number]
        here, at = best[number:], took[number:]
        better = offered > here
        np.copyto(here, offered, where=better)
        at[better] = number


def _pairwise_sums(first: FloatArray, last: FloatArray) -> FloatArray:
    """Return `first[j - k] + last[k]` `(n + 1, n + 1)` by j and k; -inf if k > j."""
    return _shifted_view(first) + last


def _shifted_view(values: FloatArray) -> FloatArray:
    """Return `values[j - k]` `(n + 1, n + 1)` by j and k, as a view; -inf if k > j."""
    nodes = values.size - 1
    padded = np.concatenate([np.full(nodes, -np.inf), values])
    step = padded.strides[0]
    return np.lib.stride_tricks.as_strided(
        padded[nodes:], shape=(nodes + 1, nodes + 1), strides=(step, -step), writeable=False
    )


def _top_two(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the largest and the second largest value of each row; `sums` is changed."""
    rows = indices(len(sums))
    at = sums.argmax(axis=1)
    best = sums[rows, at]
    sums[rows, at] = -np.inf
    return best, sums.max(axis=1)
