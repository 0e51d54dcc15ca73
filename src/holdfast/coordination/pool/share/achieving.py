"""The policy of the most weighted achieved FLOP/s (Unicron, section 5): the gain of all jobs less the cost of changes.

Each running job keeps its minimum (errata 4), unless the pool allows starvation. `planning.waf` finds the best division
of the rest. A job without measurements is assumed to achieve the others' mean on one node, and a little less on each
further node: so of two such jobs neither is left with its minimum. A job of unknown FLOP per sample counts as much per
node as the others at its minimum; its measurements give the change with more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.coordination.pool.share.interface import Bid, Shares, Worth, first_come
from holdfast.planning.arrays import FloatArray, indices
from holdfast.planning.waf.durations import running_s
from holdfast.planning.waf.pace import UNSHARED
from holdfast.planning.waf.plan import WafPlan, best_plan
from holdfast.planning.waf.task import Task

#: Longest time, in seconds, that a plan assumes until the next event. Without failures, jobs still come and end.
MAX_RUNNING_S = 86400.0
#: seconds that it costs to save a job without nodes and start it again later
SUSPENSION_S = 30.0
#: Longest plausible change of a job's nodes, in seconds. A larger value, after a clock change or a sleep of the
#: machine, would keep the job from ever changing again, and so from a new measurement.
MAX_CHANGE_S = 3600.0


class Waf:
    """Divides nodes for the most weighted FLOP until the next failure, less the cost of changes."""

    name = "waf"
    uses_throughput = True

    def __init__(self, *, starves: bool = False, next_best: bool = True) -> None:
        """Create the policy.

        Args:
            starves: Follow Eq. 3 as printed: a job gets no nodes if they achieve more elsewhere. Else each job keeps
                its
            minimum.
            next_best: Plans also name the second best division.
        """
        self.allows_starvation = starves
        self._next_best = next_best

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in order of submission."""
        return first_come(bids)

    def nodes_to_start(self, bid: Bid) -> int:
        """Return the minimum."""
        return bid.smallest

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Divide the free nodes so that the weighted FLOP until the next failure are the most, losses by changes
        included; no job falls below its nodes.

        The shares have that worth; without jobs they are `nodes`, without a worth. Of equal divisions, the one by the
        policy's order wins.

        Args:
            nodes: nodes that each job has so far
            bids: the jobs that can get more
            free: nodes to divide
            failure_rate: failures of a node per second
        """
        if not bids:
            return Shares(nodes)
        # Of equal divisions the first wins. A fixed order keeps that choice once new jobs run.
        bids = self.order(bids)
        total = sum(nodes[bid.name] for bid in bids) + free
        plan = self._best(bids, nodes, total, running_s(total, failure_rate, MAX_RUNNING_S))
        return Shares({**nodes, **plan.sizes}, worth_of(plan))

    def _best(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> WafPlan:
        return best_plan(build_tasks(bids, floors, nodes), nodes, running_s, next_best=self._next_best)


def build_tasks(bids: Sequence[Bid], floors: Mapping[str, int], nodes: int) -> list[Task]:
    """Return jobs as tasks of the planner, with known or guessed FLOP/s for 0..nodes nodes."""
    on_one = mean_flops_per_node(bids)
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
            left_s=SUSPENSION_S,
            lost_share=np.array(bid.lost_share) if bid.lost_share else None,
        )
        for bid in bids
    ]


def guess_throughput(on_one: float, nodes: int) -> FloatArray:
    """Return guessed FLOP/s with 0..nodes nodes of a job of which only the FLOP/s on one node are known."""
    held = indices(nodes + 1)
    return on_one * held / (1 - UNSHARED + UNSHARED * held)


def _throughput(bid: Bid, on_one: float, nodes: int) -> FloatArray:
    """Return FLOP/s with 0, 1, ... nodes, measured or guessed; entries may go beyond `nodes`.

    Args:
        on_one: FLOP/s that one node is assumed to achieve, for jobs without measurements or without known FLOP.
    """
    achieved = np.array(bid.achieves)
    on_each = _flops_per_node(bid)
    if not on_each:
        return guess_throughput(on_one, max(nodes, bid.had))
    return achieved if bid.in_flop else achieved / on_each * on_one


def worth_of(plan: WafPlan) -> Worth:
    """Return the worth of a plan."""
    return Worth(gain=plan.gain, cost=plan.cost, waf=plan.waf, next_best=plan.next_best, given_up=plan.given_up)


def mean_flops_per_node(bids: Sequence[Bid]) -> float:
    """Return the mean FLOP/s per node of the jobs with measurements, or 1 without any."""
    known = [achieved for bid in bids if bid.in_flop and (achieved := _flops_per_node(bid))]
    return sum(known) / len(known) if known else 1.0


def _flops_per_node(bid: Bid) -> float:
    """Return the FLOP/s per node of a job with its minimum, or 0 if unknown."""
    least = bid.smallest
    return bid.achieves[least] / least if least < len(bid.achieves) else 0.0
