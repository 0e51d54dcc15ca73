"""How many nodes a pool keeps back for jobs that lose one (`--reserve auto`): those that are worth more there than in
jobs.

By the sparing model (`reliability.sparing`): nodes fail and are repaired as often, and as fast, as was seen. So many
are in repair at a time; a reserve of r takes the places of the first r of them, and jobs share what is then left. Each
failure stops the job that it hits: shortly where a standby waits in it, longer where it goes on with fewer nodes,
longest where it can do so with none fewer, and another job has to give one up. What a node brings in the reserve
competes with what it brings in a job: the reserve with which most weighted FLOP/s come about is kept, of equals the
smallest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.coordination.pool.share.achieving import LONGEST_S, MOST_CHANGE_S, tasks
from holdfast.coordination.pool.share.interface import Bid
from holdfast.planning.arrays import FloatArray, indices
from holdfast.planning.standbys import in_repair, none_ready
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.plan import AnyNumber
from holdfast.protocol.pool.sharing import JobCosts

#: no more are kept back, nor looked at
MOST_KEPT = 64
#: how long a node is away that has failed, until enough was seen: the mean of 584 faults of 400 servers (StepFun)
KNOWN_REPAIR_S = 132.84 * 3600
#: until a job's own were measured, seconds: a node that is given to it begins cold
REPLACED_S, HIT_S, COLD_S = 1.0, 1.0, 10.0
#: more nodes than this beyond their mean are never in repair at a time
_DEVIATIONS = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """For how long a failure stops a job, seconds.

    replaced_s: a standby waits in it; hit_s: it goes on with a node fewer; given_s: it has to be given one first.
    """

    replaced_s: float
    hit_s: float
    given_s: float


def stops_of(costs: JobCosts, move_s: float) -> Stops:
    """Return for how long failures stop a job, by what they have cost it. move_s: what another change of nodes does."""
    hit_s = min(costs.hit_s, MOST_CHANGE_S) or HIT_S
    replaced_s = min(costs.replaced_s, MOST_CHANGE_S) or REPLACED_S
    return Stops(replaced_s=replaced_s, hit_s=hit_s, given_s=hit_s + move_s + COLD_S)


def observed_repair_s(repairs: Sequence[float]) -> float:
    """Return how long a node is away that has failed: the mean of those that were seen, and one as known before."""
    return (KNOWN_REPAIR_S + sum(repairs)) / (1 + len(repairs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """How many nodes are kept back, and why.

    gains: by which share more is achieved than with none.
    """

    nodes: int
    gains: float
    failure_rate: float
    repair_s: float

    @property
    def why(self) -> str:
        """Say it."""
        rate = f"a node fails once in {_days(1 / self.failure_rate)} and is back after {_days(self.repair_s)}"
        if not self.nodes:
            return f"no node is kept back: {rate}; each is worth more in a job"
        return f"kept back, since {rate}: {self.gains:.2%} more is achieved than with none"


def best_reserve(
    bids: Sequence[Bid], nodes: int, failure_rate: float, repair_s: float, stops: Mapping[str, Stops], now: int = 0
) -> Reserve:
    """Return how many of the nodes to keep back.

    Args:
        bids: of jobs that keep their least, and of those that wait. nodes: that the pool knows, failed or not.
        failure_rate: of a node, per second. repair_s: mean. now: so many are kept back: that stays so where another
            number does not make up for the moves that it takes, until the next failure.
    """
    firm = [bid for bid in bids if not bid.preemptible]
    most = min(MOST_KEPT, nodes - 1, nodes - sum(bid.smallest for bid in firm if bid.admitted))
    if not firm or most < 1:
        return Reserve(nodes=0, gains=0.0, failure_rate=failure_rate, repair_s=repair_s)
    until = running_s(nodes, failure_rate, LONGEST_S)
    divisions = Divisions(firm, nodes, until)
    worth = worth_of_reserves(divisions, most, failure_rate, repair_s, stops)
    # (where nodes fail faster than jobs go on, all are worth less than nothing)
    best = int(np.flatnonzero(worth >= worth.max() - 1e-9 * abs(worth.max()))[0])
    if now <= most and (worth[best] - worth[now]) * until <= abs(best - now) * divisions.dearest_move:
        best = now
    gains = float(worth[best] / worth[0]) - 1.0 if worth[0] > 0 else 0.0
    return Reserve(nodes=best, gains=gains, failure_rate=failure_rate, repair_s=repair_s)


def worth_of_reserves(
    divisions: Divisions, most: int, failure_rate: float, repair_s: float, stops: Mapping[str, Stops]
) -> FloatArray:
    """Return the weighted FLOP/s that come about, on average, with 0..most nodes kept back, `(most + 1,)`."""
    nodes = divisions.nodes
    load = nodes * failure_rate * repair_s
    away = min(nodes - 1, max(most, int(load + _DEVIATIONS * load**0.5) + 1))
    waf = np.array([divisions.waf(divisions.sizes(nodes - gone)).sum() for gone in range(away + 1)])
    odds = in_repair(away, load)
    odds[-1] += max(0.0, 1.0 - float(odds.sum()))
    without = none_ready(indices(most + 1), load)
    worth = np.empty(most + 1)
    for reserve in range(most + 1):
        sizes = divisions.sizes(nodes - reserve)
        stopped = _stopped(divisions.bids, sizes, reserve, float(without[reserve]), stops)
        stands = np.array(sizes) * failure_rate * stopped
        lost = float((divisions.waf(sizes) * stands / (1.0 + stands)).sum())
        worth[reserve] = float(odds @ waf[np.maximum(indices(away + 1), reserve)]) - lost
    return worth


class Divisions:
    """How jobs share any number of nodes: by their worth, each with its least, where there are enough for that.

    With fewer, some of them stand still until a node is back.
    """

    def __init__(self, bids: Sequence[Bid], nodes: int, until_s: float) -> None:
        """Reckon with up to so many nodes, and with so long until the next failure."""
        self.bids, self.nodes = bids, nodes
        kept = {bid.name: bid.smallest if bid.admitted else 0 for bid in bids}
        made = tasks(bids, kept, nodes)
        self._usual = AnyNumber(made, nodes, until_s)
        self._sparse = AnyNumber([replace(task, floor=0) for task in made], nodes, until_s)
        self._waf = np.stack([task.waf(nodes) for task in made])
        #: weighted FLOP that it costs to change the nodes of the job that this costs most
        self.dearest_move = max(task.loss for task in made)

    def sizes(self, nodes: int) -> list[int]:
        """Return what each job has of so many nodes."""
        return (self._usual if self._usual.value[nodes] > -np.inf else self._sparse).sizes(nodes)

    def waf(self, sizes: Sequence[int]) -> FloatArray:
        """Return what each achieves with so many, weighted FLOP/s."""
        return self._waf[indices(len(sizes)), np.array(sizes)]


def _stopped(
    bids: Sequence[Bid], sizes: Sequence[int], reserve: int, without: float, stops: Mapping[str, Stops]
) -> FloatArray:
    """Return for how long a failure stops each job on average.

    Args:
        without: how likely it is that no standby is left.
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


def _days(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"{seconds / 86400:.3g} days"
