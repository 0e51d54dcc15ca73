"""From the gathered counts to one rank's all-to-all: split sizes, and the orders of its rows.

Pure integers and numpy; the same on every rank.

Axes: E experts, N ranks, A assignments (tokens x top_k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.planning import DispatchScheme, dispatch_schedule
from holdfast.planning.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """One rank's part of one layer's dispatch and, read backwards, of its combine.

    Send row a is assignment `send_order[a]`; after the exchange, row b for the experts is received row
    `receive_order[b]`. The experts get their tokens row by row of the stacked weights, each by source rank.
    """

    #: Rows per peer, `(N,)`.
    send: tuple[int, ...]
    receive: tuple[int, ...]
    #: `(A_sent,)` and `(A_received,)` permutations.
    send_order: IntArray
    receive_order: IntArray
    #: the end of each stacked row's tokens, `(rows,)`
    row_ends: IntArray


def plan_dispatch(
    assigned: IntArray,
    tokens: IntArray,
    replicas: IntArray,
    rank: int,
    row_experts: Sequence[int],
    scheme: DispatchScheme,
) -> Dispatch:
    """Plan one rank's part: how many rows it sends to and receives from each rank, and the orders of these rows.

    Args:
        assigned: expert of each of this rank's assignments, `(A,)`.
        tokens: T, assignments per expert and source rank, `(E, N)`.
        replicas: R, replicas per expert and rank, `(E, N)`.
        rank: this rank.
        row_experts: expert of each stacked row, `(rows,)`; -1 for an unused row.
        scheme: divides an expert's tokens among its replicas.

    Raises:
        BadInputError: an expert with tokens has no replica.
    """
    schedule = dispatch_schedule(tokens, replicas, scheme)
    sent, received = schedule.send_row(rank), schedule.receive_column(rank)
    by_expert = np.argsort(assigned, kind="stable")
    # Sorted by expert, the assignments form one segment per (expert, destination); they leave by destination.
    send_order = by_expert[_order_by_columns(sent)]
    # They arrive as one segment per (source, expert), and the experts need them by row, then by source.
    arrived = np.ascontiguousarray(received.T)
    row_sizes = np.zeros(len(row_experts), dtype=np.int64)
    rows = np.asarray(row_experts, dtype=np.int64)
    used = np.flatnonzero(rows >= 0)
    row_sizes[used] = received.sum(axis=1)[rows[used]]
    return Dispatch(
        send=tuple(int(n) for n in sent.sum(axis=0)),
        receive=tuple(int(n) for n in received.sum(axis=0)),
        send_order=send_order,
        receive_order=_order_by_columns(arrived, rows[used]),
        row_ends=np.cumsum(row_sizes),
    )


def invert_order(order: IntArray) -> IntArray:
    """Return the inverse of a permutation `(A,)`: `inverse[order[a]]` is a."""
    undone = np.empty_like(order)
    undone[order] = np.arange(order.size, dtype=np.int64)
    return undone


def _order_by_columns(sizes: IntArray, columns: IntArray | None = None) -> IntArray:
    """Return an order `(A,)` that reads segments column by column; entry a is the position of element a of the result.

    Element positions count through the segments (i, j) as they are stored, row by row.

    Args:
        sizes: of the segments, `(I, J)`.
        columns: the columns to read, in order; all by default. Columns left out must be empty.
    """
    starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
    if columns is not None:
        sizes, starts = sizes[:, columns], starts[:, columns]
    sizes, starts = sizes.T.reshape(-1), starts.T.reshape(-1)
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
