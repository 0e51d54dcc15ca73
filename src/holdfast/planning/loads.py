"""Turns expert loads (counts, weighted sums, lists) into exact integers.

Axes: L layers, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray

#: A layer's loads are scaled down to at most this sum, so that load x slots is exact in 64 bits for 2**22 slots.
_LARGEST_SUM = 1 << 40


def as_token_counts(loads: ArrayLike) -> IntArray:
    """Return the loads as checked integers `(L, E)`.

    `loads` are tokens per layer and expert, `(L, E)`, or `(E,)` for one layer, as integers or floats. Whole numbers
    stay as they are. Other numbers, such as weighted sums, are scaled per layer and rounded. Equal loads stay equal,
    and the order of loads is kept.

    Raises:
        BadInputError: Loads are negative, not finite, or not of that shape.
    """
    try:
        array = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInputError(f"loads are not a table of numbers with one row per layer ({error})") from None
    if array.ndim == 1:
        array = array[None, :]
    if array.ndim != 2 or array.size == 0:
        raise BadInputError(f"loads have shape {array.shape}: give one row per layer and one column per expert")
    _check_values(array)
    largest = float(array.max())
    if largest > _LARGEST_SUM:
        # The sum of very large floats would overflow.
        array = array / largest * _LARGEST_SUM
    sums = array.sum(axis=1, keepdims=True)
    whole = bool((array == np.floor(array)).all()) and float(sums.max()) <= _LARGEST_SUM
    if not whole:
        array = np.rint(array / np.where(sums > 0, sums, 1.0) * _LARGEST_SUM)
    return array.astype(np.int64)


def _check_values(array: FloatArray) -> None:
    """Raise `BadInputError` for the first load that is not a finite number >= 0, with its layer and expert."""
    for wrong, what in ((~np.isfinite(array), "not a finite number"), (array < 0, "negative")):
        if wrong.any():
            layer, expert = (int(index) for index in np.argwhere(wrong)[0])
            value = float(array[layer, expert])
            raise BadInputError(
                f"load of layer {layer}, expert {expert} is {value:g}: {what}; loads are token counts >= 0"
            )
