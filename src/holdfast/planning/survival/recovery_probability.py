"""The probability that a model survives the loss of nodes chosen at random (Lazarus, 6.3; ERRATA, Lazarus 3).

Axes: L layers, E experts, N nodes, S sets of nodes, K lost nodes at the most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.survival.disjoint import disjoint_sizes, losses_of_disjoint, some_disjoint_sizes
from holdfast.planning.survival.hitting import smallest_sets
from holdfast.planning.survival.sweep import LossShares, sweep

#: Effort (about microseconds) of one exact sweep: for a curve that is shown, and for one among many candidates.
_THOROUGH, _QUICK = 1_000_000, 60_000
#: Where not all numbers of lost nodes can be computed, one of these is, each with a quarter of the effort.
_FEWER = (64, 16, 6, 4, 3, 2, 1)
#: Places in random orders of loss that are in memory at once.
_MOST_PLACES = 1 << 23
#: Two-sided 95 % quantile of the normal distribution.
_Z = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCurve:
    """Recovery probability by number of lost nodes (or racks) 0..N, `(N + 1,)` each."""

    probability: FloatArray
    #: 95 % confidence interval (Wilson); both equal to `probability` where that is exact.
    low: FloatArray
    high: FloatArray

    @property
    def exact(self) -> bool:
        """Whether no entry is sampled."""
        return bool((self.low == self.high).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class FatalShare:
    """Between what bounds the share of fatal losses lies, by number of lost nodes 0..N, `(N + 1,)` each.

    Equal where it is exact; each is exact to about 12 digits, however small.
    """

    least: FloatArray
    most: FloatArray


def recovery_curve(
    counts: IntArray, *, rates: FloatArray | None = None, samples: int = 20_000, seed: int = 0
) -> RecoveryCurve:
    """Return the recovery curve of a placement: all its layers and experts must survive at once.

    `counts` `(L, E, N)` (or `(E, N)` for one layer) replicas per node. Exact where a sweep over the nodes can be (up to
    20 nodes, and for all host sets that are disjoint or runs of nodes, on any number of nodes), and for few lost nodes;
    otherwise from `samples` random orders of loss, with confidence intervals. `rates` `(N,)`: how often each node
    fails, in any unit (see `odds.py`); None: all alike.
    """
    sets = smallest_sets(counts > 0)
    outcome = _outcome(sets, _THOROUGH, rates)
    if outcome.survived.size > counts.shape[-1]:
        return RecoveryCurve(probability=outcome.survived, low=outcome.survived, high=outcome.survived)
    return _sampled(sets, outcome.survived, samples, np.random.default_rng(seed), rates)


def rack_curve(counts: IntArray, racks: IntArray, *, samples: int = 20_000, seed: int = 0) -> RecoveryCurve:
    """Return the recovery curve by number of lost `racks`; `racks` `(N,)` is each node's rack as 0, 1, ..."""
    names = np.unique(racks)
    by_rack = np.stack([counts[..., racks == name].sum(axis=-1) for name in names], axis=-1)
    return recovery_curve(by_rack, samples=samples, seed=seed)


def fatal_share(hosts: BoolArray, rates: FloatArray | None = None) -> FatalShare:
    """Return the share of fatal losses where `hosts` `(..., N)` are the experts' nodes: never sampled.

    `rates` `(N,)` as for `recovery_curve`.

    Exact as far as a quick sweep reaches. Beyond, no smaller than for fewer lost nodes, and no larger than the sum
    over the host sets.
    """
    sets = smallest_sets(hosts)
    exact = _outcome(sets, _QUICK, rates).fatal
    least, most = _at_least(sets, exact, rates), _at_most(sets, rates)
    least[: exact.size] = most[: exact.size] = exact
    return FatalShare(least=least, most=np.maximum(most, least))


