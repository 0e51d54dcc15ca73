"""Plans for whatever can happen next, made before it does (Unicron, section 5.2): so that it is only looked up then.

A question is solved beside everything else, in a process of its own; all that its answers depend on is in it. What it
foresees: each job hit, or a standby of it; a node that comes back, or is new; each job over; and the queued jobs that
begin by that. An answer counts where jobs and nodes stand exactly so; what was measured meanwhile waits for the plan
after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from holdfast.coordination.pool.share.achieving import Waf, tasks, usual
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division
from holdfast.planning.waf.plan import Planner, WafPlan, best

#: what of a demand an answer depends on, but for what was measured
Situation = tuple[Any, ...]
#: an answer that takes longer is worth nothing: what was foreseen has come otherwise by then
WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Foresight:
    """What can happen next? number: of the plan in force, to which answers belong. demand: as it stands by that.

    starves: as of `Policy`.
    """

    number: int
    demand: Demand
    starves: bool = False

    def solve(self) -> list[Division]:
        """Return the plan for each of `futures`, in that order."""
        policy = _Foreseeing(starves=self.starves)
        divide(policy, self.demand)
        return [divide(policy, future) for future in futures(self.demand)]


def situation(demand: Demand) -> Situation:
    """Return what of a demand an answer depends on, but for what was measured."""
    return (demand.nodes, demand.kept_back, *sorted(map(_stands, demand.bids)))


def _stands(bid: Bid) -> tuple[Any, ...]:
    asks = (bid.least, bid.most, bid.sizes, bid.weight, bid.preemptible, bid.may_wait, bid.standbys)
    return bid.order, bid.name, bid.has, bid.had, bid.waiting, bid.admitted, *asks


def timeless(demand: Demand) -> bool:
    """Tell whether nothing of a division depends on the time: nobody waits, or no job says when it ends."""
    waits = any(not (bid.admitted or bid.preemptible) for bid in demand.bids)
    return not waits or all(bid.ends_by == inf for bid in demand.bids if bid.admitted)


def futures(demand: Demand) -> list[Demand]:
    """Return how it can stand after the next thing that happens, each once; none while a job waits for the time
    at which another ends at the latest.
    """
    if not timeless(demand):
        return []
    return list(_futures(demand))


def _futures(demand: Demand) -> Iterator[Demand]:
    fewer = replace(demand, nodes=demand.nodes - 1, kept_back=max(0, demand.kept_back - 1))
    for bid in demand.bids:
        if bid.admitted and bid.has:
            yield _with(fewer, bid, has=bid.has - 1)
        if bid.admitted and bid.waiting:
            yield _with(fewer, bid, waiting=bid.waiting - 1)
    yield replace(demand, nodes=demand.nodes + 1)
    yield replace(demand, nodes=demand.nodes + 1, kept_back=demand.kept_back + 1)
    for bid in demand.bids:
        yield replace(demand, bids=tuple(other for other in demand.bids if other is not bid))


def _with(demand: Demand, bid: Bid, **changes: int) -> Demand:
    return replace(demand, bids=tuple(replace(bid, **changes) if one is bid else one for one in demand.bids))


class _Foreseeing(Waf):
    """The same policy: but tables made for one future answer all those that differ from it in one job."""

    def __init__(self, *, starves: bool) -> None:
        super().__init__(starves=starves)
        self._planners: list[_Made] = []

    def _best(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> WafPlan:
        for made in self._planners:
            if made.nodes == nodes and made.running_s == running_s and (plan := made.answer(bids, floors)) is not None:
                return plan
        if any(not bid.admitted for bid in bids):  # (tables with those that are just begun would serve no other future)
            return best(tasks(bids, floors, nodes), nodes, running_s)
        whole = [replace(bid, has=max(bid.has, bid.had)) for bid in bids]
        made = _Made(whole, dict(floors), nodes, running_s)
        self._planners.append(made)
        plan = made.answer(bids, floors)
        return plan if plan is not None else best(tasks(bids, floors, nodes), nodes, running_s)


class _Made:
    """Tables for some jobs, none of which is hit."""

    def __init__(self, bids: Sequence[Bid], floors: Mapping[str, int], nodes: int, running_s: float) -> None:
        self.nodes, self.running_s = nodes, running_s
        self._bids = {bid.name: bid for bid in bids}
        self._floors = floors
        self._usual = usual(bids)
        self._planner = Planner(tasks(bids, floors, nodes), nodes, running_s)

    def answer(self, bids: Sequence[Bid], floors: Mapping[str, int]) -> WafPlan | None:
        """Return the plan of these jobs, where they are those of the tables but for one; else None."""
        fresh = [bid for bid in bids if bid.name not in self._bids]
        if any(not self._same(bid, floors) for bid in bids if bid not in fresh):
            return None
        if usual(bids) != self._usual:  # (others may count by it)
            return None
        missing = self._bids.keys() - {bid.name for bid in bids}
        hit = [bid.name for bid in bids if bid.has < bid.had]
        if len(missing) + len(hit) + len(fresh) > 1:
            return None
        if fresh:
            (begun,) = (task for task in tasks(bids, floors, self.nodes) if task.name == fresh[0].name)
            return self._planner.begun(begun)
        if hit:
            return self._planner.hit(hit[0])
        return self._planner.ended(next(iter(missing))) if missing else self._planner.plan()

    def _same(self, bid: Bid, floors: Mapping[str, int]) -> bool:
        known = self._bids[bid.name]
        return floors[bid.name] == self._floors[bid.name] and bid == replace(
            known, has=bid.has, waiting=bid.waiting, standbys=bid.standbys
        )
