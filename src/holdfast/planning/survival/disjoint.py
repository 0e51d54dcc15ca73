"""Disjoint host sets: the exact probability that a loss takes one of them completely, from their sizes alone.

Axes: N nodes, S sets of nodes, K the most lost nodes.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.survival.odds import swept_shares
from holdfast.planning.survival.sweep import LossShares


def disjoint_sizes(sets: BoolArray) -> IntArray | None:
    """Return the sizes of the `sets` `(S, N)`, ascending; None if two of them share a node."""
    if int(sets.sum(axis=0).max(initial=0)) > 1:
        return None
    return np.sort(sets.sum(axis=1))


def some_disjoint_sizes(sets: BoolArray) -> IntArray:
    """Return the sizes of some of the `sets` `(S, N)` that share no node, small ones first.

    A loss that takes one of these sets completely is fatal. So their fatal share is a lower bound.
    """
    taken = np.zeros(sets.shape[1], dtype=np.bool_)
    sizes: list[int] = []
    for members in sets[np.argsort(sets.sum(axis=1), kind="stable")]:
        if not (members & taken).any():
            taken |= members
            sizes.append(int(members.sum()))
    return np.array(sizes, dtype=np.int64)


def survives_no_less(sizes: IntArray, others: IntArray) -> bool:
    """Return whether disjoint sets of `sizes` `(S,)` survive every number of lost nodes at least as likely as `others`.

    This holds if they are not more sets, and each is at least as large as a different one of the others.
    """
    few, many = np.sort(sizes), np.sort(others)
    return few.size <= many.size and bool((few >= many[: few.size]).all())


def losses_of_disjoint(sizes: IntArray, nodes: int, most_lost: int, rates: FloatArray | None = None) -> LossShares:
    """Return the shares of losses of 0, 1, ..., `most_lost` of `nodes` nodes, for disjoint sets of `sizes` `(S,)`.

    `rates` `(N,)` are the rates of the nodes of the first set, then of the second, and so on, then of the nodes in no
    set; None if nodes are alike.

    The nodes are swept one by one. The odds distinguish three states. `alive`: all sets so far have a survivor,
    including the present one. `gone`: the present set has no survivor so far. `fatal`: one set has no survivor.
    """
    alive: FloatArray = np.where(indices(most_lost + 1) == 0, 1.0, 0.0)
    fatal: FloatArray = np.zeros(most_lost + 1)
    shares = swept_shares(rates, indices(nodes), most_lost)
    for size in sizes.tolist():
        gone, alive = alive, np.zeros(most_lost + 1)
        for share in islice(shares, size):
            stays = 1.0 - share
            fatal = _sweep_node(fatal, stays, share)
            alive = _sweep_node(alive, stays, share) + gone * stays
            gone = _shift_losses(gone) * share
        fatal = fatal + gone
    for share in shares:
        fatal, alive = _sweep_node(fatal, 1.0 - share, share), _sweep_node(alive, 1.0 - share, share)
    whole = fatal + alive
    return LossShares(fatal=fatal / whole, survived=alive / whole)


def _sweep_node(odds: FloatArray, stays: FloatArray, share: FloatArray) -> FloatArray:
    """Return the odds after one more node, which is lost with probability `share`."""
    return odds * stays + _shift_losses(odds) * share


def _shift_losses(odds: FloatArray) -> FloatArray:
    """Return `odds`, indexed by the number of lost nodes, for one more lost node: entry k is entry k - 1 of before.

    Entry 0 becomes 0, and the last entry is dropped.
    """
    moved = np.zeros_like(odds)
    moved[1:] = odds[:-1]
    return moved
