"""The host sets that decide whether a model survives.

It survives while each expert of each layer has a live host, so only the smallest host sets matter (those that contain
no other), over all layers at once.

Axes: N nodes, S sets of nodes, R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import BoolArray

WordArray = NDArray[np.uint64]


def smallest_sets(hosts: BoolArray) -> BoolArray:
    """Return the distinct host sets `(S, N)` that contain no other, from `hosts` `(..., N)`."""
    nodes: int = hosts.shape[-1]
    left = _distinct(as_words(hosts.reshape(-1, nodes)))
    left = left[np.argsort(np.bitwise_count(left).sum(axis=1, dtype=np.int64), kind="stable")]
    kept: list[WordArray] = []
    while len(left):
        first = left[0]
        kept.append(first)
        # A set contains `first` where none of first's nodes is missing from it.
        left = left[(first & ~left).any(axis=1)]
    words = np.array(kept, dtype=np.uint64).reshape(len(kept), -(-nodes // 64))
    return np.unpackbits(words.view(np.uint8), axis=1, count=nodes).astype(np.bool_)


def as_words(rows: BoolArray) -> WordArray:
    """Return `rows` `(R, N)` of bits in words of 64: sets are compared many nodes at once."""
    packed = np.packbits(rows, axis=1)
    padded = np.zeros((len(rows), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _distinct(words: WordArray) -> WordArray:
    """Return the distinct rows, in the order of their bits; sorting bytes row by row is ten times slower than words."""
    if words.shape[1] == 1:
        return np.unique(words[:, 0])[:, None]
    in_order = words[np.lexsort(words.T)]
    new = np.ones(len(words), dtype=np.bool_)
    new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    return in_order[new]
