"""Algorithm 1 of Lazarus: every rank splits its surplus over all free capacity in proportion, in integers.

The paper leaves out the rounding (ERRATA, Lazarus 5). Rounding each rank's shares on its own breaks the capacities, so
tokens are dealt like cards: surplus token p of an expert goes into pile p mod K, and the piles, one after the other,
fill the line of free capacity. That is a bijection (every token once, no capacity exceeded) that spreads each rank's
consecutive tokens evenly over the whole line. Where a rank's stretch meets another's is counted in closed form,
so a row or a column costs O(E * N).

Axes: E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import IntArray
from holdfast.planning.dispatch.schedule import DispatchScheme, Match, Surplus, row_ends, stretches


class Proportional(DispatchScheme):
    """Deal every rank's surplus over all free capacity; K piles, one per rank with free capacity."""

    name = "proportional"

    def match(self, surplus: Surplus) -> Match:
        """See `DispatchScheme.match`."""
        return _Piles(
            token_ends=row_ends(surplus.tokens),
            free_ends=row_ends(surplus.free),
            piles=np.maximum((surplus.free > 0).sum(axis=1, keepdims=True, dtype=surplus.free.dtype), 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piles(Match):
    #: `(E, N)` where each rank's stretch ends on the line of surplus tokens, and on that of free capacity.
    token_ends: IntArray
    free_ends: IntArray
    #: `(E, 1)`
    piles: IntArray

    def send_row(self, rank: int) -> IntArray:
        start, stop = _stretch(self.token_ends, rank)
        cut = _cut(self.free_ends, self.token_ends[:, -1:], self.piles)
        below = _below(_deal(stop, self.piles), cut) - _below(_deal(start, self.piles), cut)
        return stretches(below, 0)

    def receive_column(self, rank: int) -> IntArray:
        start, stop = _stretch(self.free_ends, rank)
        total = self.token_ends[:, -1:]
        dealt = _deal(self.token_ends, self.piles)
        below = _below(dealt, _cut(stop, total, self.piles)) - _below(dealt, _cut(start, total, self.piles))
        return stretches(below, 0)


def _stretch(ends: IntArray, rank: int) -> tuple[IntArray, IntArray]:
    """Return where the rank's stretch of a line starts and stops, `(E, 1)` each."""
    stop = ends[:, rank : rank + 1]
    start = ends[:, rank - 1 : rank] if rank else np.zeros_like(stop)
    return start, stop


def _deal(tokens: IntArray, piles: IntArray) -> tuple[IntArray, IntArray]:
    """Return how many rounds over all piles the first `tokens` make, and how many piles have got one more."""
    rounds = tokens // piles
    return rounds, tokens - rounds * piles


def _cut(target: IntArray, total: IntArray, piles: IntArray) -> tuple[IntArray, IntArray]:
    """Return how many whole piles lie within the first `target` of the line, and how much of the next one.

    The piles' heights differ by at most one: pile v < total % piles has one token more.
    """
    low, tall = np.divmod(total, piles)
    in_tall_piles = tall * (low + 1)
    in_tall = target < in_tall_piles
    rest = target - ~in_tall * in_tall_piles
    # One division by the height of the piles that the cut is in.
    height = np.maximum(low + in_tall, 1)
    full = rest // height
    rest -= full * height
    full += ~in_tall * tall
    return full, rest


def _below(dealt: tuple[IntArray, IntArray], cut: tuple[IntArray, IntArray]) -> IntArray:
    """Count tokens among the first `dealt` that end up below the `cut`: in each pile those dealt to it so far."""
    (rounds, more), (full, height) = dealt, cut
    # Piles 0 .. full-1 count all they got; pile `full` counts at most `height`.
    return rounds * full + np.minimum(more, full) + np.minimum(rounds + (more > full), height)
