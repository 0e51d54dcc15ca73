"""How often a job is saved where nobody has said so: as often as wastes least, by what a save costs and how often one
was needed.

A save costs training what it stood for the copy, or what steps took longer while it was written, whichever is more. A
save is needed where the job goes back to one. How often that is, is estimated from this run, with one day in which it
happened once before that: so a job that has just begun is neither saved all the time nor hardly ever. Where a pool
says how often its nodes fail, that day is shorter if a job of so few nodes, or of so few copies of its experts, would
by that have gone back more often.
"""

from __future__ import annotations

import msgspec

from holdfast.coordination.config import PeriodBounds
from holdfast.planning.checkpointing import daly_period
from holdfast.planning.waf.survival import lost_with_all, lost_with_experts
from holdfast.protocol.record import Saving

#: what is assumed before anything was seen: one loss in so many seconds
PRIOR_S = 86400.0
#: saves cost at most this share of the time, unless that would be too seldom
MOST_SHARE = 0.01
#: a save that costs less is as good as one that costs this much
_LEAST_COST_S = 1e-3
#: of how many saves the cost is averaged
_AVERAGED = 8


def saving_period_s(saving: Saving, lived_s: float, bounds: PeriodBounds, prior_s: float = PRIOR_S) -> float:
    """Return how long after a save the next one is due, in seconds.

    Args:
        lived_s: since this run was begun. prior_s: for how long it counts that a save was needed once before that.
    """
    if not saving.saves:
        return bounds.first_s
    rate = (1 + saving.losses) / (prior_s + max(0.0, lived_s))
    best = float(daly_period(rate=rate, save=max(saving.cost_s, _LEAST_COST_S)))
    return min(bounds.most_s, max(bounds.least_s, saving.cost_s / MOST_SHARE, best))


def prior_s(nodes: int, failure_rate: float, exposed_s: float, *, experts: int, slots: int) -> float:
    """Return how long a job goes on until it needs a save, by how often nodes of its pool fail; a day at the most.

    Args:
        nodes: its own. failure_rate: of a node, per second. exposed_s: until what a node had lies elsewhere again.
        experts: of a layer, 0 where it has none. slots: of a node, for these.
    """
    if experts and slots:
        rate = lost_with_experts(nodes, failure_rate, exposed_s, 1.0, experts=experts, slots=slots)[nodes]
    else:
        rate = lost_with_all(nodes, failure_rate, exposed_s, 1.0)[nodes]
    return min(PRIOR_S, 1.0 / rate) if rate > 0 else PRIOR_S


def saved(saving: Saving, now: float, cost_s: float) -> Saving:
    """Return what is known after another save, kept now, that has cost so much."""
    cost_s = max(0.0, cost_s)
    share = 1 / min(saving.saves + 1, _AVERAGED)
    mean = saving.cost_s + share * (cost_s - saving.cost_s)
    return msgspec.structs.replace(saving, saved_at=now, cost_s=mean, saves=saving.saves + 1)


def gone_back(saving: Saving) -> Saving:
    """Return what is known once the job has gone back to a save, or lacked one."""
    return msgspec.structs.replace(saving, losses=saving.losses + 1)
