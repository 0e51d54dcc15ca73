"""The probability that a model survives the loss of random nodes (Lazarus, 6.3; ERRATA, Lazarus 3).

Axes: L layers, E experts, N nodes, S sets of nodes, K the most lost nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.survival.disjoint import disjoint_sizes, losses_of_disjoint, some_disjoint_sizes
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.sweep import LossShares, sweep

#: The effort of one exact sweep, about in microseconds: for a curve that is shown, and for one of many candidates.
_THOROUGH, _QUICK = 1_000_000, 60_000
#: The numbers of lost nodes to try, with a quarter of the effort each, if not all numbers can be computed.
_FEWER = (64, 16, 6, 4, 3, 2, 1)
#: The most entries of random orders in memory at once.
_MOST_PLACES = 1 << 23
#: Two-sided 95 % quantile of the normal distribution.
_Z = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCurve:
    """Recovery probability by number of lost nodes (or racks) 0..N, `(N + 1,)` each."""

    probability: FloatArray
    #: The lower end of the 95 % confidence interval (Wilson); equal to `probability` if that is exact.
    low: FloatArray
    #: The upper end of this interval.
    high: FloatArray

    @property
    def exact(self) -> bool:
        """Whether no entry is sampled."""
        return bool((self.low == self.high).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class FatalShare:
    """Bounds of the share of fatal losses, by number of lost nodes 0..N, `(N + 1,)` each.

    The bounds are equal if the share is known exactly. Each is accurate to about 12 digits, however small.
    """

    least: FloatArray
    most: FloatArray


def recovery_curve(
    counts: IntArray, *, rates: FloatArray | None = None, samples: int = 20_000, seed: int = 0
) -> RecoveryCurve:
    """Return the recovery curve of a placement: all its layers and experts must survive at once.

    The curve is exact for few lost nodes, and if a sweep over the nodes is possible: for up to 20 nodes, and for host
    sets that are disjoint or runs of nodes, on any number of nodes. Otherwise it is sampled, with confidence intervals.

    Args:
        counts: `(L, E, N)` replicas per node, or `(E, N)` for one layer.
        rates: `(N,)` how often each node fails, in any unit (see `odds.py`); None if nodes are alike.
        samples: The number of random orders of loss.
        seed: The seed of these orders.
    """
    sets = smallest_sets(counts > 0)
    outcome = _exact_shares(sets, _THOROUGH, rates)
    if outcome.survived.size > counts.shape[-1]:
        return RecoveryCurve(probability=outcome.survived, low=outcome.survived, high=outcome.survived)
    return _sample_curve(sets, outcome.survived, samples, np.random.default_rng(seed), rates)


def rack_curve(counts: IntArray, racks: IntArray, *, samples: int = 20_000, seed: int = 0) -> RecoveryCurve:
    """Return the recovery curve by number of lost `racks`; `racks` `(N,)` is each node's rack as 0, 1, ..."""
    names = np.unique(racks)
    by_rack = np.stack([counts[..., racks == name].sum(axis=-1) for name in names], axis=-1)
    return recovery_curve(by_rack, samples=samples, seed=seed)


def fatal_share(hosts: BoolArray, rates: FloatArray | None = None) -> FatalShare:
    """Return bounds of the share of fatal losses for experts with these `hosts` `(..., N)`, without sampling.

    The share is exact as far as a quick sweep reaches. Beyond, the lower bound is the share for fewer lost nodes, and
    the upper bound the sum over the host sets. `rates` `(N,)` are as for `recovery_curve`.
    """
    sets = smallest_sets(hosts)
    exact = _exact_shares(sets, _QUICK, rates).fatal
    least, most = _fatal_lower_bound(sets, exact, rates), _fatal_upper_bound(sets, rates)
    least[: exact.size] = most[: exact.size] = exact
    return FatalShare(least=least, most=np.maximum(most, least))


