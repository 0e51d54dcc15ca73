"""How many replicas each expert gets, by Lazarus, Eq. (1), or so that the busiest replica has the least work.

All counts are exact integers.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.balance.eplb import extra_replicas
from holdfast.planning.loads import as_token_counts

#: The most nodes of a plan.
MOST_NODES = 1 << 14
#: The most slots on all nodes together, so that load x slots is exact in 64 bits.
MOST_SLOTS = 1 << 22
#: The most layers x experts x nodes of a plan: one gigabyte for each copy of its counts.
_MOST_CELLS = 1 << 27
#: Bisection steps after which 2**40 tokens are known to less than a millionth of one.
_BISECTIONS = 60
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """The number of distinct nodes that each expert lives on."""

    #: The number requested.
    asked: int
    #: The number that the plan has.
    given: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The reason why no placement exists."""

    #: What is missing.
    reason: str
    #: What to change.
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """How many replicas each expert of each layer gets, before they are placed on nodes."""

    #: `(L, E)`, each row summing to the cluster's slots, each entry at least `fault_threshold.given`.
    replicas: IntArray
    #: `(L, E)` the tokens that the replicas follow; each row's sum is above 0.
    tokens: IntArray
    fault_threshold: Guarantee
    #: Layers without any load, planned as if all experts had the same load.
    uniform_layers: tuple[int, ...]


def as_slots(slots: int | Sequence[int] | IntArray, nodes: int | None = None) -> IntArray:
    """Return slots per node `(N,)`, from one number for all `nodes` or one number each.

    Raises:
        BadInputError: A number is below 1 or too large, or their count does not fit `nodes`.
    """
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise BadInputError(f"nodes is {nodes}: give at least 1 and at most {MOST_NODES}")
    try:
        array = np.atleast_1d(np.asarray(slots, dtype=np.int64))
    except OverflowError:
        raise BadInputError(f"slots are too many: at most {MOST_SLOTS} on all nodes together are planned") from None
    if nodes is not None and array.size == 1:
        array = np.repeat(array, nodes)
    if array.ndim != 1 or array.size == 0 or (nodes is not None and array.size != nodes):
        raise BadInputError(f"slots give {array.size} numbers for {nodes} nodes: give one number, or one per node")
    if (array < 1).any():
        raise BadInputError(f"slots contain {int(array.min())}: every node needs at least 1 slot")
    if array.size > MOST_NODES:
        raise BadInputError(f"slots are given for {array.size} nodes: at most {MOST_NODES} are planned")
    if int(array.max()) > MOST_SLOTS or int(array.sum()) > MOST_SLOTS:
        raise BadInputError(f"slots are up to {int(array.max())} a node: at most {MOST_SLOTS} in all are planned")
    return array


def allocate(
    loads: ArrayLike, slots: IntArray, *, fault_threshold: int, least_busy: bool = False
) -> Allocation | Shortage:
    """Share all slots among the experts by their loads (Lazarus, 4.1, Eq. 1).

    Each expert gets at least `fault_threshold` replicas. If that many distinct nodes cannot hold every expert, the
    threshold is lowered as little as possible, and the result reports it. The hottest expert takes the slots that
    rounding leaves. Ties are broken by expert number. In a layer without tokens, all experts count as equally loaded;
    the result lists these layers.

    Args:
        loads: `(L, E)` tokens.
        slots: `(N,)` slots per node.
        fault_threshold: The number of distinct nodes that each expert should live on.
        least_busy: Every further replica goes to the expert with the most tokens per replica instead. So the busiest
            replica has the fewest tokens.

    Returns:
        The allocation, or a `Shortage` if there are more experts than slots.

    Raises:
        BadInputError: The loads are wrong, the threshold is below 1, or the plan is too large.
    """
    if fault_threshold < 1:
        raise BadInputError(f"fault threshold is {fault_threshold}: give at least 1 (each expert needs one live copy)")
    tokens = as_token_counts(loads)
    experts, total = tokens.shape[1], int(slots.sum())
    _check_size(len(tokens), experts, slots.size, total)
    if experts > total:
        return _describe_shortage(experts, slots)
    empty = tokens.sum(axis=1) == 0
    tokens[empty] = 1
    given = min(fault_threshold, _largest_threshold(experts, slots))
    return Allocation(
        replicas=(_allocate_least_busy if least_busy else _allocate_by_equation_1)(tokens, total, given),
        tokens=tokens,
        fault_threshold=Guarantee(asked=fault_threshold, given=given),
        uniform_layers=tuple(int(layer) for layer in np.flatnonzero(empty)),
    )


