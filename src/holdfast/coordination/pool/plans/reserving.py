"""Chooses how many nodes a pool reserves for jobs that lose one (`--reserve auto`).

It uses the sparing model (`reliability.sparing`): nodes fail and are repaired at the observed rates, so that some are
in repair at any time. A reserve of r replaces the first r of them, and jobs share the rest. Each failure stops the job
that it hits: shortly if the job has a standby, longer if it continues with fewer nodes, and longest if it cannot, and
another job must give up a node. A node in the reserve competes with a node in a job. The reserve with the most weighted
FLOP/s wins; of equals, the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.coordination.pool.share.achieving import MAX_CHANGE_S, MAX_RUNNING_S, build_tasks
from holdfast.coordination.pool.share.interface import Bid
from holdfast.planning.arrays import FloatArray, indices
from holdfast.planning.standbys import probability_none_ready, repair_distribution
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.plan import BestDivisions
from holdfast.protocol.pool.sharing import JobCosts

#: largest reserve that is considered
MAX_RESERVE = 64
#: Prior of how long a failed node stays away, in seconds: the mean of 584 faults of 400 servers (StepFun).
KNOWN_REPAIR_S = 132.84 * 3600
#: Stop times until a job has measured its own, seconds. COLD_S is the start of a new node without warm processes.
REPLACED_S = 1.0
HIT_S = 1.0
COLD_S = 10.0
#: nodes in repair considered, in standard deviations above their mean
_DEVIATIONS = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopTimes:
    """How long a failure stops a job, in seconds."""

    #: with a standby that replaces the node
    replaced_s: float
    #: if the job continues with one node fewer
    hit_s: float
    #: if the job must get a node first
    given_s: float


def estimate_stop_times(costs: JobCosts, move_s: float) -> StopTimes:
    """Return how long failures stop a job: if a standby replaces the node, if it goes on with fewer, and if it must
    wait for another.

    Unmeasured costs have defaults.

    Args:
        costs: measured costs of failures
        move_s: seconds that another change of its nodes costs
    """
    hit_s = min(costs.hit_s, MAX_CHANGE_S) or HIT_S
    replaced_s = min(costs.replaced_s, MAX_CHANGE_S) or REPLACED_S
    return StopTimes(replaced_s=replaced_s, hit_s=hit_s, given_s=hit_s + move_s + COLD_S)


def observed_repair_s(repairs: Sequence[float]) -> float:
    """Return how long a failed node stays away, in seconds: the mean of the observed repairs and one known before."""
    return (KNOWN_REPAIR_S + sum(repairs)) / (1 + len(repairs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """How many nodes of a pool are reserved as spares, and why."""

    nodes: int
    #: relative gain over no reserve
    gains: float
    failure_rate: float
    repair_s: float

    @property
    def why(self) -> str:
        """The reason for this many nodes, in words: the rate of failures and repairs, and the gain."""
        between = _format_duration(1 / self.failure_rate)
        rate = f"a node fails once in {between} and is back after {_format_duration(self.repair_s)}"
        if not self.nodes:
            return f"no node is kept back: {rate}; each is worth more in a job"
        return f"kept back, since {rate}: {self.gains:.2%} more is achieved than with none"


def find_best_reserve(
    bids: Sequence[Bid], nodes: int, failure_rate: float, repair_s: float, stops: Mapping[str, StopTimes], now: int = 0
) -> Reserve:
    """Return how many of the nodes to reserve for the largest mean worth, the fewest among equals; 0 without a job that
    is not preemptible, or if their minima take all nodes.

    Args:
        bids: jobs that keep their minimum, and jobs that wait
        nodes: nodes that the pool knows, failed or not
        failure_rate: failures of a node per second
        repair_s: mean time to repair
        stops: stop times by job
        now: The current reserve. It stays if another does not pay for its moves until the next failure.
    """
    firm = [bid for bid in bids if not bid.preemptible]
    most = min(MAX_RESERVE, nodes - 1, nodes - sum(bid.smallest for bid in firm if bid.admitted))
    if not firm or most < 1:
        return Reserve(nodes=0, gains=0.0, failure_rate=failure_rate, repair_s=repair_s)
    until = running_s(nodes, failure_rate, MAX_RUNNING_S)
    divisions = Divisions(firm, nodes, until)
    worth = compute_reserve_worth(divisions, most, failure_rate, repair_s, stops)
    # If nodes fail faster than jobs progress, every worth is negative.
    best = int(np.flatnonzero(worth >= worth.max() - 1e-9 * abs(worth.max()))[0])
    if now <= most and (worth[best] - worth[now]) * until <= abs(best - now) * divisions.dearest_move:
        best = now
    gains = float(worth[best] / worth[0]) - 1.0 if worth[0] > 0 else 0.0
    return Reserve(nodes=best, gains=gains, failure_rate=failure_rate, repair_s=repair_s)


def compute_reserve_worth(
    divisions: Divisions, most: int, failure_rate: float, repair_s: float, stops: Mapping[str, StopTimes]
) -> FloatArray:
    """Return the mean weighted FLOP/s with 0..most nodes reserved, `(most + 1,)`: over the numbers of nodes in repair,
    less the time in which failures stop jobs.

    Args:
        failure_rate: failures of a node per second
        repair_s: mean time to repair
        stops: stop times by job
    """
    nodes = divisions.nodes
    load = nodes * failure_rate * repair_s
    away = min(nodes - 1, max(most, int(load + _DEVIATIONS * load**0.5) + 1))
    waf = np.array([divisions.waf(divisions.sizes(nodes - gone)).sum() for gone in range(away + 1)])
    odds = repair_distribution(away, load)
    odds[-1] += max(0.0, 1.0 - float(odds.sum()))
    without = probability_none_ready(indices(most + 1), load)
    worth = np.empty(most + 1)
    for reserve in range(most + 1):
        sizes = divisions.sizes(nodes - reserve)
        stopped = _mean_stop_times(divisions.bids, sizes, reserve, float(without[reserve]), stops)
        stands = np.array(sizes) * failure_rate * stopped
        lost = float((divisions.waf(sizes) * stands / (1.0 + stands)).sum())
        worth[reserve] = float(odds @ waf[np.maximum(indices(away + 1), reserve)]) - lost
    return worth


class Divisions:
    """How jobs share any number of nodes: by their worth, each with at least its minimum.

    With too few nodes for that, some jobs wait until a node returns.
    """

    def __init__(self, bids: Sequence[Bid], nodes: int, until_s: float) -> None:
        """Prepare divisions of up to `nodes` nodes.

        Args:
            bids: the jobs
            nodes: largest number of nodes
            until_s: seconds until the next failure
        """
        self.bids, self.nodes = bids, nodes
        kept = {bid.name: bid.smallest if bid.admitted else 0 for bid in bids}
        made = build_tasks(bids, kept, nodes)
        self._usual = BestDivisions(made, nodes, until_s)
        self._sparse = BestDivisions([replace(task, floor=0) for task in made], nodes, until_s)
        self._waf = np.stack([task.waf(nodes) for task in made])
        #: weighted FLOP of the most expensive change of a job's nodes
        self.dearest_move = max(task.loss for task in made)

    def sizes(self, nodes: int) -> list[int]:
        """Return the nodes of each job when there are this many in total."""
        return (self._usual if self._usual.value[nodes] > -np.inf else self._sparse).sizes(nodes)

    def waf(self, sizes: Sequence[int]) -> FloatArray:
        """Return the weighted FLOP/s of each job with these sizes."""
        return self._waf[indices(len(sizes)), np.array(sizes)]


def _mean_stop_times(
    bids: Sequence[Bid], sizes: Sequence[int], reserve: int, without: float, stops: Mapping[str, StopTimes]
) -> FloatArray:
    """Return how long a failure stops each job on average, in seconds.

    Of the jobs that standbys help, those with the largest weighted sizes have a warm standby from the reserve; others
    get a cold node, or go on with fewer if that is faster.

    Args:
        bids: the jobs
        sizes: nodes of each job
        reserve: reserved nodes
        without: probability that no standby is left
    """
    order = sorted(range(len(bids)), key=lambda at: (-bids[at].weight * sizes[at], bids[at].order))
    warm = set([at for at in order if bids[at].may_wait and sizes[at]][:reserve])
    found = np.zeros(len(bids))
    for at, (bid, size) in enumerate(zip(bids, sizes, strict=True)):
        known = stops[bid.name]
        alone = known.hit_s if size > bid.smallest else known.given_s
        served = known.replaced_s if at in warm else min(alone, known.given_s)
        found[at] = (1 - without) * served + without * alone
    return found


def _format_duration(seconds: float) -> str:
    """Return seconds as minutes, hours or days."""
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"{seconds / 86400:.3g} days"
