"""The array types of this package, and the letters their shapes are written in.

L layers, E experts, N nodes (or ranks, where a function says so), G groups of nodes, K = N + 1 failure counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


def indices(number: int) -> IntArray:
    """Return 0, 1, ..., number - 1."""
    return np.arange(number, dtype=np.int64)
