"""Mutants of moves: the standby joins beside whoever leaves, takes its place, and is given the state by several."""

from __future__ import annotations

from mutant import Mutant

PLANNER = "coordination/generations/planner.py"
DEPARTURES = "coordination/nodes/departures.py"
REPLACING = "coordination/nodes/replacing.py"
COORDINATOR = "coordination/coordinator.py"
FITTING = "coordination/nodes/fitting.py"

MOVE_MUTANTS = (
    Mutant(
        name="standby_computes_beside",
        file=PLANNER,
        old="    if not idle:\n        return counts\n",
        new="    return counts\n",
        why="all would wait for its state before the step in which that comes, and have other shares",
    ),
    Mutant(
        name="standby_has_the_last_rank",
        file=PLANNER,
        old="    return [seat_of(worker) for worker in before.workers if node_of(worker) not in stand_ins]\n",
        new="    return [seat_of(worker) for worker in before.workers]\n",
        why="whoever takes a place has its rank, also where it was a member already",
    ),
    Mutant(
        name="leaver_goes_before_the_standby_is_there",
        file=DEPARTURES,
        old="        leavers = self.going(plan.workers, plan)\n        if not leavers or only_with",
        new="        leavers = self.going(plan.workers)\n        if not leavers or only_with",
        why="all would stand still while the state of the standby travels",
    ),
    Mutant(
        name="leaver_goes_in_the_midst_of_a_step",
        file=DEPARTURES,
        old="is not None and self._ledger.committed <= decision.applied:\n",
        new="is not None and self._ledger.committed < decision.applied:\n",
        why="what it has computed of the step would be computed again",
    ),
    Mutant(
        name="others_join_before_the_leaver_has_gone",
        file=COORDINATOR,
        old=" and not self.parts.departures.go_next(plan):\n",
        new=":\n",
        why="the next move's swap would hold up the one that is half done",
    ),
    Mutant(
        name="standby_beside_fills_another_place",
        file=REPLACING,
        old="drained = {one.node for one in turn.record.drained} | beside.keys()\n",
        new="drained = {one.node for one in turn.record.drained}\n",
        why="where a standby is lost that had joined beside a node, no place is empty",
    ),
    Mutant(
        name="place_counts_twice",
        file=FITTING,
        old="len(here) - len(record.beside(here))",
        new="len(here)",
        why="a standby that joins beside a node brings no place: else another one would be grown into it",
    ),
    Mutant(
        name="lost_leaver_is_not_followed",
        file=DEPARTURES,
        old="if one.node not in self._turn.members.nodes and self._replacing.is_beside(one):\n",
        new="if False:\n",
        why="the standby that has joined beside it has its rank and experts from then on",
    ),
)
