"""The SciPy solvers that planning uses, with types, which SciPy does not ship.

SciPy is imported at first use. The import takes half a second in each process of every job, and most processes need no
solver.

Axes: R rows, C columns, M edges.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray


def best_assignment(gain: FloatArray | NDArray[np.float32]) -> IntArray:
    """Return a different column for each row of `gain` `(R, C)`, R <= C, so that the sum of gains is largest."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(gain, maximize=True)
    return np.asarray(columns, dtype=np.int64)


def least_squares_from_zero(terms: FloatArray, values: FloatArray) -> FloatArray:
    """Return the `x` `(C,)` >= 0 that brings `terms @ x` `(R,)` nearest to `values` `(R,)`."""
    from scipy.optimize import nnls

    return np.asarray(nnls(terms, values)[0], dtype=np.float64)


#: Bits of a capacity in SciPy's flow: the capacities of both directions of an edge add up to 31 bits.
_BITS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A maximum flow, and the source's side of a minimum cut."""

    total: int
    #: `(M,)` flow of each edge.
    edges: IntArray
    #: Whether each vertex can still be reached from the source, in the residual graph.
    reachable: BoolArray


def largest_flow(tails: IntArray, heads: IntArray, capacity: IntArray, source: int, sink: int) -> Flow:
    """Return one maximum flow from `source` to `sink` over edges `(M,)`, which are distinct and never run both ways.

    The result also tells which vertices lie on the source's side of a minimum cut. SciPy counts in 32 bits. Larger
    capacities are first filled by their upper bits. The flow that is still possible is then less than one unit of the
    last of these bits per edge. So the next bits of the rest fit into 32 bits again.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    size = int(max(tails.max(), heads.max())) + 1
    flow = np.zeros_like(capacity)
    shift = max(int(capacity.max()).bit_length() - _BITS, 0)
    while True:
        # The residual capacity of each edge, forward and backward.
        left = np.minimum(np.concatenate([capacity - flow, flow]) >> shift, (1 << _BITS) - 1)
        both_ways = np.concatenate([tails, heads]), np.concatenate([heads, tails])
        graph = csr_array((left.astype(np.int32), both_ways), shape=(size, size))
        graph.eliminate_zeros()
        found = maximum_flow(graph, source, sink)
        flow += np.asarray(found.flow[tails, heads], dtype=np.int64).reshape(-1) << shift
        if not shift:
            break
        shift = max(shift - (_BITS - tails.size.bit_length()), 0)
    residual = graph - found.flow
    residual.eliminate_zeros()
    reachable = np.zeros(size, dtype=np.bool_)
    reachable[breadth_first_order(residual, source, return_predecessors=False)] = True
    return Flow(total=int(flow[tails == source].sum()), edges=flow, reachable=reachable)
