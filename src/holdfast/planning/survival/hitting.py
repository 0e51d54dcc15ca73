"""The host sets that decide whether a model survives.

A model survives while each expert of each layer has a live host. So only the smallest host sets of all layers matter:
the sets that contain no other set.

Axes: N nodes, S sets of nodes, R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import BoolArray

WordArray = NDArray[np.uint64]


def smallest_sets(hosts: BoolArray) -> BoolArray:
    """Return the distinct host sets `(S, N)` that contain no other set, from `hosts` `(..., N)`."""
    nodes: int = hosts.shape[-1]
    left = _distinct_words(as_words(hosts.reshape(-1, nodes)))
    left = left[np.argsort(np.bitwise_count(left).sum(axis=1, dtype=np.int64), kind="stable")]
    kept: list[WordArray] = []
    while len(left):
        first = left[0]
        kept.append(first)
        # Keep the sets that lack a node of `first`, so do not contain it.
        left = left[(first & ~left).any(axis=1)]
    words = np.array(kept, dtype=np.uint64).reshape(len(kept), -(-nodes // 64))
    return np.unpackbits(words.view(np.uint8), axis=1, count=nodes).astype(np.bool_)


def as_words(rows: BoolArray) -> WordArray:
    """Return `rows` `(R, N)` of bits as 64-bit words, so that sets are compared 64 nodes at a time."""
    packed = np.packbits(rows, axis=1)
    padded = np.zeros((len(rows), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _distinct_words(words: WordArray) -> WordArray:
    """Return the distinct rows, ordered by their bits. Sorting words is ten times faster than sorting byte rows."""
    if words.shape[1] == 1:
        return np.unique(words[:, 0])[:, None]
    in_order = words[np.lexsort(words.T)]
    new = np.ones(len(words), dtype=np.bool_)
    new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    return in_order[new]
