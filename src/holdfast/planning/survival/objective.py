"""The cost of a placement: its fatal losses, weighted by the probability of each number of lost nodes.

Axes: N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, indices

#: The cost of one unit of fatal losses above the ceiling: more than all weighted losses.
_CEILING_PENALTY = 1e3
#: The relative rounding difference of equal costs.
_ROUNDING = 1e-9


def default_weights(nodes: int) -> FloatArray:
    """Return the default weights `(N + 1,)` of 0..N lost nodes.

    Each further node lost at the same time is half as likely. Losing no node has weight 0.
    """
    weights = np.where(indices(nodes + 1) > 0, 0.5 ** indices(nodes + 1), 0.0)
    return weights / weights.sum()


def as_weights(shares: dict[int, float], nodes: int) -> FloatArray:
    """Return weights `(N + 1,)` from the share of each number of lost nodes.

    Raises:
        BadInputError: A number of nodes is outside 0..N, a share is negative or not finite, or the sum is not one.
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
    """Weighted fatal losses, with a ceiling that takes priority.

    The objective uses the share of fatal losses rather than the recovery probability. Of 1,500 nodes, losing three may
    be fatal once in 10**8 or once in 10**6 cases. Floating point distinguishes these shares, but the recovery is 1 for
    both.
    """

    #: `(N + 1,)`, summing to one.
    weights: FloatArray
    #: `(N + 1,)` share of fatal losses that must not be exceeded; 1 for no limit.
    ceiling: FloatArray

    def cost(self, fatal: FloatArray) -> float:
        """Return the weighted sum of a placement's share of `fatal` losses `(N + 1,)`.

        Any excess over the ceiling adds a thousand times its size.
        """
        above = np.maximum(fatal - self.ceiling, 0.0)
        return float(fatal @ self.weights + _CEILING_PENALTY * above.sum())


def is_no_worse(cost: float, than: float) -> bool:
    """Return whether `cost` is at most `than`, except for rounding."""
    return cost <= than * (1 + _ROUNDING)
