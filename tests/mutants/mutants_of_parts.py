"""Mutants of the coordinator's smaller parts, and of the order of phases in a worker."""

from __future__ import annotations

from mutant import Mutant

BOUNDARIES = "coordination.worker.boundaries"
REPORTING = "coordination.worker.reporting"
COPY = "coordination.worker.copy"
ASSIGNMENT = "coordination.generations.assignment"
SHARE = "coordination.worker.replica_group.share"
DECISIONS = "coordination.generations.decisions"
PLANNER = "coordination.generations.planner"
STOPPING = "coordination.generations.interruption"
CLOSING = "coordination.recovery.closing"
FINISHING = "coordination.job.finishing"
SUSPECTS = "coordination.failures.suspects"
HEARING = "coordination.job.handlers"
RECORD_AGE = "coordination.nodes.record_age"

PART_MUTANTS = (
    Mutant(
        name="a_left_vote_was_never_begun",
        module=BOUNDARIES,
        old="FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING})",
        new=(
            "NEXT_PHASE = {**NEXT_PHASE, (Phase.VOTED, 'abandon_vote'): Phase.READY}\n"
            "FLAG_GIVEN = frozenset({Phase.VOTED, Phase.PASSED, Phase.ABANDONED, Phase.APPLYING})"
        ),
        why="a worker that left its commit operation did not keep the others waiting for it",
    ),
    Mutant(
        name="who_left_its_vote_has_nothing",
        module=REPORTING,
        qualname="make_report",
        old="reduced = copy.reduced",
        new="reduced = copy.reduced if phase is not Phase.ABANDONED else None",
        why="its reductions have returned, so it can apply a step that passed elsewhere, or finish the step alone",
    ),
    Mutant(
        name="who_is_ready_is_not_asked",
        module=DECISIONS,
        qualname="_known_results",
        old="known[report.step] = report.reduced",
        new="pass",
        why="a step must not be repeated once all its reductions have returned on some worker",
        quick=True,
    ),
    Mutant(
        name="who_lacks_the_step_has_nothing",
        module=COPY,
        qualname="StateCopy.apply_decision",
        old="receives and (not (apart or is_start)) and (self.applied is not None)",
        new="False",
        why="the only READY worker may die before the others have its state, so they need their own",
    ),
    Mutant(
        name="adopts_after_its_report",
        module=BOUNDARIES,
        old="{Phase.VOTED, Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING}",
        new="{Phase.VOTED, Phase.APPLYING, Phase.FORWARD}",
        why="the state that it has reported would be overwritten",
    ),
    Mutant(
        name="what_was_begun_of_the_next_step_is_done_again",
        module=ASSIGNMENT,
        qualname="first_assignment",
        old="decision.kind not in (DecisionKind.REDO, DecisionKind.FORWARD)",
        new="decision.kind is not DecisionKind.REDO",
        why="workers ahead lose nothing if others have to finish a step",
    ),
    Mutant(
        name="who_waits_for_a_state_forgets_its_gradients",
        module=SHARE,
        qualname="Share.assign",
        old="keeps or (same_step and assigned and (set(self.summed) <= set(assigned)))",
        new="same_step and assigned and (set(self.summed) <= set(assigned))",
        why="if the state never arrives, the step is repeated and needs these gradients",
    ),
    Mutant(
        name="loads_what_a_peer_would_send",
        module=BOUNDARIES,
        qualname="next_entering_task",
        old="isinstance(source, CheckpointSource | SnapshotSource)",
        new="source is not None",
        why="only a rollback leads to loading a checkpoint",
    ),
    Mutant(
        name="state_comes_before_experts",
        module=BOUNDARIES,
        qualname="next_entering_task",
        old="not placed",
        new="not placed and (not lacking)",
        why="the experts of all would wait for the slowest transfer",
    ),
    Mutant(
        name="pushes_to_everybody",
        module="protocol.plan",
        qualname="GenerationPlan.receivers",
        old="self._receivers.get(worker, ())",
        new="tuple(self.sources)",
        why="only workers named as sources send; another worker may lack the state itself",
    ),
    Mutant(
        name="absent_members_owe_no_report",
        module=STOPPING,
        qualname="Interruption._owes",
        old="transaction.members.worker(worker) is not None or node_of(worker) in away",
        new="transaction.members.worker(worker) is not None",
        why="a disconnected member may have passed alone",
    ),
    Mutant(
        name="stops_an_older_generation",
        module=STOPPING,
        qualname="Interruption.start",
        old="transaction.record.generation",
        new="transaction.record.plan.generation",
        why="a member that has already swapped is in a later generation",
    ),
    Mutant(
        name="a_pause_counts_as_silence",
        module=STOPPING,
        qualname="Interruption.restart_timeout",
        old="self._since = self._transaction.now",
        new="pass",
        why="a coordinator that did not read messages cannot find silent nodes",
    ),
    Mutant(
        name="the_complaints_of_the_dead_count",
        module=STOPPING,
        qualname="Interruption.forget",
        old="self.complaints.pop(worker, None)",
        new="pass",
        why="only connected members count in a verdict",
        equivalent="complaints are not evaluated if a member is lost, and they are forgotten with the Stop",
    ),
    Mutant(
        name="waits_for_a_checkpoint_that_nobody_writes",
        module=CLOSING,
        qualname="Closing._start",
        old="save and record.saves and can",
        new="save and can",
        why="a job without a directory must end at once",
    ),
    Mutant(
        name="asking_again_gives_more_time",
        module=CLOSING,
        qualname="Closing._start",
        old="not self.under_way",
        new="True",
        why="the launcher repeats its request, and the job must still end",
    ),
    Mutant(
        name="a_successor_forgets_the_wish",
        module=CLOSING,
        qualname="Closing.resume_closing",
        old="not again and self._had_begun",
        new="False",
        why="a stop request must survive the coordinator that received it",
    ),
    Mutant(
        name="saves_for_ever",
        module=CLOSING,
        qualname="Closing.tick",
        old="not self.under_way or self._transaction.now - self._since <= limit_s",
        new="True",
        why="a save that takes too long must be abandoned",
    ),
    Mutant(
        name="the_last_cause_stands",
        module=CLOSING,
        qualname="Closing._start",
        old="before is None or before.renew or (not before.failed)",
        new="True",
        why="the first cause explains the later ones",
    ),
    Mutant(
        name="a_failed_script_ended_by_will",
        module=CLOSING,
        qualname="Closing.end",
        old="will.failed",
        new="will.failed and (not self.under_way)",
        why="the job has failed, whether it was saved or not",
    ),
    Mutant(
        name="asks_at_once",
        module=FINISHING,
        qualname="LoopExits.tick",
        old="now - self._since > self._wait_s",
        new="now > self._since",
        why="a slow evaluation is not a reason to stop all workers",
    ),
    Mutant(
        name="who_never_comes_in_is_waited_for",
        module=FINISHING,
        qualname="LoopExits.on_loop_left",
        old=(
            "known.entered < transaction.generation or "
            "(plan is not None and find_stateless_members(plan, transaction.members))"
        ),
        new="plan is not None and find_stateless_members(plan, transaction.members)",
        why="the others would wait for an ended worker to enter",
    ),
    Mutant(
        name="who_comes_as_all_leave_has_lost_the_job",
        module=FINISHING,
        qualname="completed_without_state",
        old="bool(newcomers)",
        new="False",
        why="all workers with the state had ended their loops",
    ),
    Mutant(
        name="others_go_on_without_who_has_left",
        module=FINISHING,
        qualname="LoopExits._check_left_behind",
        old="0 < step < transaction.position.step",
        new="False",
        why="a rank that ends in the middle of a step would be left out silently",
    ),
    Mutant(
        name="asks_ever_as_often",
        module=FINISHING,
        qualname="LoopExits.tick",
        old="self._wait_s *= 2",
        new="pass",
        why="slow work that is not at fault would be stopped forever",
    ),
    Mutant(
        name="asks_in_the_last_generation",
        module=FINISHING,
        qualname="LoopExits.tick",
        old="plan is None or plan.last or context.phase is not JobPhase.RUNNING",
        new="plan is None or context.phase is not JobPhase.RUNNING",
        why="members of the last generation finish one after the other, with a checkpoint in between",
    ),
    Mutant(
        name="who_may_yet_leave_has_gone_on",
        module=FINISHING,
        qualname="find_early_leaver",
        old="other.step > step + 1 or (other.step == step + 1 and other.phase not in _BEFORE_REDUCTION)",
        new="other.step > step",
        why="a worker that computes the next step may find that no further step exists",
    ),
    Mutant(
        name="whose_script_ended_is_forgotten",
        module=FINISHING,
        qualname="find_early_leaver",
        old="finished |= {worker: step for worker, step in left.items() if worker in workers}",
        new="pass",
        why="a script that ended in order has also left its loop",
    ),
    Mutant(
        name="looks_at_reduced_steps_only",
        module=FINISHING,
        qualname="find_early_leaver",
        old="other.step > step + 1 or (other.step == step + 1 and other.phase not in _BEFORE_REDUCTION)",
        new="other.step > step + 1",
        why="the step after the last one needs all workers, so a worker in it would wait forever",
    ),
    Mutant(
        name="who_had_ended_has_ended",
        module=HEARING,
        qualname="MessageHandlers._on_finished",
        old="message.generation == self._transaction.generation",
        new="True",
        why="a worker that ended its loop in an older generation has not saved in the last one",
    ),
    Mutant(
        name="the_end_of_an_abandoned_lineage_counts",
        module=HEARING,
        qualname="MessageHandlers._on_finished",
        old=(
            "if record.lineage <= message.generation <= record.generation:\n"
            "    self._context.ledger.record_step(info.id, message.step)"
        ),
        new="self._context.ledger.record_step(info.id, message.step)",
        why="steps undone by a rollback were not applied",
    ),
    Mutant(
        name="never_the_second_time",
        module=SUSPECTS,
        qualname="Suspects.find_suspects",
        old="self._tried = (frozenset(workers), committed)",
        new="self._tried = None",
        why="members that failed twice must not try a third time",
    ),
    Mutant(
        name="a_step_in_between_counts_for_nothing",
        module=SUSPECTS,
        qualname="Suspects.find_suspects",
        old="self._tried == (frozenset(workers), committed)",
        new="self._tried is not None and self._tried[0] == frozenset(workers)",
        why="members that completed a step did not fail together",
    ),
    Mutant(
        name="who_is_ahead_is_late",
        module=SUSPECTS,
        qualname="_find_laggards",
        old="places[worker] < min(timed_out)",
        new="places[worker] > min(timed_out)",
        why="the others waited for the worker that is behind",
    ),
    Mutant(
        name="who_waited_is_late",
        module=SUSPECTS,
        qualname="_find_laggards",
        old="min",
        new="max",
        why="a complainer waited itself, perhaps for another collective",
    ),
    Mutant(
        name="strangers_cannot_be_reached",
        module=SUSPECTS,
        qualname="Suspects._find_unreachable",
        old="len(pair) == 2 and pair <= set(nodes)",
        new="len(pair) == 2",
        why="an unreachable node that has left is not a failure of a member",
    ),
    Mutant(
        name="all_are_to_blame",
        module=SUSPECTS,
        qualname="unless_all",
        old="named if any((node_of(worker) not in named for worker in workers)) else {}",
        new="named",
        why="at least one node must stay",
    ),
    Mutant(
        name="an_older_store_is_taken_for_the_newest",
        module=RECORD_AGE,
        qualname="RecordAge.newer_than_record",
        old="heard.generation > known",
        new="heard.term > record.term",
        why="a coordinator on a backup would stop or expel the workers of newer generations",
        quick=True,
    ),
    Mutant(
        name="a_second_generation_of_a_number_confirms_the_record",
        module=RECORD_AGE,
        qualname="RecordAge.newer_than_record",
        old="record.generation if heard.term == record.term else self._generation",
        new="record.generation",
        why="an outdated coordinator that started a generation of its own would expel members of the first one",
    ),
    Mutant(
        name="no_agent_is_awaited_before_the_first_generation",
        module=RECORD_AGE,
        qualname="RecordAge.awaits_agents",
        old="self._begun + self._lease_s",
        new="self._begun",
        why="the first node to connect would start the job a second time next to the training nodes",
    ),
)
