"""The two solvers of SciPy that planning uses, with types (SciPy ships none)."""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from holdfast.planning.arrays import FloatArray, IntArray


def best_assignment(gain: FloatArray) -> IntArray:
    """Return a column for each row of *gain* `[R, C]`, R <= C, all different, with the largest sum."""
    _, columns = linear_sum_assignment(gain, maximize=True)
    return np.asarray(columns, dtype=np.int64)


def largest_flow(tails: IntArray, heads: IntArray, capacity: IntArray, source: int, sink: int) -> IntArray:
    """Return the flow of each edge `[M]` in one maximum flow from *source* to *sink*; edges are distinct."""
    size = int(max(tails.max(), heads.max())) + 1
    graph = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(size, size))
    flow = maximum_flow(graph, source, sink).flow
    return np.asarray(flow[tails, heads], dtype=np.int64).reshape(-1)
