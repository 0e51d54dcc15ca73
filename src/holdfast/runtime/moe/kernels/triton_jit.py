"""The programs that run on the GPU; `triton_kernels.py` launches them. Shape letters as in `interface.py`.

Every program writes each of its results exactly once and adds in a fixed order: results are the same in every run.
"""

# Triton's language is typed for its compiler, not for a type checker, and it may not be installed.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    rows, order, out, number, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Triton kernel: out[a] = rows[order[a] // TOP_K] for each a below `number`.

    `out` is `(number, D)`, `order` `(number,)`; `rows` has D columns. All are contiguous.
    """
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(order + a, mask=a < number, other=0) // TOP_K
    inside = (a < number)[:, None] & (d < D)[None, :]
    values = tl.load(rows + source[:, None] * D + d[None, :], mask=inside)
    tl.store(out + a.to(tl.int64)[:, None] * D + d[None, :], values, mask=inside)


@triton.jit
def sum_rows(
    rows,
    inverse,
    weights,
    out,
    number,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Triton kernel: out[t] = the sum over a token's choices of (weights[t, choice] *) rows[inverse[t, choice]].

    `out` is `(number, D)`, `inverse` and `weights` are `(number, TOP_K)`; `weights` is only read if WEIGHTED. Sums are
    made in float32, and stored in the dtype of `out`.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (t < number)[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(inverse + t * TOP_K + choice, mask=t < number, other=0)
        values = tl.load(rows + place[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + t * TOP_K + choice, mask=t < number, other=0.0)[:, None]
        total += values
    tl.store(out + t.to(tl.int64)[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_backward(
    grad,
    rows,
    inverse,
    weights,
    grad_rows,
    grad_weights,
    number,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Triton kernel: write both gradients of the weighted `sum_rows` in one pass.

    `grad` `(number, D)` is the gradient of its sums. The gradient of rows[inverse[t, choice]] is stored at the same row
    of `grad_rows`, and that of weights[t, choice] at grad_weights[t, choice].
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = t < number
    start_t = t.to(tl.int64) * D
    for choice in tl.static_range(TOP_K):
        place = tl.load(inverse + t * TOP_K + choice, mask=known, other=0)
        weight = tl.load(weights + t * TOP_K + choice, mask=known, other=0.0)
        dot = tl.zeros((BLOCK_T,), tl.float32)
        for begin in range(0, D, BLOCK_D):
            d = begin + tl.arange(0, BLOCK_D)
            inside = known[:, None] & (d < D)[None, :]
            incoming = tl.load(grad + start_t[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
            at = place[:, None] * D + d[None, :]
            values = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
            outgoing = incoming * weight[:, None]
            tl.store(grad_rows + at, outgoing.to(grad_rows.dtype.element_ty), mask=inside)
            dot += tl.sum(incoming * values, axis=1)
        tl.store(grad_weights + t * TOP_K + choice, dot, mask=known)


@triton.jit
def interval_shares(tokens, replicas, sent, received, rank, ranks, stride_e, stride_n, BLOCK_N: tl.constexpr):
    """Triton kernel: write how many tokens of each expert `rank` sends to (`sent`) and receives from (`received`) each
    rank, `(E, N)` both, by the interval schedule (`planning.Interval`). One program computes one expert.

    The integers are the same as in `planning.dispatch_schedule`; `tokens` `(E, N)` has strides, the others are
    contiguous.
    """
    e = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    known = n < ranks
    T = tl.load(tokens + e * stride_e + n * stride_n, mask=known, other=0)
    R = tl.load(replicas + e * ranks + n, mask=known, other=0)
    capacity = _capacities(T, R, e % ranks, n)
    local = tl.minimum(T, capacity)
    here = tl.where(n == rank, local, 0)
    tl.store(sent + e * ranks + n, _overlap(T - local, capacity - local, rank, n) + here, mask=known)
    tl.store(received + e * ranks + n, _overlap(capacity - local, T - local, rank, n) + here, mask=known)


@triton.jit
def _capacities(T, R, start, n):
    """Return how many tokens of one expert each rank computes, `(N,)`, as `planning.replica_capacities`.

    T are its tokens and R its replicas per rank, `(N,)` both. Each replica gets an even share; ranks with many own
    tokens get the rest first, from rank `start` on. `n` has the ranks' numbers 0, 1, ... `(N,)`.
    """
    total = tl.sum(T, axis=0)
    number = tl.maximum(tl.sum(R, axis=0), 1)
    capacity = (total // number) * R
    over = total % number
    granted = _grant(tl.minimum(tl.maximum(T - capacity, 0), R), over, start, n)
    over = over - tl.sum(granted, axis=0)
    return capacity + granted + _grant(R - granted, over, start, n)


@triton.jit
def _grant(wanted, supply, start, n):
    """Return the part of `wanted` `(N,)` that each rank gets from `supply`, served rank by rank, cyclically from
    `start`.

    `n` has the ranks' numbers 0, 1, ... `(N,)`.
    """
    before = tl.cumsum(wanted, axis=0) - wanted
    skipped = tl.sum(tl.where(n == start, before, 0), axis=0)
    wrapped = tl.where(n < start, tl.sum(wanted, axis=0), 0)
    return tl.minimum(tl.maximum(supply - (before - skipped + wrapped), 0), wanted)


@triton.jit
def _overlap(mine, others, rank, n):
    """Return the lengths of the overlaps of the rank's interval on one line with all intervals on the other, `(N,)`.

    The intervals of a line adjoin in the order of ranks; `mine` and `others` are their lengths.
    """
    begin = tl.sum(tl.where(n < rank, mine, 0), axis=0)
    end = begin + tl.sum(tl.where(n == rank, mine, 0), axis=0)
    stop = tl.cumsum(others, axis=0)
    return tl.minimum(tl.maximum(stop, begin), end) - tl.minimum(tl.maximum(stop - others, begin), end)


@triton.jit
def order_by_segments(
    ends,
    shifts,
    lookup,
    order,
    inverse,
    number,
    segments,
    LOOKUP: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Triton kernel: order[q] = lookup[q + shifts[s]] for the segment s that contains position q; inverse undoes it.

    Without LOOKUP, order[q] is q + shifts[s]. There are `number` positions, and `segments` segments with the ends
    `ends` `(segments,)`, ascending; 2**STEPS > segments. The inverse is inverse[order[q]] = q.
    """
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = q < number
    # Binary search for the number of segments that end at or before q.
    segment = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        next_segment = segment + (1 << (STEPS - 1 - step))
        reachable = known & (next_segment <= segments)
        end = tl.load(ends + next_segment - 1, mask=reachable, other=0)
        segment = tl.where(reachable & (end <= q), next_segment, segment)
    source = q + tl.load(shifts + segment, mask=known, other=0)
    if LOOKUP:
        source = tl.load(lookup + source, mask=known, other=0)
    tl.store(order + q, source, mask=known)
    tl.store(inverse + source, q.to(tl.int64), mask=known)
