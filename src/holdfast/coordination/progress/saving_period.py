"""The period of checkpoints of a job without a configured one: it minimizes the time lost to saves and rollbacks.

The cost of a save is the longer of two times: training stood still for the copy, or steps were slower while it was
written. The rate of rollbacks to a save is estimated from this run, with a prior of one rollback a day. So a job that
has just started saves neither too often nor too rarely. If the job is in a pool that measures the failure rate of its
nodes, the prior interval becomes shorter if a job of this size, with this many copies of its experts, would roll back
more often.
"""

from __future__ import annotations

import msgspec

from holdfast.coordination.config import PeriodBounds
from holdfast.planning.checkpointing import daly_period
from holdfast.planning.waf.survival import lost_with_all, lost_with_experts
from holdfast.protocol.record import Saving

#: the prior: one rollback in this many seconds
PRIOR_S = 86400.0
#: saves cost at most this share of the time, within the bounds of the period
MOST_SHARE = 0.01
#: a save that costs less counts as this much
_LEAST_COST_S = 1e-3
#: the number of saves over which the cost is averaged
_AVERAGED = 8


def saving_period_s(saving: Saving, lived_s: float, bounds: PeriodBounds, prior_s: float = PRIOR_S) -> float:
    """Return the seconds from one save to the next, by the rate of losses and the mean cost of a save (Daly), within
    `bounds` and such that saving takes at most a fixed share of the time.

    Before the first save: `bounds.first_s`.

    Args:
        lived_s: The seconds since this run began.
        prior_s: The seconds in which one save was needed, as a prior.
    """
    if not saving.saves:
        return bounds.first_s
    rate = (1 + saving.losses) / (prior_s + max(0.0, lived_s))
    best = float(daly_period(rate=rate, save=max(saving.cost_s, _LEAST_COST_S)))
    return min(bounds.most_s, max(bounds.least_s, saving.cost_s / MOST_SHARE, best))


def prior_s(nodes: int, failure_rate: float, exposed_s: float, *, experts: int, slots: int) -> float:
    """Return the seconds in which a job needs one save, from the failure rate of its pool's nodes; at most one day.

    Args:
        nodes: The number of nodes of the job.
        failure_rate: The failures of a node per second.
        exposed_s: The seconds until the state of a failed node has a second copy again.
        experts: The number of experts of a layer, or 0.
        slots: The number of experts that a node can hold per layer.
    """
    if experts and slots:
        rate = lost_with_experts(nodes, failure_rate, exposed_s, 1.0, experts=experts, slots=slots)[nodes]
    else:
        rate = lost_with_all(nodes, failure_rate, exposed_s, 1.0)[nodes]
    return min(PRIOR_S, 1.0 / rate) if rate > 0 else PRIOR_S


def add_save(saving: Saving, now: float, cost_s: float) -> Saving:
    """Return the statistics after another save at `now` that cost this many seconds: a running mean of the newest
    saves.
    """
    cost_s = max(0.0, cost_s)
    share = 1 / min(saving.saves + 1, _AVERAGED)
    mean = saving.cost_s + share * (cost_s - saving.cost_s)
    return msgspec.structs.replace(saving, saved_at=now, cost_s=mean, saves=saving.saves + 1)


def add_loss(saving: Saving) -> Saving:
    """Return the statistics after a rollback to a save, or after one was missing."""
    return msgspec.structs.replace(saving, losses=saving.losses + 1)
