"""The two solvers of SciPy that planning uses, with types (SciPy ships none)."""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray


def best_assignment(gain: FloatArray | NDArray[np.float32]) -> IntArray:
    """Return a column for each row of *gain* `[R, C]`, R <= C, all different, with the largest sum."""
    _, columns = linear_sum_assignment(gain, maximize=True)
    return np.asarray(columns, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A maximum flow, and the side of a minimum cut that the source is on."""

    total: int
    #: `[M]` flow of each edge.
    edges: IntArray
    #: Whether each vertex can still be reached from the source, in the residual graph.
    reachable: BoolArray


def largest_flow(tails: IntArray, heads: IntArray, capacity: IntArray, source: int, sink: int) -> Flow:
    """Return one maximum flow from *source* to *sink* over edges `[M]`; edges are distinct."""
    size = int(max(tails.max(), heads.max())) + 1
    graph = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(size, size))
    found = maximum_flow(graph, source, sink)
    residual = graph - found.flow
    residual.eliminate_zeros()
    reachable = np.zeros(size, dtype=np.bool_)
    reachable[breadth_first_order(residual, source, return_predecessors=False)] = True
    edges = np.asarray(found.flow[tails, heads], dtype=np.int64).reshape(-1)
    return Flow(total=int(found.flow_value), edges=edges, reachable=reachable)
