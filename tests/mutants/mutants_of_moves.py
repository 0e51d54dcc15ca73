"""Mutants of moves: the standby joins next to the draining node, replaces it, and receives the state from several."""

from __future__ import annotations

from mutant import Mutant

PLANNER = "coordination.generations.planner"
DEPARTURES = "coordination.nodes.draining"
REPLACING = "coordination.nodes.replacements"
COORDINATOR = "coordination.job.coordinator"
FITTING = "coordination.generations.configuration_check"
JOINING = "coordination.generations.swap"
HEARING = "coordination.job.handlers"
GENERATIONS = "coordination.worker.generations"
BOUNDARIES = "coordination.worker.boundaries"

MOVE_MUTANTS = (
    Mutant(
        name="standby_computes_beside",
        module=PLANNER,
        qualname="divide_micro_batches",
        old=("if not idle:\n    return counts"),
        new="return counts",
        why="all would wait for its state before the step in which it arrives, with changed shares",
    ),
    Mutant(
        name="standby_has_the_last_rank",
        module=PLANNER,
        qualname="_seats",
        old="[node_and_index_of(worker) for worker in before.workers if node_of(worker) not in stand_ins]",
        new="[node_and_index_of(worker) for worker in before.workers]",
        why="a replacement must have the replaced rank, even if it already was a member",
    ),
    Mutant(
        name="leaver_goes_before_the_standby_is_there",
        module=DEPARTURES,
        qualname="Draining.find_next_leavers",
        old="self.find_leaving_workers(plan.workers, plan)",
        new="self.find_leaving_workers(plan.workers)",
        why="all would wait while the state travels to the standby",
    ),
    Mutant(
        name="leaver_goes_in_the_midst_of_a_step",
        module=DEPARTURES,
        qualname="Draining.start_at_boundary",
        old="self._ledger.committed <= decision.applied",
        new="self._ledger.committed < decision.applied",
        why="its computed part of the step would be computed again",
    ),
    Mutant(
        name="others_join_before_the_leaver_has_gone",
        module=COORDINATOR,
        qualname="Coordinator._do_due_work",
        old="self._stable_plan is not None and (not self.context.draining.find_next_leavers(plan))",
        new="self._stable_plan is not None",
        why="the next move's swap would delay the unfinished one",
    ),
    Mutant(
        name="standby_beside_fills_another_place",
        module=REPLACING,
        qualname="Replacements._find_unreplaced_nodes",
        old="{one.node for one in transaction.record.drained} | beside.keys()",
        new="{one.node for one in transaction.record.drained}",
        why="no rank is empty if a standby that joined next to a node is lost",
    ),
    Mutant(
        name="place_counts_twice",
        module=FITTING,
        qualname="wanted_places",
        old="len(here) - len(record.replacements_among(here))",
        new="len(here)",
        why="a standby that joins next to a node adds no rank, or another node would be started for it",
    ),
    Mutant(
        name="lost_leaver_is_not_followed",
        module=DEPARTURES,
        qualname="Draining.assign_lost_ranks",
        old="one.node not in self._transaction.members.nodes and self._replacements.is_beside(one)",
        new="False",
        why="the standby that joined next to it must take over its rank and experts",
    ),
    Mutant(
        name="flag_that_was_seen_is_lowered",
        module=GENERATIONS,
        qualname="KnownGenerations.on_disarm",
        old="[] if flag_given else self.report_disarmed()",
        new="self.report_disarmed()",
        why="the step in progress may swap elsewhere, and a worker that drops the pending group would stay behind",
    ),
    Mutant(
        name="abandoned_vote_has_shown_no_flag",
        module=BOUNDARIES,
        old="{Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING}",
        new="{Phase.VOTED, Phase.PASSED, Phase.APPLYING}",
        why="the vote may have passed elsewhere with every flag up",
    ),
    Mutant(
        name="arms_once_more_while_flags_go_down",
        module=JOINING,
        qualname="PendingGeneration.disarm",
        old="self._disarming = self._told = pending.generation",
        new="self._disarming = pending.generation",
        why="a flag that a member reported as lowered would be raised again",
    ),
    Mutant(
        name="flag_down_for_another_coordinator",
        module=JOINING,
        qualname="PendingGeneration.on_disarmed",
        old="asked and told.term == self._transaction.record.term",
        new="asked",
        why="this coordinator may have sent Arm since then",
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
        qualname="Replacements.select_standbys",
        old="one.to and (one.to in free or self._may_come(one.to))",
        new="one.to",
        why="if the named standby is lost, the next warm one must replace the node",
    ),
    Mutant(
        name="waits_for_standbys_that_are_never_warm",
        module=REPLACING,
        qualname="Replacements.explain_no_standby",
        old="not whys or not all(whys) or self._standbys.awaited or self._becoming()",
        new="True",
        why="the node must keep its rank, and the job must report it",
    ),
    Mutant(
        name="a_checkpoint_releases_nobody",
        module=DEPARTURES,
        qualname="Draining.release_proven",
        old="max(self._ledger.proven, written)",
        new="self._ledger.proven",
        why="for the last step only a checkpoint proves that others have it, so a retained node would wait forever",
    ),
    Mutant(
        name="a_retained_state_is_released_at_once",
        module=DEPARTURES,
        qualname="Draining.release_proven",
        old="one.owed and (safe or not self._transaction.members.unfinished(plan))",
        new="one.owed",
        why="the node may be the only one with the state of the newest step",
    ),
)
