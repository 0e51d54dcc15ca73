"""The main table of mutants, each with one error in the source and its consequence.

Each mutant names a module, a function and the replaced code (see `mutant.py`).
"""

from __future__ import annotations

from mutant import Mutant
from mutants_of_agents import AGENT_MUTANTS
from mutants_of_comparisons import COMPARISON_MUTANTS
from mutants_of_failures import FAILURE_MUTANTS
from mutants_of_lateness import LATENESS_MUTANTS
from mutants_of_layouts import LAYOUT_MUTANTS
from mutants_of_moves import MOVE_MUTANTS
from mutants_of_outputs import OUTPUT_MUTANTS
from mutants_of_parts import PART_MUTANTS
from mutants_of_samples import SAMPLE_MUTANTS
from mutants_of_saves import SAVE_MUTANTS
from mutants_of_snapshots import SNAPSHOT_MUTANTS
from mutants_of_tenancy import TENANCY_MUTANTS
from mutants_of_units import UNIT_MUTANTS
from mutants_of_witnesses import WITNESS_MUTANTS

COMMIT = "protocol.commit"
MESSAGES = "protocol.messages.worker"
WORKER = "coordination.worker.machine"
BOUNDARIES = "coordination.worker.boundaries"
GENERATIONS = "coordination.worker.generations"
COPY = "coordination.worker.copy"
ASSIGNMENT = "coordination.generations.assignment"
ADOPTING = "coordination.worker.replica_group.adopting"
SHARE = "coordination.worker.replica_group.share"
DECISIONS = "coordination.generations.decisions"
DECIDING = "coordination.job.deciding"
LEDGER = "coordination.progress.ledger"
STANDINGS = "coordination.progress.worker_progress"
PLANNER = "coordination.generations.planner"
JOINING = "coordination.generations.swap"
HEARING = "coordination.job.handlers"
STOPPING = "coordination.generations.interruption"
FAILURES = "coordination.recovery.failures"
DEPARTURES = "coordination.nodes.draining"
ADMISSION = "coordination.job.admission"
ABSENCES = "coordination.nodes.disconnected_nodes"
COORDINATOR = "coordination.job.coordinator"
CHECKPOINTS = "coordination.progress.checkpoints"
PROGRESS = "coordination.progress.announced"
EXPERTS = "coordination.experts.placing"
BLOBS = "coordination.experts.blobs"
SUSPECTS = "coordination.failures.suspects"
TURN = "coordination.transaction"
AGENT = "coordination.agent.machine"
NODE_STEPS = "coordination.agent.node_steps"
PLACE = "coordination.agent.place"

