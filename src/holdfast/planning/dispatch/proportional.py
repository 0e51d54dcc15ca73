"""Algorithm 1 of Lazarus: every rank splits its surplus over all free capacity in proportion, in integers.

The paper leaves out the rounding (ERRATA, Lazarus 5). If each rank rounds its shares alone, capacities are exceeded. So
tokens are dealt like cards: surplus token p of an expert goes into pile p mod K. The piles, one after the other, fill
the line of free capacity. Every token is sent once and no capacity is exceeded. Each rank's consecutive tokens spread
evenly over the whole line. The overlap of two ranks' intervals has a closed form, so a row or a column costs O(E * N).

Axes: E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import IntArray
from holdfast.planning.dispatch.schedule import DispatchScheme, Match, Surplus, interval_lengths, row_ends


class Proportional(DispatchScheme):
    """Deals every rank's surplus over all free capacity; K piles, one per rank with free capacity."""

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
    #: `(E, N)` the end of each rank's interval on the line of surplus tokens.
    token_ends: IntArray
    #: `(E, N)` the end of each rank's interval on the line of free capacity.
    free_ends: IntArray
    #: `(E, 1)` the number of piles of each expert.
    piles: IntArray

    def send_row(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` sends to each rank, `(E, N)`.

        It counts how much of the rank's dealt surplus lies within each rank's capacity.
        """
        start, stop = _rank_interval(self.token_ends, rank)
        cut = _locate_cut(self.free_ends, self.token_ends[:, -1:], self.piles)
        below = _count_below(_count_rounds(stop, self.piles), cut) - _count_below(_count_rounds(start, self.piles), cut)
        return interval_lengths(below, 0)

    def receive_column(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` gets from each rank, `(E, N)`.

        It counts the dealt tokens of each rank that lie within this rank's capacity.
        """
        start, stop = _rank_interval(self.free_ends, rank)
        total = self.token_ends[:, -1:]
        dealt = _count_rounds(self.token_ends, self.piles)
        below = _count_below(dealt, _locate_cut(stop, total, self.piles)) - _count_below(
            dealt, _locate_cut(start, total, self.piles)
        )
        return interval_lengths(below, 0)


def _rank_interval(ends: IntArray, rank: int) -> tuple[IntArray, IntArray]:
    """Return the start and the end of the rank's interval on a line, `(E, 1)` each."""
    stop = ends[:, rank : rank + 1]
    start = ends[:, rank - 1 : rank] if rank else np.zeros_like(stop)
    return start, stop


def _count_rounds(tokens: IntArray, piles: IntArray) -> tuple[IntArray, IntArray]:
    """Return the full rounds over all piles after the first `tokens`, and the number of piles with one more token."""
    rounds = tokens // piles
    return rounds, tokens - rounds * piles


def _locate_cut(target: IntArray, total: IntArray, piles: IntArray) -> tuple[IntArray, IntArray]:
    """Return the position of `target` on the line: the number of full piles below it, and its height in the next pile.

    The heights of the piles differ by at most one: pile v < total % piles has one token more.
    """
    low, tall = np.divmod(total, piles)
    in_tall_piles = tall * (low + 1)
    in_tall = target < in_tall_piles
    rest = target - ~in_tall * in_tall_piles
    # Divide once, by the height of the piles at the cut.
    height = np.maximum(low + in_tall, 1)
    full = rest // height
    rest -= full * height
    full += ~in_tall * tall
    return full, rest


def _count_below(dealt: tuple[IntArray, IntArray], cut: tuple[IntArray, IntArray]) -> IntArray:
    """Count the tokens among the first `dealt` that lie below the `cut`, over all piles."""
    (rounds, more), (full, height) = dealt, cut
    # Piles 0 .. full-1 count all their tokens; pile `full` counts at most `height`.
    return rounds * full + np.minimum(more, full) + np.minimum(rounds + (more > full), height)