def _outcome(sets: BoolArray, effort: int, rates: FloatArray | None) -> LossShares:
    """Return exact shares `(K + 1,)` for as many lost nodes as the `effort` allows, at best K = N."""
    nodes: int = sets.shape[1]
    if not sets.any(axis=1).all():
        none: FloatArray = np.zeros(nodes + 1)
        return LossShares(fatal=1.0 - none, survived=none)
    sizes = disjoint_sizes(sets)
    if sizes is not None:
        return losses_of_disjoint(sizes, nodes, nodes, None if rates is None else rates[_set_by_set(sets)])
    for most_lost in (nodes, *(fewer for fewer in _FEWER if fewer < nodes)):
        outcome = sweep(sets, most_lost, effort if most_lost == nodes else effort // 4, rates)
        if outcome is not None:
            return outcome
    return LossShares(fatal=np.zeros(1), survived=np.ones(1))


def _set_by_set(sets: BoolArray) -> IntArray:
    """Return the nodes `(N,)` of disjoint `sets` `(S, N)`, smaller ones first, then those in none."""
    order = np.argsort(sets.sum(axis=1), kind="stable")
    return np.concatenate([*(np.flatnonzero(sets[place]) for place in order), np.flatnonzero(~sets.any(axis=0))])


def _at_least(sets: BoolArray, exact: FloatArray, rates: FloatArray | None) -> FloatArray:
    """Return a share of fatal losses `(N + 1,)` that is no greater than the true one, of which the first are `exact`.

    It is no smaller than for fewer lost nodes, nor than if only some of the `sets` mattered that share no node.
    """
    nodes: int = sets.shape[1]
    least: FloatArray = np.full(nodes + 1, exact[-1])
    if exact.size <= nodes and rates is None:
        least = np.maximum(least, losses_of_disjoint(some_disjoint_sizes(sets), nodes, nodes).fatal)
    return least


def _at_most(sets: BoolArray, rates: FloatArray | None) -> FloatArray:
    """Return a share of fatal losses `(N + 1,)` that is no smaller than the true one; with `rates`, just ones."""
    if rates is None:
        return _sum_over_sets(sets)
    nodes: int = sets.shape[1]
    return np.ones(nodes + 1)


def _sum_over_sets(sets: BoolArray) -> FloatArray:
    """Return the sum over `sets` `(S, N)` of how likely lost nodes take all of it, by their number, `(N + 1,)`, at most
    1."""
    nodes = sets.shape[1]
    sizes, number = np.unique(sets.sum(axis=1), return_counts=True)
    lost = indices(nodes + 1)[:, None]
    spare = np.maximum(lost - sizes, 0)
    # C(N - s, k - s) / C(N, k), in logarithms.
    factorial = np.cumsum(np.log(np.maximum(indices(nodes + 1), 1)))
    logs = factorial[nodes - sizes] - factorial[spare] + factorial[lost] - factorial[nodes]
    share = np.where(lost < sizes, 0.0, np.exp(logs))
    return np.minimum(share @ number, 1.0)


def _sampled(
    sets: BoolArray, known: FloatArray, samples: int, rng: np.random.Generator, rates: FloatArray | None = None
) -> RecoveryCurve:
    """Lose the nodes in random orders; an order shows at once which numbers of lost nodes it survives.

    With `rates` `(N,)` they fail one after another, each at its rate: for few lost nodes that is as in `odds.py`.

    A set dies with its last node, the model with its first set. One order serves all numbers of lost nodes, so the
    curve never rises. The first few are `known`.
    """
    nodes = sets.shape[1]
    # died[d]: orders that are alive with up to d nodes lost.
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
    low, high = _wilson(share, samples)
    for curve in (share, low, high):
        # Recovery never rises with the number of lost nodes.
        np.minimum(curve, known[-1], out=curve)
        curve[: known.size] = known
        curve[nodes] = 0.0
    return RecoveryCurve(probability=share, low=low, high=high)


def _wilson(share: FloatArray, samples: int) -> tuple[FloatArray, FloatArray]:
    """Return Wilson's score interval, which stays honest at shares of 0 and 1."""
    square = _Z * _Z / samples
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * np.sqrt(share * (1 - share) / samples + square / (4 * samples))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