MUTANTS = (
    # ---- the worker ----
    Mutant(
        name="reports_too_early",
        module=BOUNDARIES,
        old="{Phase.VOTED, Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING}",
        new="{Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING}",
        why="a report during an open commit operation is unreliable, because the step may still pass",
    ),
    Mutant(
        name="reports_within_apply",
        module=BOUNDARIES,
        old="{Phase.VOTED, Phase.APPLYING, Phase.FORWARD, Phase.ADOPTING}",
        new="{Phase.VOTED, Phase.ADOPTING}",
        why="the state would change after the report",
        quick=True,
    ),
    Mutant(
        name="breaks_its_promise",
        module=WORKER,
        qualname="WorkerMachine.frozen",
        old="self.generations.frozen",
        new="self.generations.frozen and self.phase is not Phase.PASSED",
        why="the worker would apply the step after its report",
        quick=True,
    ),
    Mutant(
        name="recomputes_v",
        module=COPY,
        qualname="StateCopy.apply_decision",
        old="self.passed = PassedStep(step=decision.applied, commit=decision.commit)",
        new=(
            "commit = msgspec.structs.replace(decision.commit, grad_square=0.5)\n"
            "self.passed = PassedStep(step=decision.applied, commit=commit)"
        ),
        why="FORWARD applies the recorded step result and no other",
    ),
    Mutant(
        name="judges_for_itself",
        module=COPY,
        qualname="StateCopy.apply_decision",
        old="self.passed = PassedStep(step=decision.applied, commit=decision.commit)",
        new=(
            "commit = msgspec.structs.replace(decision.commit, nonfinite=0)\n"
            "self.passed = PassedStep(step=decision.applied, commit=commit)"
        ),
        why="all workers must omit a step that the step result omits",
    ),
    Mutant(
        name="computes_all",
        module=WORKER,
        qualname="WorkerMachine.share",
        old="self.generations.default_share(self.samples.micro_batches)",
        new="tuple(range(self.samples.micro_batches))",
        why="each micro-batch must count once",
        quick=True,
    ),
    Mutant(
        name="forgets_its_share",
        module=SHARE,
        qualname="Share.assign",
        old="self.assigned = assigned",
        new="self.assigned = None",
        why="after a failure, the decided shares apply and not those of the ranks",
        quick=True,
    ),
    Mutant(
        name="keeps_its_share",
        module=WORKER,
        qualname="WorkerMachine.finish_apply",
        old="self._share = Share()",
        new="self._share.summed = []",
        why="an assignment is for the first step only; after a swap to more ranks, parts would be missing or doubled",
    ),
    Mutant(
        name="keeps_gradients_of_another_step",
        module=WORKER,
        qualname="WorkerMachine._on_begin",
        old="decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD) and self.applied == decision.applied",
        new="decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD)",
        why="gradients of an older state do not belong to this step",
    ),
    Mutant(
        name="takes_a_torn_state",
        module=ADOPTING,
        qualname="StateAdoption.accept_push",
        old=("if not self._copy.keeps:\n    self._copy.mark_void()"),
        new=(
            "if not self._copy.keeps:\n"
            "    decision = self.generations.decision\n"
            "self._copy.set_step(decision.applied if decision else 1, None)"
        ),
        why="a state is complete when its transfer has ended, not when it begins",
        quick=True,
    ),
    Mutant(
        name="torn_state_counts_as_fresh",
        module=ADOPTING,
        qualname="StateAdoption.accept_push",
        old=("if not self._copy.keeps:\n    self._copy.mark_void()\nreturn True"),
        new=("if not self._copy.keeps:\n    return True"),
        why="a partly overwritten state is not an initial state",
    ),
    Mutant(
        name="ignores_the_terms_of_stops",
        module=GENERATIONS,
        qualname="KnownGenerations.freeze",
        old="order.term < self.term or order.generation < max(self.number, self._left_generation) or repeated",
        new="order.generation < max(self.number, self._left_generation) or repeated",
        why="a superseded coordinator must not stop a worker",
    ),
    Mutant(
        name="obeys_stops_of_old_generations",
        module=GENERATIONS,
        qualname="KnownGenerations.freeze",
        old="order.term < self.term or order.generation < max(self.number, self._left_generation) or repeated",
        new="order.term < self.term or repeated",
        why="an old Stop would freeze a worker that no decision waits for",
    ),
    Mutant(
        name="begins_an_old_generation",
        module=GENERATIONS,
        qualname="KnownGenerations.is_next",
        old="plan.generation <= self._newest",
        new="plan.generation < self._newest",
        why="a generation that failed or is in force must not begin again",
    ),
    Mutant(
        name="swaps_although_stopped",
        module=GENERATIONS,
        qualname="KnownGenerations.is_swap_due",
        old="Flag.SWAP in commit.flags and self.pending is not None and (not self.frozen)",
        new="Flag.SWAP in commit.flags and self.pending is not None",
        why="a failure makes a pending swap void",
    ),
    Mutant(
        name="swaps_before_all_are_armed",
        module=COMMIT,
        qualname="with_flags",
        old="raised == world",
        new="raised",
        why="either all workers swap or none",
    ),
    Mutant(
        name="flags_before_its_group_stands",
        module=GENERATIONS,
        qualname="KnownGenerations.flags",
        old="self.pending and self.pending.prepared and self.pending.armed",
        new="self.pending is not None",
        why="the flag means that this worker's pending group is built, and that the coordinator knows this of all",
    ),
    Mutant(
        name="applies_in_an_old_state",
        module=COPY,
        qualname="StateCopy.is_forward_due",
        old="self.applied == decision.applied - 1",
        new="self.applied <= decision.applied",
        why="FORWARD is only for workers with the state right before the step",
    ),
    # ---- decisions ----
    Mutant(
        name="ignores_who_passed",
        module=DECISIONS,
        qualname="_known_results",
        old="known[report.passed.step] = report.passed.commit",
        new="pass",
        why="all workers must apply a step that passed anywhere, including its flags",
    ),
    Mutant(
        name="forward_is_not_inherited",
        module=DECISIONS,
        qualname="_known_results",
        old=("previous is not None and previous.kind is DecisionKind.FORWARD and (previous.commit is not None)"),
        new="False and previous is not None and (previous.commit is not None)",
        why="a FORWARD stays in force until all have applied it, because the workers that applied it may fail",
    ),
    Mutant(
        name="anybody_can_reach_the_target",
        module=DECISIONS,
        qualname="_can_reach",
        old="commit is not None and report.reduced is not None and have_same_lanes(report.reduced, commit)",
        new="commit is not None",
        why="a worker without reduced gradients cannot execute FORWARD",
    ),
    Mutant(
        name="oldest_checkpoint",
        module=DECISIONS,
        qualname="without_state",
        old="-1",
        new="0",
        why="the job must not lose more than necessary",
    ),
    Mutant(
        name="begins_anew_instead_of_giving_up",
        module=DECISIONS,
        qualname="without_state",
        old="committed == 0",
        new="True",
        why="a job that lost its state must fail; it must not silently restart from its initial state",
    ),
    Mutant(
        name="keeps_reduced_gradients_of_half_a_world",
        module=DECIDING,
        qualname="GenerationDecider.decide",
        old="self._disconnected.promised",
        new="set()",
        why="a disconnected node that may return with a passed step must be awaited",
    ),
    Mutant(
        name="undone_steps_are_remembered",
        module=DECIDING,
        qualname="GenerationDecider._execute",
        old="self._ledger.undo_after(decision.applied)",
        new="pass",
        why="a step that only an expelled worker applied must not be compared with later ones",
    ),
    Mutant(
        name="what_passed_dies_with_the_coordinator",
        module=DECIDING,
        qualname="GenerationDecider._record_passed_steps",
        old="self._transaction.change(passed=self._ledger.unannounced)",
        new="pass",
        why="a step reconstructed from reports must be persisted with the decision that depends on it",
    ),
    Mutant(
        name="newcomers_join_those_who_timed_out",
        module=DECIDING,
        qualname="GenerationDecider._choose_next_generation",
        old="closing or (parted and (not lacks_slots(transaction, self._config, list(reports))))",
        new="closing",
        why="workers that cannot reach each other would be grouped in turns forever",
    ),
    Mutant(
        name="lineage_stays_after_a_roll_back",
        module=DECIDING,
        qualname="GenerationDecider._begin_generation",
        old="transaction.change(lineage=plan.generation)",
        new="pass",
        why="messages of the abandoned lineage must not count on the new one",
    ),
    # ---- applied steps ----
    Mutant(
        name="commits_when_the_first_has_applied",
        module=STANDINGS,
        qualname="WorkerProgress.all_beyond",
        old="bool(self._members) and (not self._behind)",
        new="self._behind < len(self._members)",
        why="a step is committed only after the last member has applied it",
        quick=True,
    ),
    Mutant(
        name="nothing_is_filled_in",
        module=LEDGER,
        qualname="StepLedger.add_final_reports",
        old="self.give_up_to(top, global_batch)",
        new="pass",
        why="a step must be announced even if all its witnesses have died",
    ),
    Mutant(
        name="fills_in_without_v",
        module=LEDGER,
        qualname="StepLedger.add_final_reports",
        old="self.expect(report.passed.step, report.passed.commit)",
        new="pass",
        why="a report still contains the loss of its last step",
    ),
    Mutant(
        name="replicas_may_differ",
        module=LEDGER,
        qualname="StepLedger._learn",
        old="_bits(known.commit) != _bits(news.commit)",
        new="False",
        why="diverged replicas must never be tolerated",
    ),
    Mutant(
        name="forgotten_members_hold_nobody_up",
        module=STANDINGS,
        qualname="WorkerProgress._count",
        old="len(self._members)",
        new="self._at.total()",
        why="a worker that has not reported a step may not have applied it",
    ),
    Mutant(
        name="applied_of_an_abandoned_lineage",
        module=HEARING,
        qualname="MessageHandlers._on_applied",
        old="message.generation < record.lineage or message.generation > record.generation",
        new="message.generation > record.generation",
        why="a rollback makes earlier applied steps void",
    ),
    Mutant(
        name="entered_of_an_abandoned_lineage",
        module=HEARING,
        qualname="MessageHandlers._on_entered",
        old="message.generation >= self._transaction.record.lineage",
        new="message.generation",
        why="a rollback makes the states void with which workers entered an older generation",
    ),
    # ---- the pending group ----
    Mutant(
        name="arms_before_all_are_prepared",
        module=JOINING,
        qualname="PendingGeneration.arm",
        old=("if not transaction.members.prepared(pending):\n    return"),
        new="pass",
        why="flags may be raised only after every member's group is built",
    ),
    Mutant(
        name="voids_what_is_armed",
        module=FAILURES,
        qualname="Failures.undo_pending",
        old=(
            "if self._pending_generation.armed:\n    self._interruption.start(since)\n"
            "else:\n    self._pending_generation.cancel(suspects)"
        ),
        new=("self._pending_generation.armed = False\nif True:\n    self._pending_generation.cancel(suspects)"),
        why="after Arm some workers may have swapped; Void would leave them alone in the new generation",
    ),
    Mutant(
        name="a_restored_pending_group_is_not_armed",
        module=JOINING,
        qualname="PendingGeneration.__init__",
        old="transaction.record.pending is not None",
        new="False",
        why="the previous coordinator may have armed the group",
    ),
    Mutant(
        name="promotes_while_stopping",
        module=HEARING,
        qualname="MessageHandlers._promote_pending",
        old="context.interruption.stop is not None",
        new="False",
        why="a failure makes a pending swap void, whichever worker has passed it",
    ),
    Mutant(
        name="receivers_push",
        module=PLANNER,
        qualname="plan_with",
        old="[worker for worker in roles if worker not in having] if holders else []",
        new="[]",
        why="a worker that lacks the state must receive it, not send it",
        quick=True,
    ),
    Mutant(
        name="forward_with_other_experts",
        module=MESSAGES,
        qualname="Report.holding_of",
        old="self.result if self.applied == step - 1 else None",
        new="self.state if self.applied == step - 1 and self.result is not None else None",
        why="the experts continue from the step that is still to be applied",
    ),
    Mutant(
        name="assigns_parts_of_another_step",
        module=ASSIGNMENT,
        qualname="first_assignment",
        old="mine if applied == decision.applied else ()",
        new="mine",
        why="only gradients of the repeated step may be kept",
    ),
    # ---- stops and reports ----
    Mutant(
        name="never_stops",
        module=STOPPING,
        qualname="Interruption.start",
        old="self.stop is not None",
        new="True",
        why="workers must leave a failed generation",
        quick=True,
    ),
    Mutant(
        name="reports_for_an_older_stop",
        module=STOPPING,
        qualname="Interruption.is_answer",
        old=("self.stop is not None and (report.term, report.generation) == (self.stop.term, self.stop.generation)"),
        new="self.stop is not None",
        why="a report must describe the worker at this Stop, not at an earlier one",
    ),
    Mutant(
        name="the_dead_are_awaited",
        module=STOPPING,
        qualname="Interruption.forget",
        old="self.reports.pop(worker, None)",
        new="pass",
        why="a report of an expelled worker must not count",
    ),
    Mutant(
        name="pending_members_are_not_stopped",
        module=STOPPING,
        qualname="Interruption.start",
        old="transaction.order_all(transaction.planned, self.stop)",
        new="transaction.order_all(transaction.record.plan.workers, self.stop)",
        why="members of the pending plan may already have swapped",
    ),
    # ---- membership ----
    Mutant(
        name="lets_leavers_go_at_once",
        module=DEPARTURES,
        qualname="Draining.release_proven",
        old="one.owed and (safe or not self._transaction.members.unfinished(plan))",
        new="one.owed",
        why="a departed node is retained until the others continue, because its successor may not have the state yet",
    ),
    Mutant(
        name="takes_back_anybody",
        module=ADMISSION,
        qualname="Admission._find_refusal",
        old="_was_expelled(self._transaction.planned, hello)",
        new="False",
        why="a node expelled while disconnected may return only with fresh workers",
        quick=True,
    ),
    Mutant(
        name="hears_the_expelled",
        module="coordination.membership",
        qualname="Membership.remove",
        old="self._by_connection.pop(node.connection, None)",
        new="pass",
        why="messages of a node that has left must be ignored",
    ),
    Mutant(
        name="superseded_coordinators_let_in",
        module=ADMISSION,
        qualname="Admission.admit",
        old="hello.term > transaction.record.term and (not self._record_age.raise_term(hello))",
        new="False",
        why="an agent that knows a newer coordinator must connect to that one",
    ),
    Mutant(
        name="leases_run_while_the_coordinator_is_away",
        module=COORDINATOR,
        qualname="Coordinator._was_paused",
        old=("self.members.renew_leases(self.transaction.now)\nself.context.disconnected.pause_over()"),
        new="pass",
        why="unread messages must not count as silence",
    ),
    Mutant(
        name="leases_never_run_out",
        module="coordination.membership",
        qualname="Membership.expired",
        old="[node for node in silent if now - node.seen > min(lease_s, node.lease.lasts_s)]",
        new="[]",
        why="a node that falls silent must be treated as lost",
    ),
    Mutant(
        name="absent_nodes_are_awaited_for_ever",
        module=ABSENCES,
        qualname="DisconnectedNodes.overdue",
        old="lease_s",
        new="1000000000.0",
        why="a node that does not return after a coordinator crash must be lost after a lease",
    ),
    Mutant(
        name="silent_workers_are_awaited_for_ever",
        module=STOPPING,
        qualname="Interruption.silent",
        old="self.stop is None or self._transaction.now - self._since <= timeout_s",
        new="True",
        why="an agent may be alive although its worker does not answer",
    ),
    # ---- writes and their order ----
    Mutant(
        name="loses_its_outbox",
        module=COORDINATOR,
        qualname="Coordinator.start",
        old="return [*(Emit(event) for event in self._missing_events), *transaction.flush()]",
        new="return transaction.flush()",
        why="an event that the record lists as announced must be announced after a crash",
        quick=True,
    ),
    Mutant(
        name="announces_before_it_writes",
        module=TURN,
        qualname="Transaction.flush",
        old="out += [Emit(event) for event in self._events]",
        new="out = [*(Emit(event) for event in self._events), *out]",
        why="a crash must not make an announcement untrue",
    ),
    Mutant(
        name="terms_do_not_grow",
        module=COORDINATOR,
        qualname="Coordinator.start",
        old="self.record.term + 1",
        new="max(1, self.record.term)",
        why="terms distinguish coordinators",
        quick=True,
    ),
    # ---- checkpoints ----
    Mutant(
        name="checkpoints_of_some_parts",
        module=CHECKPOINTS,
        qualname="_Open.complete",
        old="len(self.parts) == self.count",
        new="bool(self.parts)",
        why="a worker that is no longer a member may have passed alone; only parts of all members prove a step",
    ),
    Mutant(
        name="checkpoints_of_abandoned_steps",
        module=CHECKPOINTS,
        qualname="CheckpointBook._on_lineage",
        old="known and on_lineage(record, message)",
        new="known",
        why="a checkpoint of an abandoned lineage must never count",
    ),
    Mutant(
        name="checkpoints_of_a_later_term",
        module=CHECKPOINTS,
        qualname="CheckpointBook._on_lineage",
        old="message.term <= record.term and message.generation <= record.generation",
        new="message.generation <= record.generation",
        why="a coordinator with an older store must not count the checkpoints of a newer one",
    ),
    Mutant(
        name="checkpoints_of_steps_to_come",
        module=CHECKPOINTS,
        qualname="CheckpointBook.update",
        old="one.complete and name.step <= committed",
        new="one.complete",
        why="a checkpoint counts only once its step is committed",
    ),
    # ---- the agent ----
    Mutant(
        name="agent_forgets_what_was_applied",
        module=NODE_STEPS,
        qualname="NodeSteps.on_applied",
        old="self._kept.add(message, now)",
        new="pass",
        why="a new coordinator must receive the steps that the journal lacks",
    ),
    Mutant(
        name="agent_forgets_reports",
        module=PLACE,
        qualname="LocalRank._forget_before",
        old="isinstance(kept, _GENERATION_BOUND) and kept.generation < generation",
        new="isinstance(kept, _GENERATION_BOUND)",
        why="messages about the entered generation or a later one still count",
    ),
    Mutant(
        name="a_pending_generation_hides_the_broken_one",
        module=PLACE,
        qualname="LocalRank._is_complaint_of_pending",
        old="kept.generation < message.generation and kept.generation <= in_force",
        new="False",
        why="a new coordinator would not learn that the group in force is broken",
    ),
    Mutant(
        name="agent_forgets_too_much_after_a_roll_back",
        module=NODE_STEPS,
        qualname="NodeSteps.enter_generation",
        old="self.committed = min(self.committed, step)",
        new="pass",
        why="after a rollback, steps are committed and reported again",
    ),
    Mutant(
        name="agent_follows_older_coordinators",
        module=AGENT,
        qualname="AgentMachine._on_welcome",
        old="welcome.term < self.term",
        new="False",
        why="agents must not follow a superseded coordinator",
    ),
    Mutant(
        name="agent_passes_on_what_an_older_coordinator_says",
        module=AGENT,
        qualname="AgentMachine._on_node_order",
        old="self._welcome is None or not is_from_newest(order, self.term)",
        new="self._welcome is None",
        why="orders of an older term must not reach workers",
    ),
    Mutant(
        name="agent_takes_workers_that_were_begun_for_fresh",
        module=PLACE,
        qualname="LocalRank.on_order_sent",
        old="self.keep(Begun(worker=self.worker, generation=order.plan.generation))",
        new="pass",
        why="a worker is in the generation even if its listener had no time to run",
    ),
    Mutant(
        name="agent_tells_of_no_ends_again",
        module=PLACE,
        qualname="first_replayed",
        old="ends = [down for place in places if (down := place.pop_previous_down()) is not None]",
        new="ends: list[WorkerDown] = []",
        why="a worker may end while no coordinator is connected",
    ),
    Mutant(
        name="agent_keeps_what_the_dead_said",
        module=AGENT,
        qualname="AgentMachine._replace",
        old="place.refill('')",
        new="pass",
        why="earlier messages of an ended worker would look like a worker that returned",
    ),
    Mutant(
        name="agent_lets_stopped_workers_be",
        module=AGENT,
        qualname="AgentMachine.tick",
        old="place.update_stopped_time(now, stopped=place.worker in stopped) > lease_s",
        new="False",
        why="only the agent can see that a worker is stopped for longer than a lease",
    ),
    Mutant(
        name="agent_comes_back_as_it_was",
        module=AGENT,
        qualname="AgentMachine._on_refused",
        old="[self._fill(place, index) for index, place in enumerate(self._places)]",
        new="list[AgentInstruction]()",
        why="an expelled node must return with new workers",
    ),
    # ---- progress, experts, suspects ----
    Mutant(
        name="finished_before_all_are",
        module=PROGRESS,
        qualname="Progress.finished",
        old="not self._transaction.members.unfinished(plan) and self.ledger.all_at_committed",
        new="self.ledger.all_at_committed",
        why="a job is finished when all workers have ended their loops at the committed step",
        quick=True,
    ),
    Mutant(
        name="lost_experts_are_not_missed",
        module=BLOBS,
        qualname="find_lost_experts",
        old="[divmod(int(cell), shape.experts) for cell in np.flatnonzero(live == 0)]",
        new="[]",
        why="an expert without a live copy requires a checkpoint",
    ),
    Mutant(
        name="experts_of_the_other_ranks",
        module=EXPERTS,
        qualname="keep_placement",
        old="zip(touched.tolist(), blobs, strict=True)",
        new="enumerate(blobs)",
        why="experts must go to the worker that they are assigned to",
    ),
    Mutant(
        name="a_loss_is_not_mended",
        module="planning.placement.keeping.repair",
        qualname="_restore_guarantee",
        old="hosts < threshold",
        new="hosts < 0",
        why="the placement after a loss must keep the fault threshold",
    ),
    Mutant(
        name="the_same_members_again_after_a_time_out",
        module=SUSPECTS,
        qualname="Suspects.find_suspects",
        old="any((complaint.timed_out or complaint.unreachable for complaint in complaints.values()))",
        new="False",
        why="after a timeout, the same members must not form a group again",
    ),
    Mutant(
        name="the_same_members_for_ever",
        module=SUSPECTS,
        qualname="Suspects.find_suspects",
        old="not (late or again)",
        new="True",
        why="members that failed twice must not try again",
    ),
    *MOVE_MUTANTS,
    *PART_MUTANTS,
    *AGENT_MUTANTS,
    *COMPARISON_MUTANTS,
    *FAILURE_MUTANTS,
    *LATENESS_MUTANTS,
    *WITNESS_MUTANTS,
    *SAMPLE_MUTANTS,
    *SAVE_MUTANTS,
    *SNAPSHOT_MUTANTS,
    *TENANCY_MUTANTS,
    *UNIT_MUTANTS,
    *LAYOUT_MUTANTS,
    *OUTPUT_MUTANTS,
)
