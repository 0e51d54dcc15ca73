"""Mutants of moves: the standby joins next to the draining node, replaces it, and receives the state from several."""

from __future__ import annotations

from mutant import Mutant

PLANNER = "coordination.generations.planner"
DEPARTURES = "coordination.nodes.departures"
REPLACING = "coordination.nodes.replacing"
COORDINATOR = "coordination.job.coordinator"
FITTING = "coordination.generations.fitting"
JOINING = "coordination.generations.swap"
HEARING = "coordination.job.handlers"
GENERATIONS = "coordination.worker.generations"
BOUNDARIES = "coordination.worker.boundaries"

MOVE_MUTANTS = (
    Mutant(
        name="standby_computes_beside",
        module=PLANNER,
        qualname="counts_for",
        old=("if not idle:\n    return counts"),
        new="return counts",
        why="all would wait for its state before the step in which that comes, and have other shares",
    ),
    Mutant(
        name="standby_has_the_last_rank",
        module=PLANNER,
        qualname="_seats",
        old="[node_and_index_of(worker) for worker in before.workers if node_of(worker) not in stand_ins]",
        new="[node_and_index_of(worker) for worker in before.workers]",
        why="whoever takes a place has its rank, also where it was a member already",
    ),
    Mutant(
        name="leaver_goes_before_the_standby_is_there",
        module=DEPARTURES,
        qualname="Draining.go_next",
        old="self.going(plan.workers, plan)",
        new="self.going(plan.workers)",
        why="all would stand still while the state of the standby travels",
    ),
    Mutant(
        name="leaver_goes_in_the_midst_of_a_step",
        module=DEPARTURES,
        qualname="Draining.start_at_boundary",
        old="self._ledger.committed <= decision.applied",
        new="self._ledger.committed < decision.applied",
        why="what it has computed of the step would be computed again",
    ),
    Mutant(
        name="others_join_before_the_leaver_has_gone",
        module=COORDINATOR,
        qualname="Coordinator._do_due_work",
        old="self._settled_plan is not None and (not self.context.draining.go_next(plan))",
        new="self._settled_plan is not None",
        why="the next move's swap would hold up the one that is half done",
    ),
    Mutant(
        name="standby_beside_fills_another_place",
        module=REPLACING,
        qualname="Replacements._empty",
        old="{one.node for one in transaction.record.drained} | beside.keys()",
        new="{one.node for one in transaction.record.drained}",
        why="where a standby is lost that had joined beside a node, no place is empty",
    ),
    Mutant(
        name="place_counts_twice",
        module=FITTING,
        qualname="wanted_places",
        old="len(here) - len(record.replacements_among(here))",
        new="len(here)",
        why="a standby that joins beside a node brings no place: else another one would be grown into it",
    ),
    Mutant(
        name="lost_leaver_is_not_followed",
        module=DEPARTURES,
        qualname="Draining.followed",
        old="one.node not in self._transaction.members.nodes and self._replacements.is_beside(one)",
        new="False",
        why="the standby that has joined beside it has its rank and experts from then on",
    ),
    Mutant(
        name="flag_that_was_seen_is_lowered",
        module=GENERATIONS,
        qualname="KnownGenerations.on_disarm",
        old="[] if flag_given else self.report_disarmed()",
        new="self.report_disarmed()",
        why="the step in progress may swap elsewhere: whoever drops the pending group stays behind",
    ),
    Mutant(
        name="abandoned_vote_has_shown_no_flag",
        module=BOUNDARIES,
        old="{Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING}",
        new="{Phase.VOTED, Phase.PASSED, Phase.APPLYING}",
        why="it may have passed elsewhere with every flag up",
    ),
    Mutant(
        name="arms_once_more_while_flags_go_down",
        module=JOINING,
        qualname="PendingGeneration.disarm",
        old="self._disarming = self._told = pending.generation",
        new="self._disarming = pending.generation",
        why="a flag that a member has said to be down would go up again",
    ),
    Mutant(
        name="flag_down_for_another_coordinator",
        module=JOINING,
        qualname="PendingGeneration.on_disarmed",
        old="asked and told.term == self._transaction.record.term",
        new="asked",
        why="this one may have said Arm since",
    ),
    Mutant(
        name="swaps_to_whom_is_lost_and_goes_on",
        module=HEARING,
        qualname="MessageHandlers._promote_pending",
        old="lost_at is not None",
        new="False",
        why="all would wait in vain for a member that was lost before they swapped",
    ),
    Mutant(
        name="waits_for_a_named_standby_for_ever",
        module=REPLACING,
        qualname="Replacements.targets",
        old="one.to and (one.to in free or self._may_come(one.to))",
        new="one.to",
        why="where that one is lost the next one that is warm takes the place",
    ),
    Mutant(
        name="waits_for_standbys_that_are_never_warm",
        module=REPLACING,
        qualname="Replacements.in_vain",
        old="not whys or not all(whys) or self._standbys.awaited or self._becoming()",
        new="True",
        why="the node keeps its place, and that is said",
    ),
    Mutant(
        name="a_checkpoint_releases_nobody",
        module=DEPARTURES,
        qualname="Draining.release_proven",
        old="max(self._ledger.proven, written)",
        new="self._ledger.proven",
        why="of the last step nothing but a checkpoint proves that others have it: whoever keeps it waits for ever",
    ),
    Mutant(
        name="a_retained_state_is_released_at_once",
        module=DEPARTURES,
        qualname="Draining.release_proven",
        old="one.owed and (safe or not self._transaction.members.unfinished(plan))",
        new="one.owed",
        why="the node may be the only one that has the state of the newest step",
    ),
)
