"""Mutants of witnesses: few nodes report a step when it passes, the others after a failure."""

from __future__ import annotations

from mutant import Mutant

AGENT = "coordination.agent.machine"
NODE_STEPS = "coordination.agent.node_steps"
PLACE = "coordination.agent.place"
LEDGER = "coordination.progress.ledger"
PROGRESS = "coordination.progress.announced"
HEARING = "coordination.job.handlers"
ADOPTING = "coordination.worker.replica_group.adopting"
WORKER = "coordination.worker.machine"
COPY = "coordination.worker.copy"
WITNESSES = "coordination.generations.witnesses"

WITNESS_MUTANTS = (
    Mutant(
        name="reports_tell_the_newest_step_only",
        module=AGENT,
        qualname="AgentMachine.on_worker_message",
        old="out = self._send_unsent_steps(now)",
        new="pass",
        why="the witnesses may be dead, so a report must contain every step result that the journal lacks",
    ),
    Mutant(
        name="a_left_loop_takes_its_steps_along",
        module=AGENT,
        qualname="AgentMachine.on_worker_ended",
        old="[*self._send_unsent_steps(now), *self._send(place.down, now)]",
        new="self._send(place.down, now)",
        why="a worker that has left its loop sends no further report",
    ),
    Mutant(
        name="a_step_s_own_v_announces_it",
        module=LEDGER,
        qualname="StepLedger.prove",
        old="step - 1",
        new="step",
        why="a step that passed on one worker is not proven to be applied on others",
        quick=True,
    ),
    Mutant(
        name="a_proof_outlives_its_generation",
        module=LEDGER,
        qualname="StepLedger.follow",
        old="self._generation, self._proven = (generation, 0)",
        new="self._generation = generation",
        why="a joined worker has not applied the steps of the earlier members",
    ),
    Mutant(
        name="any_generation_proves",
        module=LEDGER,
        qualname="StepLedger.prove",
        old="generation == self._generation",
        new="True",
        why="a step that passed in an older generation proves nothing about workers that joined later",
    ),
    Mutant(
        name="proves_before_all_have_entered",
        module=PROGRESS,
        qualname="Progress.announce_applied_steps",
        old="self.ledger.proven if self._transaction.members.entered(self._transaction.record.plan) else 0",
        new="self.ledger.proven",
        why="workers with the gradients may report FORWARD while others still wait for the state",
    ),
    Mutant(
        name="a_swap_announces_nothing",
        module=HEARING,
        qualname="MessageHandlers._promote_pending",
        old="context.progress.announce_applied_steps()",
        new="False",
        why="steps proven for the previous members must be announced before the members change",
    ),
    Mutant(
        name="heartbeats_of_an_abandoned_lineage",
        module=HEARING,
        qualname="MessageHandlers._on_heartbeat",
        old="record.lineage <= heartbeat.generation <= record.generation",
        new="heartbeat.generation <= record.generation",
        why="steps reported before a rollback must not count",
    ),
    Mutant(
        name="where_one_stands_all_stand",
        module=HEARING,
        qualname="MessageHandlers._on_heartbeat",
        old="len(applied) == 1",
        new="applied",
        why="one number describes all workers only if all numbers are equal",
    ),
    Mutant(
        name="heartbeats_do_not_say_where_one_stands",
        module=NODE_STEPS,
        qualname="NodeSteps.make_heartbeat",
        old="not any((place.applied > place.reported_step for place in places))",
        new="True",
        why="the last step of a job cannot wait for a later one",
    ),
    Mutant(
        name="a_decision_takes_nobody_back",
        module=LEDGER,
        qualname="StepLedger.undo_after",
        old="self._worker_progress.go_back(step)",
        new="pass",
        why="a worker that is rolled back no longer has its earlier step",
    ),
    Mutant(
        name="a_joiner_knows_no_step",
        module=ADOPTING,
        qualname="StateAdoption.finish_receive",
        old="tuple(passed)",
        new="()",
        why="a worker that received a state may be the last survivor",
    ),
    Mutant(
        name="a_state_goes_with_the_newest_step_only",
        module=WORKER,
        qualname="WorkerMachine.history",
        old="tuple(self._copy.history)",
        new="tuple(self._copy.history)[-1:]",
        why="the journal may also lack the steps before",
    ),
    Mutant(
        name="what_was_loaded_has_a_history",
        module=COPY,
        qualname="StateCopy.mark_void",
        old="self.history.clear()",
        new="pass",
        why="steps undone by a rollback do not belong to the loaded state",
    ),
    Mutant(
        name="a_gap_counts_as_told",
        module=NODE_STEPS,
        qualname="NodeSteps.on_applied",
        old="message.step <= max(self._reported, self.committed) + 1",
        new="True",
        why="a witness may not have been one earlier",
    ),
    Mutant(
        name="what_was_undone_counts_as_told",
        module=NODE_STEPS,
        qualname="NodeSteps.undo_after",
        old="self._reported = min(self._reported, step)",
        new="pass",
        why="a repeated step has another result",
    ),
    Mutant(
        name="the_step_that_was_sent_is_of_now",
        module=HEARING,
        qualname="MessageHandlers._on_applied_steps",
        old="min(self._transaction.now, kept.time + node.ahead_s) if kept.time else 0.0",
        new="min(self._transaction.now, kept.time + node.ahead_s)",
        why="the time when a step was applied elsewhere is not known here",
    ),
    Mutant(
        name="each_worker_tells_its_hash",
        module=NODE_STEPS,
        qualname="NodeSteps.on_applied",
        old="message.state_hash and message.state_hash == known",
        new="False",
        why="one hash per node is enough if its workers agree",
    ),
    Mutant(
        name="a_node_keeps_its_quarrels",
        module=NODE_STEPS,
        qualname="NodeSteps.on_applied",
        old="message.witness or message.state_hash",
        new="message.witness",
        why="diverged replicas must never be tolerated",
    ),
    Mutant(
        name="all_witnesses_in_one_rack",
        module=WITNESSES,
        qualname="choose_witnesses",
        old="dict.fromkeys((*firsts.values(), *ranks))",
        new="ranks",
        why="the nodes of one rack fail together",
    ),
)
