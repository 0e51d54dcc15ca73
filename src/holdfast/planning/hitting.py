"""Counting the node losses that an expert placement survives.

A model survives while each expert of each layer has a live host, so only the smallest host sets matter (those that
contain no other), over all layers at once. Sets that share no node are independent: their counts multiply.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, indices

#: Up to this many nodes, 2**nodes flags cost less than a sort.
_TABLE_NODES = 16


def smallest_sets(hosts: BoolArray) -> BoolArray:
    """Return the distinct host sets `[S, N]` that contain no other, from *hosts* `[..., N]`."""
    left = _distinct(hosts.reshape(-1, hosts.shape[-1]))
    left = left[np.argsort(left.sum(axis=1), kind="stable")]
    kept: list[BoolArray] = []
    while len(left):
        first = left[0]
        kept.append(first)
        # A set contains `first` where none of first's nodes is missing from it.
        left = left[~left[:, first].all(axis=1)]
    return np.array(kept, dtype=np.bool_).reshape(len(kept), hosts.shape[-1])


def _distinct(rows: BoolArray) -> BoolArray:
    """Return the distinct rows, in the order of their bits; sorting bytes row by row is ten times slower than words."""
    nodes = rows.shape[1]
    if nodes <= _TABLE_NODES:
        # One flag per possible row, numbered by its bits as below; sums of powers of two are exact in float32.
        bits = indices(nodes) // 8 * 8 + 7 - indices(nodes) % 8
        seen = np.zeros(1 << _TABLE_NODES, dtype=np.bool_)
        seen[(rows.astype(np.float32) @ (1 << bits).astype(np.float32)).astype(np.int64)] = True
        return (np.flatnonzero(seen)[:, None] >> bits) & 1 == 1
    packed = np.packbits(rows, axis=1)
    padded = np.zeros((len(rows), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    words = padded.view(np.uint64)
    order = np.lexsort(words.T)
    in_order = words[order]
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    return rows[order[new]]


def components(sets: BoolArray) -> list[IntArray]:
    """Return the nodes of each group of sets that are connected by shared nodes; nodes in no set are left out."""
    found: list[IntArray] = []
    left = sets
    while len(left):
        nodes = left[0].copy()
        while True:
            touching = left[:, nodes].any(axis=1)
            grown = left[touching].any(axis=0)
            if (grown == nodes).all():
                break
            nodes = grown
        found.append(np.flatnonzero(nodes))
        left = left[~touching]
    return found


def count_survivals(sets: BoolArray) -> list[int]:
    """Return by number of lost nodes 0..N how many losses leave every set a live node, for *sets* `[S, N]`, N <= 24.

    All 2**N losses at once: mark those that are a whole set, then every loss that contains a marked one, node by node.
    """
    nodes = sets.shape[1]
    fatal = np.zeros(1 << nodes, dtype=np.bool_)
    fatal[sets @ (1 << indices(nodes))] = True
    for node in range(nodes):
        pairs = fatal.reshape(-1, 2, 1 << node)
        pairs[:, 1] |= pairs[:, 0]
    lost = np.bitwise_count(np.arange(1 << nodes, dtype=np.uint32))
    survived = np.bincount(lost[~fatal], minlength=nodes + 1)
    return [int(number) for number in survived]


def count_disjoint(size: int) -> list[int]:
    """Return the same for one set of *size* nodes: every loss but that of all."""
    return [comb(size, lost) for lost in range(size)] + [0]


def count_small_losses(sets: BoolArray, most_losses: int) -> list[int]:
    """Return survivals for 0, 1, 2, ... lost nodes of many, as far as *most_losses* enumerated losses reach."""
    nodes = sets.shape[1]
    survived: list[int] = []
    budget = most_losses
    smallest = int(sets.sum(axis=1).min())
    for lost in range(nodes + 1):
        number = comb(nodes, lost)
        if lost < smallest:
            survived.append(number)
            continue
        budget -= number
        if budget < 0:
            break
        chosen = np.array(list(combinations(range(nodes), lost)), dtype=np.int64).reshape(number, lost)
        survived.append(int((~_fatal(sets, chosen)).sum()))
    return survived


def _fatal(sets: BoolArray, chosen: IntArray) -> BoolArray:
    """Return for each row of lost nodes `[M, lost]` whether it covers a whole set."""
    hit = sets.astype(np.int16)[:, chosen].sum(axis=2)
    return (hit == sets.sum(axis=1)[:, None]).any(axis=0)
