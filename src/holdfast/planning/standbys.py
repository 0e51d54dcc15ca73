"""How many warm standby nodes pay for themselves.

Axes: S numbers of standbys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.special import FloatArray, IntArray, require_finite, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class StandbyCase:
    """A job with some nodes that may be kept warm and idle instead of training."""

    nodes: int
    mtbf_node_hours: float
    mttr_hours: float
    #: How long the whole job stops after a failure if a warm standby takes over.
    down_seconds_with: float
    #: How long it stops if no standby is ready.
    down_seconds_without: float

    def __post_init__(self) -> None:
        """Raise `BadInputError` unless all numbers are finite, the first three positive and the down times at least 0.

        The down time with a standby may not exceed that without one.
        """
        for key in ("nodes", "mtbf_node_hours", "mttr_hours"):
            require_positive(f"standbys.{key}", getattr(self, key))
            require_finite(f"standbys.{key}", getattr(self, key))
        for key in ("down_seconds_with", "down_seconds_without"):
            require_not_negative(f"standbys.{key}", getattr(self, key))
            require_finite(f"standbys.{key}", getattr(self, key))
        if self.down_seconds_with > self.down_seconds_without:
            raise BadInputError(
                f"standbys.down_seconds_with = {self.down_seconds_with:g}: must be at most "
                f"down_seconds_without = {self.down_seconds_without:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StandbyPlan:
    """The outcome for 0, 1, 2, ... standbys; arrays `(S,)`."""

    standbys: IntArray
    #: The probability that a failure finds no standby ready.
    p_none_ready: FloatArray
    #: The share of time in which the job is stopped.
    stopped: FloatArray
    #: The average training done, in nodes.
    goodput_nodes: FloatArray

    @property
    def best(self) -> int:
        """The number of standbys with the most goodput; the smallest of equals."""
        return int(self.standbys[np.argmax(self.goodput_nodes)])

    @property
    def most_that_pay(self) -> int:
        """The largest number of standbys that is better than no standby; 0 if no number is."""
        return int(self.standbys[self.goodput_nodes > self.goodput_nodes[0]].max(initial=0))


def plan_standbys(case: StandbyCase) -> StandbyPlan:
    """Return the outcome for every number of standbys from 0 to `nodes - 1`.

    With s standbys, n = nodes - s nodes train. After a failure a ready standby takes over, and the repaired node
    becomes the new standby after MTTR. If no standby is ready, the job waits `down_seconds_without` for a node from
    elsewhere.

    So the standbys are the servers of a loss system with offered load a = n MTTR / MTBF. A failure finds no standby
    with probability B(s, a) (Erlang B), whatever the distribution of repair times. The job stops for the mean down time
    once per failure: goodput = n / (1 + n / MTBF * down). Failures during a stop are not counted.
    """
    standbys = np.arange(case.nodes, dtype=np.int64)
    working = (case.nodes - standbys).astype(np.float64)
    load = working * case.mttr_hours / case.mtbf_node_hours
    # Ten standard deviations above the mean number in repair, the loss probability rounds to 0.
    tail = min(case.nodes, int(load[0] + 10.0 * math.sqrt(load[0])) + 50)
    none_ready = np.zeros(case.nodes)
    none_ready[:tail] = erlang_b(standbys[:tail], load[:tail])
    down_hours = (case.down_seconds_with + (case.down_seconds_without - case.down_seconds_with) * none_ready) / 3600.0
    ratio = working / case.mtbf_node_hours * down_hours
    return StandbyPlan(
        standbys=standbys,
        p_none_ready=none_ready,
        stopped=ratio / (1.0 + ratio),
        goodput_nodes=working / (1.0 + ratio),
    )


def probability_none_ready(standbys: IntArray, load: float) -> FloatArray:
    """Return the probability that none of `standbys` `(S,)` is ready, if no node comes from elsewhere.

    On average `load` nodes are in repair, independently. Their number then has a Poisson distribution, whatever the
    distribution of repair times. A failure finds no standby ready if at least that many nodes are already in repair.
    """
    from_none = 1.0 - repair_distribution(int(standbys.max(initial=0)), load).cumsum()
    return np.clip(np.where(standbys > 0, from_none[np.maximum(standbys, 1) - 1], 1.0), 0.0, 1.0)


def repair_distribution(most: int, load: float) -> FloatArray:
    """Return the probabilities `(most + 1,)` that exactly 0, 1, ..., `most` nodes are in repair, with `load` on
    average.

    They are Poisson's, not rescaled, so they sum to less than 1.
    """
    terms = np.ones(most + 1)
    terms[1:] = load / np.arange(1, most + 1)
    return math.exp(-load) * terms.cumprod()


def erlang_b(servers: IntArray, load: FloatArray) -> FloatArray:
    """Return Erlang's loss probability for each pair of `servers` `(S,)` and offered `load` `(S,)`.

    Uses the stable recursion 1/B(s) = 1 + s/a / B(s-1), 1/B(0) = 1.
    """
    inverse = np.ones(load.shape)
    for s in range(1, int(servers.max(initial=0)) + 1):
        with np.errstate(over="ignore"):
            inverse = np.where(s <= servers, 1.0 + s / load * inverse, inverse)
    return 1.0 / inverse
