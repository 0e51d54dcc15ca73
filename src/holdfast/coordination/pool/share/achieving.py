"""The policy of most weighted achieved FLOP/s (Unicron, section 5): what is gained less what changes cost, of all jobs.

Whoever is begun keeps its least (errata 4), unless a pool is told otherwise; the rest is divided by `planning.waf`,
whose plan is the best of all. A job of which no step was measured yet is taken to achieve as much on a node as the
others do, and to lose a little with each more: so that of two alike none is left with the least. So is one that has not
said how many FLOP a sample takes: with its fewest nodes it counts as much for each as the others do, and how that
changes with more was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.coordination.pool.share.interface import Bid, Grown, Worth, first_come
from holdfast.planning.arrays import FloatArray, indices
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.pace import UNSHARED
from holdfast.planning.waf.plan import WafPlan, best
from holdfast.planning.waf.task import Task

#: no plan counts on more than this until something changes, failures or not: jobs come and end
LONGEST_S = 86400.0
#: a job that is left with no node is saved and begun again, which takes so long
LEFT_S = 30.0
#: no change counts as longer, whatever was measured: else a clock that was set, or a machine that slept, could keep a
#: job from ever changing again, and so from being measured anew
MOST_CHANGE_S = 3600.0


class Waf:
    """Nodes where most weighted FLOP come of them until the next failure, changes paid."""

    name = "waf"
    reckons = True

    def __init__(self, *, starves: bool = False, next_best: bool = True) -> None:
        """Keep each job's least, or (`starves`) do as Eq. 3 is printed: whose nodes do more elsewhere has none.

        Args:
            next_best: plans say what was given up for them.
        """
        self.starves = starves
        self._next_best = next_best

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs as they came."""
        return first_come(bids)

    def begins_with(self, bid: Bid) -> int:
        """Return the least."""
        return bid.smallest

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        """Give what is left over to whom it is worth most."""
        if not bids:
            return Grown(nodes)
        # (of divisions that are worth the same the first one: not another one once those that were begun run)
        bids = self.order(bids)
        total = sum(nodes[bid.name] for bid in bids) + free
        plan = self._best(bids, nodes, total, running_s(total, failure_rate, LONGEST_S))
        return Grown({**nodes, **plan.sizes}, worth(plan))

    def _best(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> WafPlan:
        return best(tasks(bids, floors, nodes), nodes, running_s, next_best=self._next_best)


def tasks(bids: Sequence[Bid], floors: Mapping[str, int], nodes: int) -> list[Task]:
    """Return jobs as the plan sees them, whose FLOP/s with 0..nodes nodes are known or guessed."""
    on_one = usual(bids)
    return [
        Task(
            name=bid.name,
            throughput=_throughput(bid, on_one, nodes),
            weight=bid.weight,
            least=bid.smallest,
            most=bid.largest,
            sizes=bid.sizes,
            floor=floors[bid.name],
            had=bid.had,
            hit=bid.has < bid.had,
            transition_s=bid.change_s,
            hit_s=bid.hit_s,
            left_s=LEFT_S,
            lost_share=np.array(bid.lost_share) if bid.lost_share else None,
        )
        for bid in bids
    ]


def guessed(on_one: float, nodes: int) -> FloatArray:
    """Return FLOP/s with 0..nodes nodes of a job of which no more is known than what one of them achieves."""
    held = indices(nodes + 1)
    return on_one * held / (1 - UNSHARED + UNSHARED * held)


def _throughput(bid: Bid, on_one: float, nodes: int) -> FloatArray:
    achieved = np.array(bid.achieves)
    on_each = _on_each(bid)
    if not on_each:
        return guessed(on_one, max(nodes, bid.had))
    return achieved if bid.in_flop else achieved / on_each * on_one


def worth(plan: WafPlan) -> Worth:
    """Return what a plan is worth, to be told."""
    return Worth(gain=plan.gain, cost=plan.cost, waf=plan.waf, next_best=plan.next_best, given_up=plan.given_up)


def usual(bids: Sequence[Bid]) -> float:
    """Return the FLOP/s that one node achieves in the jobs of which that is known, 1 where it is of none."""
    known = [achieved for bid in bids if bid.in_flop and (achieved := _on_each(bid))]
    return sum(known) / len(known) if known else 1.0


def _on_each(bid: Bid) -> float:
    """Return what a job achieves on each node with its fewest, 0 where that is not known."""
    least = bid.smallest
    return bid.achieves[least] / least if least < len(bid.achieves) else 0.0
