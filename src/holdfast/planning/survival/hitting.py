"""The host sets that decide whether a model survives.

It survives while each expert of each layer has a live host, so only the smallest host sets matter (those that contain
no other), over all layers at once.

Axes: N nodes, S sets of nodes.
"""

from __future__ import annotations

import numpy as np

from holdfast.planning.arrays import BoolArray, indices

#: Up to this many nodes, 2**nodes flags cost less than a sort.
_TABLE_NODES = 16


def smallest_sets(hosts: BoolArray) -> BoolArray:
    """Return the distinct host sets `(S, N)` that contain no other, from `hosts` `(..., N)`."""
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
