"""What makes one placement better than another: recovery, weighted by how likely each number of lost nodes is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, indices

#: One unit of recovery below the floor costs more than all of the weighted recovery can bring.
_FLOOR_PENALTY = 1e3


def default_weights(nodes: int) -> FloatArray:
    """Return the weights `[N + 1]` of 0..N lost nodes: each further node at once is half as likely; losing none is no
    event."""
    weights = np.where(indices(nodes + 1) > 0, 0.5 ** indices(nodes + 1), 0.0)
    return weights / weights.sum()


def as_weights(shares: dict[int, float], nodes: int) -> FloatArray:
    """Return weights `[N + 1]` from the share of each number of lost nodes.

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
    """Weighted recovery, with a floor that comes first."""

    #: `[N + 1]`, summing to one.
    weights: FloatArray
    #: `[N + 1]` recovery that must not be undercut; 0 where it does not matter.
    floor: FloatArray

    def value(self, recovery: FloatArray) -> float:
        """Return how good a recovery curve `[N + 1]` is."""
        below = np.maximum(self.floor - recovery, 0.0)
        return float(recovery @ self.weights - _FLOOR_PENALTY * below.sum())
