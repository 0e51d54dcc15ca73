"""The probability that a model survives the loss of nodes chosen at random (Lazarus, 6.3; ERRATA, Lazarus 3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.hitting import components, count_disjoint, count_small_losses, count_survivals, smallest_sets

#: Up to this many nodes (per group of overlapping host sets) all losses are enumerated.
EXACT_UP_TO_NODES = 20
#: Losses tried one by one, for few lost nodes of many, before sampling takes over.
_MOST_LOSSES = 50_000
#: Two-sided 95 % quantile of the normal distribution.
_Z = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCurve:
    """Recovery probability by number of lost nodes (or racks) 0..N, `[N + 1]` each."""

    probability: FloatArray
    #: 95 % confidence interval (Wilson); both equal to `probability` where that is exact.
    low: FloatArray
    high: FloatArray

    @property
    def exact(self) -> bool:
        """Whether no entry is sampled."""
        return bool((self.low == self.high).all())

    def expected(self, weights: FloatArray) -> float:
        """Return the mean over a distribution of the number of lost nodes, `[N + 1]`."""
        return float(self.probability @ weights)


def recovery_curve(counts: IntArray, *, samples: int = 20_000, seed: int = 0) -> RecoveryCurve:
    """Return the recovery curve of a placement: all its layers and experts must survive at once.

    *counts* `[L, E, N]` (or `[E, N]` for one layer) replicas per node. Exact wherever the experts' host sets fall into
    groups without common nodes, each a single set or of at most 20 nodes (their counts multiply), and for few lost
    nodes; otherwise from *samples* random orders of loss, with confidence intervals.
    """
    nodes = counts.shape[-1]
    sets = smallest_sets(counts > 0)
    if not sets.any(axis=1).all():
        return _exact([0] * (nodes + 1), nodes)
    survivals = _multiply_components(sets)
    if survivals is not None:
        return _exact(survivals, nodes)
    few = count_small_losses(sets, _MOST_LOSSES)
    return _sampled(sets, few, samples, np.random.default_rng(seed))


def rack_curve(counts: IntArray, racks: IntArray, *, samples: int = 20_000, seed: int = 0) -> RecoveryCurve:
    """Return the recovery curve by number of lost *racks*; *racks* `[N]` is each node's rack as 0, 1, ..."""
    names = np.unique(racks)
    by_rack = np.stack([counts[..., racks == name].sum(axis=-1) for name in names], axis=-1)
    return recovery_curve(by_rack, samples=samples, seed=seed)


def _multiply_components(sets: BoolArray) -> list[int] | None:
    """Return survivals by number of lost nodes, or None where a group of overlapping sets is too large."""
    groups = components(sets)
    nodes = sets.shape[1]
    free = nodes - sum(group.size for group in groups)
    survivals = [comb(free, lost) for lost in range(free + 1)]
    for group in groups:
        members = sets[sets[:, group].any(axis=1)][:, group]
        if len(members) == 1:
            factor = count_disjoint(group.size)
        elif group.size <= EXACT_UP_TO_NODES:
            factor = count_survivals(members)
        else:
            return None
        survivals = _multiply(survivals, factor)
    return survivals


def _multiply(left: list[int], right: list[int]) -> list[int]:
    """Multiply two polynomials of exact integers."""
    product = np.convolve(np.array(left, dtype=object), np.array(right, dtype=object))
    return [int(number) for number in product]


def _exact(survivals: list[int], nodes: int) -> RecoveryCurve:
    probability = np.array([number / comb(nodes, lost) for lost, number in enumerate(survivals)])
    return RecoveryCurve(probability=probability, low=probability, high=probability)


def _sampled(sets: BoolArray, few: list[int], samples: int, rng: np.random.Generator) -> RecoveryCurve:
    """Lose the nodes in random orders; an order shows at once which numbers of lost nodes it survives.

    A set dies with its last node, the model with its first set. One order serves all numbers of lost nodes, so the
    curve never rises.
    """
    nodes = sets.shape[1]
    place = rng.permuted(np.broadcast_to(indices(nodes), (samples, nodes)), axis=1)
    death = np.full(samples, nodes)
    for members in sets:
        np.minimum(death, place[:, members].max(axis=1), out=death)
    # death = d: alive with up to d nodes lost.
    share = np.array([(death >= lost).mean() for lost in range(nodes + 1)])
    low, high = _wilson(share, samples)
    known = [number / comb(nodes, lost) for lost, number in enumerate(few)]
    for curve in (share, low, high):
        curve[: len(known)] = known
        curve[nodes] = 0.0
    return RecoveryCurve(probability=share, low=low, high=high)


def _wilson(share: FloatArray, samples: int) -> tuple[FloatArray, FloatArray]:
    """Return Wilson's score interval, which stays honest at shares of 0 and 1."""
    square = _Z * _Z / samples
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * np.sqrt(share * (1 - share) / samples + square / (4 * samples))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
