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
    """A job on `nodes` nodes, some of which may be kept warm and idle instead of training."""

    nodes: int
    mtbf_node_hours: float
    mttr_hours: float
    #: the whole job's stop after a failure when a warm standby takes over, and when none is there
    down_seconds_with: float
    down_seconds_without: float

    def __post_init__(self) -> None:
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
    """Outcome for 0, 1, 2, ... standbys; arrays (S,)."""

    standbys: IntArray
    #: probability that a failure finds no standby ready
    p_none_ready: FloatArray
    #: share of time the job is stopped
    stopped: FloatArray
    #: nodes' worth of training done, on average
    goodput_nodes: FloatArray

    @property
    def best(self) -> int:
        """The number of standbys with most goodput, the smallest of equals."""
        return int(self.standbys[np.argmax(self.goodput_nodes)])

    @property
    def most_that_pay(self) -> int:
        """The largest number of standbys that is still better than none; 0 if none is."""
        return int(self.standbys[self.goodput_nodes > self.goodput_nodes[0]].max(initial=0))


def plan_standbys(case: StandbyCase) -> StandbyPlan:
    """Return what every number of standbys from 0 to one less than the nodes brings.

    s standbys leave n = nodes - s at work. A failure takes a standby if one is ready, and the repaired node becomes
    the new standby after MTTR; if none is ready the job waits `down_seconds_without` for a node from elsewhere. So
    the standbys are the servers of a loss system with offered load a = n MTTR / MTBF, and a failure finds none with
    Erlang's B(s, a), whatever the distribution of repair times. The job stops for the mean down time once per
    failure: goodput = n / (1 + n / MTBF * down). Failures while stopped are not counted.
    """
    standbys = np.arange(case.nodes, dtype=np.int64)
    working = (case.nodes - standbys).astype(np.float64)
    load = working * case.mttr_hours / case.mtbf_node_hours
    # Ten standard deviations above the mean number in repair, the loss probability is 0 to all digits.
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


def none_ready(standbys: IntArray, load: float) -> FloatArray:
    """Return how likely it is that none of `standbys` (S,) is ready, where no node comes from elsewhere.

    As `load` nodes are in repair on the average, each by itself and whatever the distribution of repair times, so many
    are there as a Poisson distribution says; a failure finds none ready where that many have failed before it.
    """
    from_none = 1.0 - in_repair(int(standbys.max(initial=0)), load).cumsum()
    return np.clip(np.where(standbys > 0, from_none[np.maximum(standbys, 1) - 1], 1.0), 0.0, 1.0)


def in_repair(most: int, load: float) -> FloatArray:
    """Return how likely it is that 0, 1, ... `most` nodes are in repair, `(most + 1,)`, where `load` are on average."""
    terms = np.ones(most + 1)
    terms[1:] = load / np.arange(1, most + 1)
    return math.exp(-load) * terms.cumprod()


def erlang_b(servers: IntArray, load: FloatArray) -> FloatArray:
    """Return Erlang's loss probability for `servers` (S,) and offered `load` (S,), each pair on its own.

    By the stable recursion 1/B(s) = 1 + s/a / B(s-1), 1/B(0) = 1.
    """
    inverse = np.ones(load.shape)
    for s in range(1, int(servers.max(initial=0)) + 1):
        with np.errstate(over="ignore"):
            inverse = np.where(s <= servers, 1.0 + s / load * inverse, inverse)
    return 1.0 / inverse
