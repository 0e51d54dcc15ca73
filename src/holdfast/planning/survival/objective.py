"""What makes one placement better than another: fatal losses, weighted by how likely each number of lost nodes is.

Axes: N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, indices

#: One unit of fatal losses above the ceiling costs more than all of the weighted ones.
_CEILING_PENALTY = 1e3
#: Costs that are equal may differ by this share of them.
_ROUNDING = 1e-9


def default_weights(nodes: int) -> FloatArray:
    """Return the weights `(N + 1,)` of 0..N lost nodes: each further node at once is half as likely; losing none is no
    event."""
    weights = np.where(indices(nodes + 1) > 0, 0.5 ** indices(nodes + 1), 0.0)
    return weights / weights.sum()


def as_weights(shares: dict[int, float], nodes: int) -> FloatArray:
    """Return weights `(N + 1,)` from the share of each number of lost nodes.

    Raises `BadInputError` for numbers of nodes outside 0..N, shares below 0 or not finite, and a sum other than one.
    """
    weights = np.zeros(nodes + 1)
    for lost, share in shares.items():
        if not 0 <= lost <= nodes:
            raise BadInputError(f"failure weight for {lost} lost nodes: there are only {nodes} nodes")
        if not (np.isfinite(share) and share >= 0):
            raise BadInputError(
                f"failure weight for {lost} lost nodes is {share:g}: weights are shares between 0 and 1"
            )
        weights[lost] = share
    if abs(float(weights.sum()) - 1.0) > 1e-6:
        raise BadInputError(f"failure weights sum to {weights.sum():g}: scale them to sum to one")
    return weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Weighted losses, with a ceiling that comes first.

    Of 1,500 nodes, losing three is fatal once in 10**8 times or once in 10**6: so what counts is the share of fatal
    losses, which floating point tells apart however small, and not recovery, which is 1 for both.
    """

    #: `(N + 1,)`, summing to one.
    weights: FloatArray
    #: `(N + 1,)` share of fatal losses that must not be exceeded; 1 where it does not matter.
    ceiling: FloatArray

    def cost(self, fatal: FloatArray) -> float:
        """Return how bad a placement is by its share of `fatal` losses `(N + 1,)`."""
        above = np.maximum(fatal - self.ceiling, 0.0)
        return float(fatal @ self.weights + _CEILING_PENALTY * above.sum())


def no_worse(cost: float, than: float) -> bool:
    """Whether one cost is no greater than another one, but for rounding."""
    return cost <= than * (1 + _ROUNDING)
