"""The array types of this package, fast array helpers, and the letters used for shapes.

L layers, E experts, N nodes (or ranks, if a function says so), G groups of nodes, M entries of a layer, K = N + 1
failure counts.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row", bound=np.generic)

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


def indices(number: int) -> IntArray:
    """Return 0, 1, ..., number - 1."""
    return np.arange(number, dtype=np.int64)


def stable_argsort(values: IntArray) -> IntArray:
    """Return the indices that sort each row of `values` `(L, E)` ascending and stably.

    Values that fit are sorted as 16-bit integers, which numpy does five times faster.
    """
    narrow = np.iinfo(np.int16)
    fits = values.size and narrow.min <= int(values.min()) and int(values.max()) <= narrow.max
    return np.argsort(values.astype(np.int16) if fits else values, axis=1, kind="stable")


def sum_over_nodes(counts: IntArray) -> IntArray:
    """Return `counts.sum(axis=2)` `(L, E)` of `counts` `(L, E, N)`; numpy's own sum is slow for short axes."""
    return np.einsum("len->le", counts)


def count_true(hosts: BoolArray) -> IntArray:
    """Return `hosts.sum(axis=2)` `(L, E)` of `hosts` `(L, E, N)`, in float32, which is exact up to 2**24."""
    return (hosts.astype(np.float32) @ np.ones(hosts.shape[2], dtype=np.float32)).astype(np.int64)


def distinct_rows(rows: BoolArray) -> tuple[BoolArray, IntArray]:
    """Return `np.unique(rows, axis=0, return_inverse=True)` of `rows` `(E, N)`, sorted as packed bits for speed."""
    packed = np.ascontiguousarray(np.packbits(rows, axis=1))
    keys = packed.view(f"S{packed.shape[1]}").reshape(-1)
    _, first, kind_of = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first], kind_of


def take_rows(table: NDArray[Row], order: IntArray) -> NDArray[Row]:
    """Return `table` `(L, E, ...)` with the rows of each layer in `order` `(L, E)`; a faster `take_along_axis`."""
    return table.reshape(-1, *table.shape[2:])[_flat_indices(order, table.shape[1])]


def put_rows(table: NDArray[Row], order: IntArray, rows: NDArray[Row]) -> None:
    """Write `rows` `(L, M, ...)` into the contiguous `table` `(L, E, ...)`, in each layer at the indices `order`
    `(L, M)`.
    """
    table.reshape(-1, *table.shape[2:])[_flat_indices(order, table.shape[1])] = rows


def nonzero_indices(mask: BoolArray) -> tuple[IntArray, ...]:
    """Return `np.nonzero(mask)`, computed faster for masks of three axes."""
    return np.unravel_index(np.flatnonzero(mask), mask.shape)


def _flat_indices(order: IntArray, experts: int) -> IntArray:
    """Return the indices `(L, M)` in a table flattened over layers, from the indices `order` `(L, M)` in each layer."""
    return order + (indices(order.shape[0]) * experts)[:, None]
