"""The interval scheme (DESIGN, Token dispatch): surplus tokens on one line, free capacity on another.

Tokens are sent to the rank of the free capacity at the same position.

Axes: E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import IntArray
from holdfast.planning.dispatch.schedule import DispatchScheme, Match, Surplus, interval_lengths, row_ends, row_sums


class Interval(DispatchScheme):
    """One line over all ranks."""

    name = "interval"

    def match(self, surplus: Surplus) -> Match:
        """See `DispatchScheme.match`."""
        return _Lines(surplus)


@dataclass(frozen=True, slots=True)
class NodeInterval(DispatchScheme):
    """One line within each node first, then one line over all ranks for the tokens that the nodes cannot serve.

    `node_of` `(N,)` is the node of each rank, as numbers that never decrease.
    """

    node_of: IntArray
    name: str = "interval"

    def match(self, surplus: Surplus) -> Match:
        """See `DispatchScheme.match`; raise `BadInputError` if the ranks of a node are not adjacent."""
        if self.node_of.size != surplus.tokens.shape[1] or (np.diff(self.node_of) < 0).any():
            raise BadInputError(f"node_of needs one number per rank, never falling; it is {self.node_of.tolist()}")
        near = _match_within_nodes(surplus, self.node_of)
        far = Surplus(tokens=surplus.tokens - near.tokens, free=surplus.free - near.free)
        return _NodeLines(self.node_of, near, far)


@dataclass(frozen=True, slots=True)
class _Lines(Match):
    surplus: Surplus

    def send_row(self, rank: int) -> IntArray:
        """Return the overlap of the rank's surplus with each rank's free capacity, on one line over all ranks."""
        return _overlap(self.surplus.tokens, rank, self.surplus.free)

    def receive_column(self, rank: int) -> IntArray:
        """Return the overlap of the rank's free capacity with each rank's surplus, on one line over all ranks."""
        return _overlap(self.surplus.free, rank, self.surplus.tokens)


@dataclass(frozen=True, slots=True)
class _NodeLines(Match):
    node_of: IntArray
    near: Surplus
    far: Surplus

    def send_row(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` sends to each rank, `(E, N)`.

        This is the match within the rank's node plus the match of the remaining tokens over all ranks.
        """
        row = _overlap(self.far.tokens, rank, self.far.free)
        inside, first = self._ranks_of_node(rank)
        row[:, inside] += _overlap(self.near.tokens[:, inside], rank - first, self.near.free[:, inside])
        return row

    def receive_column(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` gets from each rank, `(E, N)`.

        This is the match within the rank's node plus the match of the remaining tokens over all ranks.
        """
        column = _overlap(self.far.free, rank, self.far.tokens)
        inside, first = self._ranks_of_node(rank)
        column[:, inside] += _overlap(self.near.free[:, inside], rank - first, self.near.tokens[:, inside])
        return column

    def _ranks_of_node(self, rank: int) -> tuple[slice, int]:
        """Return the ranks of the same node as a slice, and the first of them."""
        first, last = np.searchsorted(self.node_of, [self.node_of[rank], self.node_of[rank] + 1])
        return slice(int(first), int(last)), int(first)


def _overlap(mine: IntArray, rank: int, others: IntArray) -> IntArray:
    """Return how much of this rank's interval on one line overlaps each rank's interval on the other line, `(E, N)`."""
    begin = row_sums(mine[:, :rank])
    end = begin + mine[:, rank : rank + 1]
    # The length of [begin, end) below each point of the other line; differences give the overlaps.
    below = row_ends(others)
    np.minimum(np.maximum(below, begin, out=below), end, out=below)
    return interval_lengths(below, begin)


def _match_within_nodes(surplus: Surplus, node_of: IntArray) -> Surplus:
    """Return the part of the tokens and of the capacity that each node matches within itself, both `(E, N)`."""
    starts = np.flatnonzero(np.r_[True, node_of[1:] != node_of[:-1]])
    sizes = np.diff(np.r_[starts, node_of.size])
    last = starts + sizes - 1
    token_ends, free_ends = row_ends(surplus.tokens), row_ends(surplus.free)
    settled = np.minimum(interval_lengths(token_ends[:, last], 0), interval_lengths(free_ends[:, last], 0))
    return Surplus(
        tokens=_split_matched(surplus.tokens, token_ends, settled, starts, sizes),
        free=_split_matched(surplus.free, free_ends, settled, starts, sizes),
    )


def _split_matched(amounts: IntArray, ends: IntArray, settled: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """Return the first `settled` `(E, nodes)` units of each node, divided among its ranks' `amounts` `(E, N)`."""
    before = ends - amounts
    left = np.repeat(settled + before[:, starts], sizes, axis=1)
    left -= before
    return np.minimum(np.maximum(left, 0, out=left), amounts, out=left)