def _check_size(layers: int, experts: int, nodes: int, slots: int) -> None:
    """Raise `BadInputError` if the replica table or the slot list of all layers would not fit into memory."""
    for what, size in ((f"{experts} experts on {nodes} nodes", experts * nodes), (f"{slots} slots", slots)):
        if layers * size > _MOST_CELLS:
            fits = _MOST_CELLS // size
            raise BadInputError(
                f"{layers} layers of {what} are too many to plan at once: "
                + (f"give at most {fits} layers" if fits else "give fewer nodes or slots")
            )


def _largest_threshold(experts: int, slots: IntArray) -> int:
    """Return the largest f for which every expert fits on f distinct nodes.

    A node holds at most min(slots, E) distinct experts. By max-flow min-cut, the only bounds are N and the sum of these
    over the nodes, divided by the number of experts (ERRATA, Lazarus 4).
    """
    return min(slots.size, int(np.minimum(slots, experts).sum()) // experts)


def _allocate_by_equation_1(tokens: IntArray, total: int, minimum: int) -> IntArray:
    """Return the replicas `(L, E)` of Eq. (1), at least `minimum` of each expert and `total` in each layer.

    From the expert with the fewest `tokens` `(L, E)` on, each gets its share of the slots that are left, rounded down.
    `E * minimum <= total` keeps every entry at least `minimum` and the counts monotone.
    """
    order = np.argsort(tokens, axis=1, kind="stable")
    ascending = np.ascontiguousarray(np.take_along_axis(tokens, order, axis=1).T)
    # tails[e] = load of expert e and all hotter ones; never 0, since the hottest has load.
    tails = np.cumsum(ascending[::-1], axis=0)[::-1]
    left = np.full(tokens.shape[0], total, dtype=np.int64)
    share = np.empty_like(ascending)
    fewest = np.array(minimum)
    for load, tail, replicas in zip(ascending, tails, share, strict=True):
        np.multiply(load, left, out=replicas)
        np.floor_divide(replicas, tail, out=replicas)
        np.maximum(replicas, fewest, out=replicas)
        left -= replicas
    replicas = np.empty_like(tokens)
    np.put_along_axis(replicas, order, share.T, axis=1)
    return replicas


def _allocate_least_busy(tokens: IntArray, total: int, minimum: int) -> IntArray:
    """Return the replicas `(L, E)` for all layers at once, if each one beyond the `minimum` goes to the busiest expert.

    Bisection finds the tokens per replica that all replicas stay below. The last replicas are added one by one.
    """
    load = tokens.astype(np.float64)
    low: FloatArray = np.zeros(len(load))
    high: FloatArray = load.max(axis=1) / minimum
    replicas = np.full(tokens.shape, minimum, dtype=np.int64)
    for _ in range(_BISECTIONS):
        middle: FloatArray = (low + high) / 2
        wanted = np.maximum(np.ceil(load / np.maximum(middle, _TINY)[:, None]), minimum)
        fits = wanted.sum(axis=1) <= total
        replicas[fits] = wanted[fits].astype(np.int64)
        low[~fits] = middle[~fits]
        high[fits] = middle[fits]
    left = total - replicas.sum(axis=1)
    chosen = extra_replicas(load, replicas, int(left.max()))
    for layer, number in enumerate(left.tolist()):
        replicas[layer] += np.bincount(chosen[layer, :number], minlength=tokens.shape[1])
    return replicas


def _describe_shortage(experts: int, slots: IntArray) -> Shortage:
    """Return the shortage of a plan with more experts than slots, with its remedy."""
    nodes, total = slots.size, int(slots.sum())
    mean = max(total // nodes, 1)
    have = "1 node has" if nodes == 1 else f"{nodes} nodes have"
    return Shortage(
        reason=f"{experts} experts need {experts} slots, but {have} {total}",
        remedy=f"raise slots to {-(-experts // nodes)} a node, or nodes to {-(-experts // mean)}",
    )
