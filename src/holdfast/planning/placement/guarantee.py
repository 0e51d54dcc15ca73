"""The guarantee of f: every expert on at least f distinct nodes, for every strategy.

The number of nodes cuts off MRO's last group, which puts its replicas on too few of them (ERRATA, Lazarus 1 and 2).

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import IntArray, count_true
from holdfast.planning.placement.fill import deal_replicas


def enforce_guarantee(counts: IntArray, slots: IntArray, threshold: int) -> IntArray:
    """Return `counts` `(L, E, N)` with every expert on at least `threshold` distinct nodes.

    The replicas per expert and per node stay the same. Layers that already keep the guarantee are unchanged. The others
    are mended by trades of two replicas, as few as a greedy choice needs.

    If all nodes have the same slots, trades always suffice: a node that holds one expert twice has fewer distinct ones
    than any node without doubles. Otherwise, a layer for which trades do not suffice is placed from scratch.
    """
    hosts = count_true(counts > 0)
    broken = np.flatnonzero((hosts < threshold).any(axis=1))
    if not broken.size:
        return counts
    counts = counts.copy()
    for layer in broken:
        if not _repair_layer(counts[layer], threshold):
            counts[layer] = _place_from_scratch(counts[layer].sum(axis=1), slots, threshold)
    return counts


def _repair_layer(counts: IntArray, threshold: int) -> bool:
    """Trade replicas in one layer `(E, N)`, in place, until every expert is on `threshold` nodes.

    The expert on the fewest nodes comes first. Return False if no trade helps; earlier trades then remain.
    """
    hosts = (counts > 0).sum(axis=1)
    while (short := np.flatnonzero(hosts < threshold)).size:
        expert = int(short[np.argmin(hosts[short])])
        trade = _find_trade(counts, hosts, expert, threshold)
        if trade is None:
            return False
        other, source, target = trade
        counts[expert, source] -= 1
        counts[expert, target] += 1
        counts[other, target] -= 1
        counts[other, source] += 1
        hosts = (counts > 0).sum(axis=1)
    return True


def _find_trade(counts: IntArray, hosts: IntArray, expert: int, threshold: int) -> tuple[int, int, int] | None:
    """Return (other, source, target): `expert` trades its double on `source` for a replica of `other` on `target`.

    The other expert may lose a host only if it has one to spare. The expert with the most hosts is preferred. Return
    None if no trade is possible.
    """
    best: tuple[int, int, int] | None = None
    best_score = 0
    for source in np.flatnonzero(counts[expert] > 1):
        present = (counts > 0) & (counts[expert] == 0)
        gained = (counts[:, source] == 0)[:, None].astype(np.int64)
        lost = (counts == 1).astype(np.int64)
        left = np.where(present, hosts[:, None] + gained - lost, 0)
        allowed = (left >= threshold) | (present & (gained >= lost))
        score = np.where(allowed & present, left * 2 + (counts > 1), 0)
        other, target = np.unravel_index(int(score.argmax()), score.shape)
        if score[other, target] > best_score:
            best_score = int(score[other, target])
            best = (int(other), int(source), int(target))
    return best


def _place_from_scratch(replicas: IntArray, slots: IntArray, threshold: int) -> IntArray:
    """Place one layer `(E, N)` from scratch: each expert first takes the `threshold` nodes with the most free slots.

    This always succeeds if any placement exists (Gale-Ryser).
    """
    counts = np.zeros((replicas.size, slots.size), dtype=np.int64)
    # A node never holds more than E distinct experts, so larger nodes count as E slots here.
    free = np.minimum(slots, replicas.size)
    for expert in range(replicas.size):
        nodes = np.argsort(-free, kind="stable")[:threshold]
        counts[expert, nodes] = 1
        free[nodes] -= 1
    return deal_replicas(counts[None], replicas[None], slots)[0]
