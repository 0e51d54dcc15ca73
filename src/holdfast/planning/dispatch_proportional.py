"""Algorithm 1 of Lazarus: every rank splits its surplus over all free capacity in proportion, in integers.

The paper leaves out the rounding (ERRATA, Lazarus 5). Rounding each rank's shares on its own breaks the capacities, so
tokens are dealt like cards: surplus token p of an expert goes into pile p mod K, and the piles, one after the other,
fill the line of free capacity. That is a bijection (every token once, no capacity exceeded) that spreads each rank's
consecutive tokens evenly over the whole line. Where a rank's stretch meets another's is counted in closed form,
so a row or a column costs O(E * N).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import IntArray
from holdfast.planning.dispatch import DispatchScheme, Match, Surplus


class Proportional(DispatchScheme):
    """Deal every rank's surplus over all free capacity; K piles, one per rank with free capacity."""

    name = "proportional"

    def match(self, surplus: Surplus) -> Match:
        """See `DispatchScheme.match`."""
        return _Piles(
            token_ends=np.cumsum(surplus.tokens, axis=1),
            free_ends=np.cumsum(surplus.free, axis=1),
            piles=np.maximum((surplus.free > 0).sum(axis=1, keepdims=True), 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piles(Match):
    #: `[E, N]` where each rank's stretch ends on the line of surplus tokens, and on that of free capacity.
    token_ends: IntArray
    free_ends: IntArray
    #: `[E, 1]`
    piles: IntArray

    def send_row(self, rank: int) -> IntArray:
        start, stop = _stretch(self.token_ends, rank)
        total = self.token_ends[:, -1:]
        ends = self.free_ends
        below = _count(stop, ends, total, self.piles) - _count(start, ends, total, self.piles)
        return np.diff(below, axis=1, prepend=0)

    def receive_column(self, rank: int) -> IntArray:
        start, stop = _stretch(self.free_ends, rank)
        total = self.token_ends[:, -1:]
        ends = self.token_ends
        below = _count(ends, stop, total, self.piles) - _count(ends, start, total, self.piles)
        return np.diff(below, axis=1, prepend=0)


def _stretch(ends: IntArray, rank: int) -> tuple[IntArray, IntArray]:
    """Return where the rank's stretch of a line starts and stops, `[E, 1]` each."""
    stop = ends[:, rank : rank + 1]
    start = ends[:, rank - 1 : rank] if rank else np.zeros_like(stop)
    return start, stop


def _count(source: IntArray, target: IntArray, total: IntArray, piles: IntArray) -> IntArray:
    """Count tokens among the first *source* that end up within the first *target* of the line.

    The piles' heights differ by at most one: pile v < total % piles has one token more. A pile counts
    the tokens dealt to it so far that lie below the height at which *target* cuts it.
    """
    low, tall = np.divmod(total, piles)
    height = low + 1
    rounds, dealt = np.divmod(source, piles)
    in_tall = target < tall * height
    past_tall = np.maximum(target - tall * height, 0)
    full = np.where(in_tall, target // height, tall + past_tall // np.maximum(low, 1))
    cut = np.where(in_tall, target % height, past_tall % np.maximum(low, 1))
    # Piles 0 .. full-1 count all they got; pile `full` counts at most `cut`.
    whole = rounds * full + np.minimum(dealt, full)
    partial = np.minimum(rounds + (dealt > full), cut)
    return whole + partial
