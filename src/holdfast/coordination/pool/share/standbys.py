"""Assigns standbys to jobs: warm nodes that replace one that fails.

Nodes that no job needs go to jobs that have asked for standbys. Nodes of the reserve go to jobs without a standby, one
each, in order of the cost of a failure. A job with more nodes fails more often, and each failure stops all of it, so a
job counts by weight times nodes. One each suffices, since the next failure is as likely to hit another job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.coordination.pool.share.interface import Bid

#: A job keeps its standby unless another would lose this many times as much: a new standby starts cold.
_KEEP_FACTOR = 2.0


def assign_standbys(bids: Sequence[Bid], nodes: Mapping[str, int], kept_back: int, left: int) -> dict[str, int]:
    """Return how many standbys each job should have; jobs without any are left out.

    Requested ones come from nodes outside the reserve first. Then each job without any gets one of the reserve, the
    ones with the most to lose first; a job counts twice if it already has one. The rest of the reserve goes to the
    remaining requests.

    Args:
        bids: jobs that standbys help
        nodes: nodes of each job
        kept_back: size of the reserve
        left: nodes that no job trains on, the reserve included
    """

    def loses(bid: Bid) -> float:
        return bid.weight * nodes[bid.name]

    given: dict[str, int] = {}
    reserve = max(0, min(kept_back, left))
    turns = sorted(bids, key=lambda bid: (-loses(bid), bid.order))
    rest = _give_requested(turns, given, left - reserve)
    without = [bid for bid in turns if bid.name not in given]
    without.sort(key=lambda bid: (-loses(bid) * (_KEEP_FACTOR if bid.waiting else 1.0), bid.order))
    given |= {bid.name: 1 for bid in without[:reserve]}
    _give_requested(turns, given, rest + max(0, reserve - len(without)))
    return given


def _give_requested(turns: Sequence[Bid], given: dict[str, int], nodes: int) -> int:
    """Give nodes, in order of `turns`, to jobs up to the standbys that they have asked for; return how many are left.

    `given` is changed.
    """
    for bid in turns:
        more = max(0, min(bid.standbys - given.get(bid.name, 0), nodes))
        if more:
            given[bid.name] = given.get(bid.name, 0) + more
            nodes -= more
    return nodes
