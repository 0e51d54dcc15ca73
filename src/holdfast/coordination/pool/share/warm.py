"""Which jobs have standbys: nodes that wait in them, warm, to take the place of one that is lost.

What nobody needs goes to those that have asked for standbys of their own. The reserve's nodes wait in those that have
none by that, where most would be lost: a node fails the more often the more of them a job has, and each failure stops
all of it, so a job counts by its weight times its nodes; one each, for a second failure is as likely anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.coordination.pool.share.interface import Bid

#: who has a standby keeps it unless another would lose so many times as much: each begins cold where it comes to
_STAYS = 2.0


def keep_warm(bids: Sequence[Bid], nodes: Mapping[str, int], kept_back: int, left: int) -> dict[str, int]:
    """Return how many standbys each job is to have.

    Args:
        bids: of the jobs that have use for some. nodes: of each. kept_back: the reserve. left: nodes that no job has as
            its own, those of the reserve among them.
    """

    def loses(bid: Bid) -> float:
        return bid.weight * nodes[bid.name]

    given: dict[str, int] = {}
    reserve = max(0, min(kept_back, left))
    turns = sorted(bids, key=lambda bid: (-loses(bid), bid.order))
    rest = _ask(turns, given, left - reserve)
    without = [bid for bid in turns if bid.name not in given]
    without.sort(key=lambda bid: (-loses(bid) * (_STAYS if bid.waiting else 1.0), bid.order))
    given |= {bid.name: 1 for bid in without[:reserve]}
    _ask(turns, given, rest + max(0, reserve - len(without)))
    return given


def _ask(turns: Sequence[Bid], given: dict[str, int], nodes: int) -> int:
    """Give nodes to those that have asked for them; return how many are left over."""
    for bid in turns:
        more = max(0, min(bid.standbys - given.get(bid.name, 0), nodes))
        if more:
            given[bid.name] = given.get(bid.name, 0) + more
            nodes -= more
    return nodes
