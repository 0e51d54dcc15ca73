"""The mutants of the coordinator's smaller parts, and of what follows what in a worker."""

from __future__ import annotations

from mutant import Mutant

BOUNDARIES = "coordination/worker/boundaries.py"
REPORTING = "coordination/worker/reporting.py"
COPY = "coordination/worker/copy.py"
ASSIGNMENT = "coordination/generations/assignment.py"
SHARE = "coordination/worker/unit/share.py"
DECISIONS = "coordination/generations/decisions.py"
PLANNER = "coordination/generations/planner.py"
STOPPING = "coordination/generations/stopping.py"
CLOSING = "coordination/closing.py"
FINISHING = "coordination/generations/finishing.py"
SUSPECTS = "coordination/failures/suspects.py"
HEARING = "coordination/hearing.py"
RECORD_AGE = "coordination/nodes/record_age.py"

PART_MUTANTS = (
    Mutant(
        name="a_left_vote_was_never_begun",
        file=BOUNDARIES,
        old='    (Phase.VOTED, "vote_abandoned"): Phase.ABANDONED,\n',
        new='    (Phase.VOTED, "vote_abandoned"): Phase.READY,\n',
        why="who has left its commit operation did not keep the others waiting for it",
    ),
    Mutant(
        name="who_left_its_vote_has_nothing",
        file=REPORTING,
        old="        reduced=copy.reduced,\n",
        new="        reduced=copy.reduced if phase is not Phase.ABANDONED else None,\n",
        why="its reductions have returned: it can apply what passed elsewhere, or finish the step by itself",
    ),
    Mutant(
        name="who_is_ready_is_not_asked",
        file=DECISIONS,
        old="            known[report.step] = report.reduced\n",
        new="            pass\n",
        why="a step whose reductions have all returned somewhere is never done again",
        quick=True,
    ),
    Mutant(
        name="who_lacks_the_step_has_nothing",
        file=COPY,
        old="        self.keeps = receives and not (apart or anew) and self.applied is not None\n",
        new="        self.keeps = False\n",
        why="the only one that was READY may die before the others have its state: theirs must do",
    ),
    Mutant(
        name="adopts_after_its_report",
        file=BOUNDARIES,
        old="Phase.FORWARD, Phase.ADOPTING})\n",
        new="Phase.FORWARD})\n",
        why="what it has promised to have is being written over",
    ),
    Mutant(
        name="what_was_begun_of_the_next_step_is_done_again",
        file=ASSIGNMENT,
        old="    if decision.kind not in (DecisionKind.REDO, DecisionKind.FORWARD):\n",
        new="    if decision.kind is not DecisionKind.REDO:\n",
        why="that others have to finish a step takes nothing from who has gone on",
    ),
    Mutant(
        name="who_waits_for_a_state_forgets_its_gradients",
        file=SHARE,
        old="        if not (keeps or (same_step",
        new="        if not ((same_step",
        why="where that never comes the step is done again, and they are of use",
    ),
    Mutant(
        name="loads_what_a_peer_would_send",
        file=BOUNDARIES,
        old="    if lacking and isinstance(source, CheckpointSource | SnapshotSource):\n",
        new="    if lacking and source is not None:\n",
        why="only a roll-back leads to a checkpoint",
    ),
    Mutant(
        name="state_comes_before_experts",
        file=BOUNDARIES,
        old="    if not placed:\n        return Move(plan, send_to)\n",
        new="    if not placed and not lacking:\n        return Move(plan, send_to)\n",
        why="the experts of all would wait for the slowest transfer",
    ),
    Mutant(
        name="pushes_to_everybody",
        file="protocol/plan.py",
        old="        return self._receivers.get(worker, ())\n",
        new="        return tuple(self.sources)\n",
        why="only who is named as a source sends: another may lack the state itself",
    ),
    Mutant(
        name="absent_members_owe_no_report",
        file=STOPPING,
        old=" is not None or node_of(worker) in away\n",
        new=" is not None\n",
        why="a member that is not back yet may have passed alone",
    ),
    Mutant(
        name="stops_an_older_generation",
        file=STOPPING,
        old="Stop(term=turn.record.term, generation=turn.record.generation)",
        new="Stop(term=turn.record.term, generation=turn.record.plan.generation)",
        why="a member that has swapped already is in a later generation",
    ),
    Mutant(
        name="a_pause_counts_as_silence",
        file=STOPPING,
        old='itself was away."""\n        self._since = self._turn.now\n',
        new='itself was away."""\n',
        why="nobody is silent to a coordinator that does not listen",
    ),
    Mutant(
        name="the_complaints_of_the_dead_count",
        file=STOPPING,
        old="        self.complaints.pop(worker, None)\n",
        new="        pass\n",
        why="whose fault it was is asked of those who are here",
        equivalent="where a member is gone nobody is judged by complaints, and they are forgotten with the Stop",
    ),
    Mutant(
        name="waits_for_a_checkpoint_that_nobody_writes",
        file=CLOSING,
        old="        if not (save and record.saves and can):\n",
        new="        if not (save and can):\n",
        why="a job without a directory ends at once",
    ),
    Mutant(
        name="asking_again_gives_more_time",
        file=CLOSING,
        old="        if not self.under_way:\n            self.under_way, self._since",
        new="        if True:\n            self.under_way, self._since",
        why="its launcher asks again and again: it must end all the same",
    ),
    Mutant(
        name="a_successor_forgets_the_wish",
        file=CLOSING,
        old="        elif not again and self._had_begun:\n",
        new="        if False:\n",
        why="the wish to end outlives the coordinator that was asked",
    ),
    Mutant(
        name="saves_for_ever",
        file=CLOSING,
        old="        if not self.under_way or self._turn.now - self._since <= limit_s:\n",
        new="        if True:\n",
        why="what takes too long is given up",
    ),
    Mutant(
        name="the_last_cause_stands",
        file=CLOSING,
        old="        if before is None or before.renew or not before.failed:\n",
        new="        if True:\n",
        why="what came first explains the rest",
    ),
    Mutant(
        name="a_failed_script_ended_by_will",
        file=CLOSING,
        old="        if will.failed:\n",
        new="        if will.failed and not self.under_way:\n",
        why="saved or not, it has failed",
    ),
    Mutant(
        name="asks_at_once",
        file=FINISHING,
        old="        elif now - self._since > self._wait_s:\n",
        new="        elif now > self._since:\n",
        why="a slow evaluation is no reason to stop everybody",
    ),
    Mutant(
        name="who_never_comes_in_is_waited_for",
        file=FINISHING,
        old="if known.entered < turn.generation or (plan",
        new="if (plan",
        why="the others wait for it to enter, and it has ended",
    ),
    Mutant(
        name="who_comes_as_all_leave_has_lost_the_job",
        file=FINISHING,
        old="    return bool(newcomers)\n",
        new="    return False\n",
        why="all that had the state were through with their loops",
    ),
    Mutant(
        name="others_go_on_without_who_has_left",
        file=FINISHING,
        old="            if 0 < step < turn.position.step:\n",
        new="            if False:\n",
        why="a rank that ends in the midst of a step would be left out without a word",
    ),
    Mutant(
        name="asks_ever_as_often",
        file=FINISHING,
        old="            self._wait_s *= 2\n",
        new="            pass\n",
        why="what is slow, and is not at fault, would be stopped for ever",
    ),
    Mutant(
        name="asks_in_the_last_generation",
        file=FINISHING,
        old="        if plan is None or plan.last or parts.state",
        new="        if plan is None or parts.state",
        why="the members of the last generation finish one after the other, with a checkpoint in between",
    ),
    Mutant(
        name="who_may_yet_leave_has_gone_on",
        file=FINISHING,
        old=" step + 1 or (other.step == step + 1 and other.phase not in _BEFORE_REDUCTION):\n",
        new=" step:\n",
        why="who computes the next step may yet find that there is none",
    ),
    Mutant(
        name="whose_script_ended_is_forgotten",
        file=FINISHING,
        old="    finished |= {worker: step for worker, step in left.items() if worker in workers}\n",
        new="",
        why="a script that ended in order has left its loop, too",
    ),
    Mutant(
        name="looks_at_reduced_steps_only",
        file=FINISHING,
        old=" step + 1 or (other.step == step + 1 and other.phase not in _BEFORE_REDUCTION):\n",
        new=" step + 1:\n",
        why="the step after the last one needs all: who waits in it waits for ever",
    ),
    Mutant(
        name="who_had_ended_has_ended",
        file=HEARING,
        old="        if message.generation == self._turn.generation:  # (who",
        new="        if True:  # (who",
        why="whoever had ended its loop in an older generation has not saved in the last one",
    ),
    Mutant(
        name="the_end_of_an_abandoned_lineage_counts",
        file=HEARING,
        old="        if record.lineage <= message.generation <= record.generation:\n"
        "            self._parts.ledger.settle(info.id, message.step)\n",
        new="        self._parts.ledger.settle(info.id, message.step)\n",
        why="steps that a roll-back has undone were not applied",
    ),
    Mutant(
        name="never_the_second_time",
        file=SUSPECTS,
        old="        self._tried = (frozenset(workers), committed)\n",
        new="        self._tried = None\n",
        why="who has tried in vain does not try a third time",
    ),
    Mutant(
        name="a_step_in_between_counts_for_nothing",
        file=SUSPECTS,
        old="        again = self._tried == (frozenset(workers), committed)\n",
        new="        again = self._tried is not None and self._tried[0] == frozenset(workers)\n",
        why="members that have got on were not in vain",
    ),
    Mutant(
        name="who_is_ahead_is_late",
        file=SUSPECTS,
        old="if places[worker] < min(timed_out)]",
        new="if places[worker] > min(timed_out)]",
        why="the others waited for who is behind",
    ),
    Mutant(
        name="who_waited_is_late",
        file=SUSPECTS,
        old="if places[worker] < min(timed_out)]",
        new="if places[worker] < max(timed_out)]",
        why="a complainer waited itself, be it for another collective",
    ),
    Mutant(
        name="strangers_cannot_be_reached",
        file=SUSPECTS,
        old="if len(pair) == 2 and pair <= set(nodes)}",
        new="if len(pair) == 2}",
        why="that a node which has left cannot be reached is nobody's fault",
    ),
    Mutant(
        name="all_are_to_blame",
        file=SUSPECTS,
        old="    return named if any(node_of(worker) not in named for worker in workers) else {}\n",
        new="    return named\n",
        why="somebody must stay",
    ),
    Mutant(
        name="an_older_store_is_taken_for_the_newest",
        file=RECORD_AGE,
        old="            newer = heard.generation > known and not self._confirmed\n",
        new="            newer = heard.term > record.term and not self._confirmed\n",
        why="a coordinator on a backup would stop or expel the workers of newer generations",
        quick=True,
    ),
    Mutant(
        name="a_second_generation_of_a_number_confirms_the_record",
        file=RECORD_AGE,
        old="            known = record.generation if heard.term == record.term else self._generation\n",
        new="            known = record.generation\n",
        why="an outdated coordinator that has begun a generation of its own would expel members of the first",
    ),
    Mutant(
        name="no_agent_is_awaited_before_the_first_generation",
        file=RECORD_AGE,
        old="        return unproven and self._turn.now < self._begun + self._lease_s\n",
        new="        return unproven and self._turn.now < self._begun\n",
        why="a node that comes first would begin the job a second time beside those that train",
    ),
)
