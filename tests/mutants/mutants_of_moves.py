"""Mutants of moves: the standby joins beside whoever leaves, takes its place, and is given the state by several."""

from __future__ import annotations

from mutant import Mutant

PLANNER = "coordination/generations/planner.py"
DEPARTURES = "coordination/nodes/departures.py"
REPLACING = "coordination/nodes/replacing.py"
COORDINATOR = "coordination/coordinator.py"
FITTING = "coordination/nodes/fitting.py"
JOINING = "coordination/generations/swap.py"
HEARING = "coordination/hearing.py"
GENERATIONS = "coordination/worker/generations.py"
BOUNDARIES = "coordination/worker/boundaries.py"

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
    Mutant(
        name="flag_that_was_seen_is_lowered",
        file=GENERATIONS,
        old="        return [] if flag_given else self.disarmed()\n",
        new="        return self.disarmed()\n",
        why="the step in progress may swap elsewhere: whoever drops the pending group stays behind",
    ),
    Mutant(
        name="abandoned_vote_has_shown_no_flag",
        file=BOUNDARIES,
        old="FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING})",
        new="FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.APPLYING})",
        why="it may have passed elsewhere with every flag up",
    ),
    Mutant(
        name="arms_once_more_while_flags_go_down",
        file=JOINING,
        old="        self._disarming = self._told = pending.generation\n",
        new="        self._disarming = pending.generation\n",
        why="a flag that a member has said to be down would go up again",
    ),
    Mutant(
        name="flag_down_for_another_coordinator",
        file=JOINING,
        old="        if asked and told.term == self._turn.record.term:\n",
        new="        if asked:\n",
        why="this one may have said Arm since",
    ),
    Mutant(
        name="swaps_to_whom_is_lost_and_goes_on",
        file=HEARING,
        old="        if lost_at is not None:  # (the flags",
        new="        if False:  # (the flags",
        why="all would wait in vain for a member that was lost before they swapped",
    ),
    Mutant(
        name="waits_for_a_named_standby_for_ever",
        file=REPLACING,
        old="            if one.to and (one.to in free or self._may_come(one.to)):\n",
        new="            if one.to:\n",
        why="where that one is lost the next one that is warm takes the place",
    ),
    Mutant(
        name="waits_for_standbys_that_are_never_warm",
        file=REPLACING,
        old="        if not whys or not all(whys) or self._standbys.awaited or self._becoming():\n",
        new="        if True:\n",
        why="the node keeps its place, and that is said",
    ),
    Mutant(
        name="a_checkpoint_releases_nobody",
        file=DEPARTURES,
        old="safe = max(self._ledger.proven, written) >= one.step",
        new="safe = self._ledger.proven >= one.step",
        why="of the last step nothing but a checkpoint proves that others have it: whoever keeps it waits for ever",
    ),
    Mutant(
        name="a_retained_state_is_released_at_once",
        file=DEPARTURES,
        old="if one.owed and (safe or not self._turn.members.unfinished(plan)):",
        new="if one.owed:",
        why="the node may be the only one that has the state of the newest step",
    ),
)
