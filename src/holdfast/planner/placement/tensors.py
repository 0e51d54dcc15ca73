"""Checked arrays from callers' arguments, and results of the same type: numpy arrays, lists, or torch tensors.

torch is not imported: a tensor is recognized by its methods.

Axes: L layers, E experts, R slots.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import BoolArray, FloatArray, IntArray

#: Largest load. Sums and squares of loads then stay within a float's range.
_LARGEST_LOAD = 1e100
#: Whole numbers up to here are exact in a float.
_LARGEST_WHOLE = 1 << 53


def as_integer(value: Any, name: str) -> int:
    """Return the value as an int; integers of numpy are accepted, too.

    Raises:
        BadInputError: it is anything else, also a float without a fraction.
    """
    try:
        return index(value)
    except TypeError:
        raise BadInputError(f"{name} is {value!r}: give a whole number") from None


def as_loads(weight: Any) -> FloatArray:
    """Return loads `(L, E)`. Layers with only zeros get equal loads.

    Raises:
        BadInputError: `weight` is not a table of numbers, or a load is negative, not finite, or above 1e100.
    """
    loads = _as_numbers(weight, "weight").astype(np.float64)
    if loads.ndim != 2 or not loads.size:
        raise BadInputError(f"weight has shape {loads.shape}: give one row of loads per layer, one column per expert")
    too_large = f"more than {_LARGEST_LOAD:g}"
    for wrong, what in (
        (~np.isfinite(loads), "not a finite number"),
        (loads < 0, "negative"),
        (loads > _LARGEST_LOAD, too_large),
    ):
        if wrong.any():
            layer, expert = (int(index) for index in np.argwhere(wrong)[0])
            raise BadInputError(f"weight of layer {layer}, expert {expert} is {loads[layer, expert]:g}: {what}")
    loads[loads.sum(axis=1) == 0] = 1.0
    return loads


def sum_over_steps(weight: Any) -> Any:
    """Return the sum over the steps of loads `(steps, L, E)`, in double precision; a tensor's sum is detached and on
    the CPU. Arrays with other dimensions are returned unchanged.

    Raises:
        BadInputError: `weight` is not an array of numbers, or has no steps.
    """
    loads = _as_numbers(weight, "weight")
    if loads.ndim != 3:
        return weight
    if not len(loads):
        raise BadInputError(f"weight has shape {loads.shape}: it has no steps")
    # Use double precision, because sums of halves soon overflow.
    return weight.detach().cpu().double().sum(0) if hasattr(weight, "detach") else loads.sum(axis=0, dtype=np.float64)


def as_slot_map(values: Any, name: str, shape: tuple[int, int] | None, experts: int | None) -> IntArray:
    """Return the expert in each slot `(L, R)`, -1 for none.

    Args:
        shape: the required shape, or None for any with two dimensions.
        experts: the number of experts, or None for no limit.

    Raises:
        BadInputError: the shape is wrong, or a value is not an integer or out of range.
    """
    slots = _as_integers(values, name)
    if slots.ndim != 2 or not slots.size or (shape is not None and slots.shape != shape):
        wanted = "one row of slots per layer" if shape is None else f"{shape}, one row of slots per layer"
        raise BadInputError(f"{name} has shape {slots.shape}: it must be {wanted}")
    low, high = int(slots.min()), int(slots.max())
    if low < -1 or (experts is not None and high >= experts):
        wrong = low if low < -1 else high
        raise BadInputError(f"{name} names expert {wrong}: experts are numbered from 0" + _describe_limit(experts))
    return slots


def as_flags(values: Any, name: str, number: int) -> BoolArray:
    """Return a flag for each of `number` ranks.

    Raises:
        BadInputError: there are more or fewer, or a value is not 0 or 1 (as in a list of ranks).
    """
    flags = _as_numbers(values, name)
    if flags.shape != (number,):
        raise BadInputError(f"{name} has shape {flags.shape}: give one value for each of the {number} ranks")
    wrong = flags[(flags != 0) & (flags != 1)]
    if wrong.size:
        raise BadInputError(f"{name} holds {wrong[0]}: give 1 for each rank that is alive, 0 for each that is not")
    return flags != 0


def as_ranks(values: Any, name: str, below: int) -> IntArray:
    """Return a list of ranks, each once, ascending.

    Raises:
        BadInputError: a rank is not an integer in 0..below-1, or the values are flags, which would be read as ranks 0
            and 1.
    """
    numbers = _as_numbers(values, name)
    if numbers.dtype.kind == "b":
        raise BadInputError(f"{name} holds flags: give the numbers of the ranks, as numpy.flatnonzero has them")
    ranks = _as_integers(numbers, name).reshape(-1)
    for rank in ranks.tolist():
        if not 0 <= rank < below:
            raise BadInputError(f"{name} names rank {rank}: there are {below}, numbered from 0")
    return np.unique(ranks)


def as_racks(values: Any, nodes: int) -> IntArray:
    """Return each node's rack `(N,)`, numbered 0, 1, ..., from one number or name per node.

    Raises:
        BadInputError: there is not one value per node, or they cannot be sorted, as an object array of numbers and
            text.
    """
    given = _as_array(values, "racks")
    if given.shape != (nodes,):
        raise BadInputError(f"racks has shape {given.shape}: give one rack for each of the {nodes} nodes")
    try:
        return np.unique(given, return_inverse=True)[1].reshape(-1).astype(np.int64)
    except TypeError:
        raise BadInputError(f"racks is {given.tolist()}: name all racks by numbers, or all by text") from None


def convert_like(template: Any, values: IntArray) -> Any:
    """Return integers as a numpy array, or for a tensor as `template` as a 64-bit tensor on the CPU, as EPLB does."""
    if not hasattr(template, "new_empty"):
        return values
    return template.new_empty(0, device="cpu").long().new_tensor(np.ascontiguousarray(values))


def _describe_limit(experts: int | None) -> str:
    return "" if experts is None else f", and there are {experts}"


def _as_integers(values: Any, name: str) -> IntArray:
    """Return values as an int64 array.

    Raises:
        BadInputError: they are not numbers, have fractions, or are too large to be exact in a float.
    """
    numbers = _as_numbers(values, name)
    if numbers.dtype.kind == "f" and not (numbers == np.floor(numbers)).all():
        raise BadInputError(f"{name} holds {numbers.dtype}: give whole numbers")
    wrong = numbers[(numbers > _LARGEST_WHOLE) | (numbers < -_LARGEST_WHOLE)]
    if wrong.size:
        raise BadInputError(f"{name} holds {wrong[0]}: this number is too large")
    return numbers.astype(np.int64)


def _as_numbers(values: Any, name: str) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Return values as a numpy array of flags, integers or floats. An empty array of another type becomes integers.

    Raises:
        BadInputError: values are not numbers, or rows differ in length.
    """
    numbers = _as_array(values, name)
    if numbers.dtype.kind not in "biuf":
        if not numbers.size:
            return numbers.astype(np.int64)
        raise BadInputError(f"{name} holds {numbers.dtype}: give numbers")
    return numbers


def _as_array(values: Any, name: str) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Return values as a numpy array. Tensors are copied to the CPU, with floats in double precision.

    Raises:
        BadInputError: rows differ in length.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy does not know bfloat16.

        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        return np.asarray(values)
    except ValueError:
        raise BadInputError(f"{name} is not a table: its rows differ in length") from None
