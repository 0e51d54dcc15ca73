"""The exact probability that the loss of k random nodes is fatal, by one sweep over the nodes.

The sweep decides for one node after the other whether it stays or is lost. Of the nodes behind, only the `front`
matters: the host sets that have lost every node so far, and which of their nodes are still ahead.

If host sets are runs of consecutive nodes, as spread makes them, there are as many fronts as the longest run has nodes.
Disjoint sets have two fronts. Both hold on any number of nodes. Sets that overlap in a complex way have too many
fronts: then the sweep gives up, or the caller counts only a few lost nodes.

Axes: N nodes, S sets of nodes, K the most lost nodes, M nodes of a set's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.survival.odds import swept_shares

#: The nodes still ahead of each host set that lost all nodes so far; node p in the sweep is bit p. No entry contains
#: another one.
Front = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShares:
    """Shares of the losses of 0, 1, ..., K random nodes, `(K + 1,)` each; together they are 1.

    Both are sums of positive terms, so each is accurate to about 12 digits, however small it is.
    """

    fatal: FloatArray
    survived: FloatArray


def sweep(sets: BoolArray, most_lost: int, effort: int, rates: FloatArray | None = None) -> LossShares | None:
    """Return the shares of losses of up to `most_lost` nodes that are fatal, and that are survived.

    A loss is survived if every one of the `sets` `(S, N)` keeps a live node. `rates` `(N,)` are as for `swept_shares`.
    The result is None if it takes more than `effort`, about in microseconds.
    """
    within_reach = sets[sets.sum(axis=1) <= most_lost]
    order = _sweep_order(within_reach)
    beginning = _sets_by_first_node(within_reach[:, order])
    lost = indices(most_lost + 1)
    fatal = np.zeros(most_lost + 1)
    fronts: dict[Front, FloatArray] = {(): np.where(lost == 0, 1.0, 0.0)}
    others = np.setdiff1d(indices(sets.shape[1]), order)
    kept: FloatArray | None = None
    for swept, share in enumerate(swept_shares(rates, np.concatenate((order, others)), most_lost), start=1):
        fatal = fatal * (1.0 - share) + _shift_losses(fatal) * share
        if swept > order.size:
            kept = fronts[()] if kept is None else kept
            kept = kept * (1.0 - share) + _shift_losses(kept) * share
            continue
        ahead: dict[Front, FloatArray] = {}
        for front, odds in fronts.items():
            effort -= 10 + len(front) + len(front) ** 2 // 10 + most_lost // 200
            _add_odds(ahead, tuple(left for left in front if not left >> (swept - 1) & 1), odds * (1.0 - share))
            gone = _shift_losses(odds) * share
            if not gone.any():
                continue
            after = _front_after_loss(swept - 1, (*front, *beginning[swept - 1]))
            if after is None:
                fatal += gone
            else:
                _add_odds(ahead, after, gone)
        if effort < 0:
            return None
        fronts = ahead
    survived = fronts[()] if kept is None else kept
    whole = fatal + survived
    return LossShares(fatal=fatal / whole, survived=survived / whole)


def _sweep_order(sets: BoolArray) -> IntArray:
    """Return the nodes of any of the `sets` `(S, N)` in an order that keeps fronts few.

    The next node is always from the set with the fewest nodes left, with started sets before others. Among these nodes,
    it is the one that starts the fewest sets.
    """
    left = sets.sum(axis=1)
    begun = np.zeros(len(sets), dtype=np.bool_)
    done = np.zeros(sets.shape[1], dtype=np.bool_)
    order: list[int] = []
    while left.any():
        urgency = np.where(left > 0, left + np.where(begun, 0, done.size + 1), np.iinfo(np.int64).max)
        nodes = np.flatnonzero(sets[int(urgency.argmin())] & ~done)
        node = int(nodes[(sets[:, nodes] & ~begun[:, None]).sum(axis=0).argmin()])
        order.append(node)
        done[node] = True
        left -= sets[:, node]
        begun |= sets[:, node]
    return np.array(order, dtype=np.int64)


def _sets_by_first_node(sets: BoolArray) -> list[list[int]]:
    """Return the `sets` `(S, M)` as bits, grouped by their first node."""
    found: list[list[int]] = [[] for _ in range(sets.shape[1])]
    for members in sets:
        nodes = np.flatnonzero(members).tolist()
        found[nodes[0]].append(sum(1 << node for node in nodes))
    return found


def _front_after_loss(node: int, front: Sequence[int]) -> Front | None:
    """Return the `front` after the loss of `node`, without sets that contain another one; None if the loss is fatal.

    The front is the host sets whose survival is open, each as bits of the nodes that may still be live. A loss is fatal
    if a set has no node left.
    """
    left = {nodes & ~(1 << node) for nodes in front}
    if 0 in left:
        return None
    # A set that contains another one has a survivor whenever the other one has.
    return tuple(sorted(one for one in left if not any(other & one == other != one for other in left)))


def _shift_losses(odds: FloatArray) -> FloatArray:
    """Return `odds`, indexed by the number of lost nodes, for one more lost node: entry k is entry k - 1 of before.

    Entry 0 becomes 0, and the last entry is dropped.
    """
    moved = np.zeros_like(odds)
    moved[1:] = odds[:-1]
    return moved


def _add_odds(fronts: dict[Front, FloatArray], front: Front, odds: FloatArray) -> None:
    """Add the `odds` to the entry of the `front`."""
    known = fronts.get(front)
    fronts[front] = odds if known is None else known + odds
