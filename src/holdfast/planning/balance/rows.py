"""Assigns experts to the rows of a pattern of hosts, so that the nodes have even work in every layer.

A pattern survives a loss if each of its host sets keeps a node, whichever expert has which set. An expert needs enough
replicas for its set. So hot and cold experts can be mixed at no cost in recovery.

Axes: L layers, E experts, N nodes, S distinct host sets, K sizes of host sets.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, distinct_rows, indices, stable_argsort
from holdfast.planning.balance.swaps import assign_rows_to_sets, swap_rows


def assign_rows_by_work(pattern: BoolArray, replicas: IntArray, work: FloatArray, slots: IntArray) -> IntArray:
    """Return the row of the `pattern` `(E, N)` that each expert takes, `(L, E)`.

    The experts of each layer choose in turn, the most `work` `(L, E)` per replica first. An expert chooses among the
    host sets for which it has enough `replicas` `(L, E)`, and which leave enough for the others. It takes the set of
    nodes with the least work so far. `slots` `(N,)` that the pattern leaves free count as filled with the remaining
    work. Swaps then even out the rest.
    """
    layers, experts = replicas.shape
    sets, set_of = distinct_rows(pattern)
    base = estimate_fill_work(pattern, replicas, work, slots)
    choice = _SetChooser(sets, set_of, replicas, base)
    order = np.argsort(-work, axis=1, kind="stable")
    layer = indices(layers)
    chosen = np.empty_like(replicas)
    for turn in range(experts):
        expert = order[:, turn]
        chosen[layer, expert] = choice.choose_sets(replicas[layer, expert], work[layer, expert])
    rows = assign_rows_to_sets(chosen, set_of)
    return swap_rows(pattern, rows, replicas, work, base, np.zeros(len(rows)))


def estimate_fill_work(pattern: BoolArray, replicas: IntArray, work: FloatArray, slots: IntArray) -> FloatArray:
    """Estimate the work `(L, N)` of the replicas that a `pattern` `(E, N)` does not place, spread over free slots.

    `slots` `(N,)` counts all slots, also those that the pattern uses. `work` `(L, E)` is per replica. Experts are
    assumed to take rows in the order of their `replicas` `(L, E)`: the one with the fewest takes the row with the
    fewest nodes.
    """
    free = slots - pattern.sum(axis=0)
    sizes = np.sort(pattern.sum(axis=1))
    by_rank = stable_argsort(replicas)
    left = np.take_along_axis((replicas * work), by_rank, axis=1) - sizes * np.take_along_axis(work, by_rank, axis=1)
    return left.sum(axis=1)[:, None] * (free / max(int(free.sum()), 1))


class _SetChooser:
    """The host sets that no expert has chosen yet, by layer, and their nodes' work."""

    def __init__(self, sets: BoolArray, set_of: IntArray, replicas: IntArray, work: FloatArray) -> None:
        """Start with nodes that already have `work` `(L, N)`."""
        members = sets.astype(np.float64)
        number = np.bincount(set_of, minlength=len(sets))
        size = sets.sum(axis=1)
        sizes, self._kind = np.unique(size, return_inverse=True)
        self._sizes = sizes
        #: `(L, S)` rows with each set that no expert has chosen yet. `_work` is the mean work of the nodes of each set.
        self._left = np.repeat(number[None, :], len(replicas), axis=0)
        self._work = work @ members.T / size
        #: `(S, S)` the share of a replica's work by which the mean of one set rises if another set gets the replica
        self._share = (members @ members.T) / size
        #: `(L, K)` experts with enough replicas for a size, beyond the number that rows of at least that size still
        #: need
        enough = (replicas[:, :, None] >= sizes).sum(axis=1)
        self._spare = enough - (size[set_of][:, None] >= sizes).sum(axis=0)
        self._layer = indices(len(replicas))
        self._kinds = indices(sizes.size)

    def choose_sets(self, replicas: IntArray, work: FloatArray) -> IntArray:
        """Choose a host set for one expert of each layer, and count it as taken; return the sets `(L,)`.

        It is the free set of nodes with the least work so far, no larger than the expert's `replicas` `(L,)`. If
        otherwise too few experts would fit the larger sets, small sets are excluded. `work` `(L,)` is per replica.
        """
        largest = np.searchsorted(self._sizes, replicas, side="right") - 1
        tight = (self._spare == 0) & (self._kinds <= largest[:, None])
        smallest = np.where(tight, self._kinds, 0).max(axis=1)
        may = (self._kind >= smallest[:, None]) & (self._kind <= largest[:, None]) & (self._left > 0)
        chosen = np.where(may, self._work, np.inf).argmin(axis=1)
        self._left[self._layer, chosen] -= 1
        self._work += work[:, None] * self._share[chosen]
        self._spare -= (self._kinds > self._kind[chosen][:, None]) & (self._kinds <= largest[:, None])
        return chosen