def _exact_shares(sets: BoolArray, effort: int, rates: FloatArray | None) -> LossShares:
    """Return exact shares `(K + 1,)` for as many lost nodes as the `effort` allows, at best K = N.

    Every loss is fatal if one of the `sets` `(S, N)` is empty. The last resort is K = 0.
    """
    nodes: int = sets.shape[1]
    if not sets.any(axis=1).all():
        none: FloatArray = np.zeros(nodes + 1)
        return LossShares(fatal=1.0 - none, survived=none)
    sizes = disjoint_sizes(sets)
    if sizes is not None:
        return losses_of_disjoint(sizes, nodes, nodes, None if rates is None else rates[_nodes_by_set(sets)])
    for most_lost in (nodes, *(fewer for fewer in _FEWER if fewer < nodes)):
        outcome = sweep(sets, most_lost, effort if most_lost == nodes else effort // 4, rates)
        if outcome is not None:
            return outcome
    return LossShares(fatal=np.zeros(1), survived=np.ones(1))


def _nodes_by_set(sets: BoolArray) -> IntArray:
    """Return the nodes `(N,)` of disjoint `sets` `(S, N)`, smaller sets first, then the nodes in no set."""
    order = np.argsort(sets.sum(axis=1), kind="stable")
    return np.concatenate([*(np.flatnonzero(sets[place]) for place in order), np.flatnonzero(~sets.any(axis=0))])


def _fatal_lower_bound(sets: BoolArray, exact: FloatArray, rates: FloatArray | None) -> FloatArray:
    """Return a lower bound of the share of fatal losses `(N + 1,)`; `exact` are its first entries.

    It is at least the share for the most lost nodes in `exact`, and, without `rates`, the share of some disjoint `sets`
    alone.
    """
    nodes: int = sets.shape[1]
    least: FloatArray = np.full(nodes + 1, exact[-1])
    if exact.size <= nodes and rates is None:
        least = np.maximum(least, losses_of_disjoint(some_disjoint_sizes(sets), nodes, nodes).fatal)
    return least


def _fatal_upper_bound(sets: BoolArray, rates: FloatArray | None) -> FloatArray:
    """Return an upper bound of the share of fatal losses `(N + 1,)`; with `rates`, only ones."""
    if rates is None:
        return _sum_over_sets(sets)
    nodes: int = sets.shape[1]
    return np.ones(nodes + 1)


def _sum_over_sets(sets: BoolArray) -> FloatArray:
    """Return the sum over `sets` `(S, N)` of the probability that a loss takes the whole set, at most 1.

    The result `(N + 1,)` is indexed by the number of lost nodes.
    """
    nodes = sets.shape[1]
    sizes, number = np.unique(sets.sum(axis=1), return_counts=True)
    lost = indices(nodes + 1)[:, None]
    spare = np.maximum(lost - sizes, 0)
    # C(N - s, k - s) / C(N, k), in logarithms.
    factorial = np.cumsum(np.log(np.maximum(indices(nodes + 1), 1)))
    logs = factorial[nodes - sizes] - factorial[spare] + factorial[lost] - factorial[nodes]
    share = np.where(lost < sizes, 0.0, np.exp(logs))
    return np.minimum(share @ number, 1.0)


def _sample_curve(
    sets: BoolArray, known: FloatArray, samples: int, rng: np.random.Generator, rates: FloatArray | None = None
) -> RecoveryCurve:
    """Return a curve sampled from random orders in which all nodes are lost.

    A set dies with its last node, and the model with its first set. One order serves all numbers of lost nodes, so the
    curve never rises. Its first entries are `known`. With `rates` `(N,)`, each node fails at its rate; for few lost
    nodes that is the distribution of `odds.py`.
    """
    nodes = sets.shape[1]
    # died[d] counts the orders that survive the loss of d nodes but not of d + 1.
    died = np.zeros(nodes + 1, dtype=np.int64)
    at_once = max(_MOST_PLACES // nodes, 1)
    for begun in range(0, samples, at_once):
        orders = min(at_once, samples - begun)
        if rates is None:
            place = rng.permuted(np.broadcast_to(indices(nodes), (orders, nodes)), axis=1)
        else:
            place = (rng.exponential(size=(orders, nodes)) / rates).argsort(axis=1).argsort(axis=1)
        death = np.full(orders, nodes)
        for members in sets:
            np.minimum(death, place[:, members].max(axis=1), out=death)
        died += np.bincount(death, minlength=nodes + 1)
    share = 1.0 - (np.cumsum(died) - died) / samples
    low, high = _wilson_interval(share, samples)
    for curve in (share, low, high):
        # Recovery never rises with the number of lost nodes.
        np.minimum(curve, known[-1], out=curve)
        curve[: known.size] = known
        curve[nodes] = 0.0
    return RecoveryCurve(probability=share, low=low, high=high)


def _wilson_interval(share: FloatArray, samples: int) -> tuple[FloatArray, FloatArray]:
    """Return Wilson's score interval, which stays valid at shares of 0 and 1."""
    square = _Z * _Z / samples
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * np.sqrt(share * (1 - share) / samples + square / (4 * samples))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
