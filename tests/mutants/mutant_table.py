"""The mutants: what each makes wrong in one place of the source, and why that must not pass unnoticed.

`old` stands in the file exactly once; where the file changes, its mutants are changed with it.
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

COMMIT = "protocol/commit.py"
MESSAGES = "protocol/messages/worker.py"
WORKER = "coordination/worker/machine.py"
BOUNDARIES = "coordination/worker/boundaries.py"
GENERATIONS = "coordination/worker/generations.py"
COPY = "coordination/worker/copy.py"
ASSIGNMENT = "coordination/generations/assignment.py"
ADOPTING = "coordination/worker/unit/adopting.py"
SHARE = "coordination/worker/unit/share.py"
DECISIONS = "coordination/generations/decisions.py"
DECIDING = "coordination/generations/deciding.py"
LEDGER = "coordination/progress/ledger.py"
STANDINGS = "coordination/progress/standings.py"
PLANNER = "coordination/generations/planner.py"
JOINING = "coordination/generations/swap.py"
HEARING = "coordination/hearing.py"
STOPPING = "coordination/generations/stopping.py"
FAILURES = "coordination/failures/failures.py"
DEPARTURES = "coordination/nodes/departures.py"
ADMISSION = "coordination/nodes/admission.py"
ABSENCES = "coordination/nodes/absences.py"
COORDINATOR = "coordination/coordinator.py"
CHECKPOINTS = "coordination/progress/checkpoints.py"
PROGRESS = "coordination/progress/announced.py"
EXPERTS = "coordination/experts/placing.py"
BLOBS = "coordination/experts/blobs.py"
SUSPECTS = "coordination/failures/suspects.py"
TURN = "coordination/turn.py"
AGENT = "coordination/agent/machine.py"
NODE_STEPS = "coordination/agent/node_steps.py"
PLACE = "coordination/agent/place.py"

MUTANTS = (
    # ---- the worker ----
    Mutant(
        name="reports_too_early",
        file=BOUNDARIES,
        old="UNDER_WAY = frozenset({Phase.VOTED, ",
        new="UNDER_WAY = frozenset({",
        why="a report with the commit operation open is no promise: it may yet pass",
    ),
    Mutant(
        name="reports_within_apply",
        file=BOUNDARIES,
        old="UNDER_WAY = frozenset({Phase.VOTED, Phase.APPLYING, Phase.FORWARD, ",
        new="UNDER_WAY = frozenset({Phase.VOTED, ",
        why="the state changes after the report",
        quick=True,
    ),
    Mutant(
        name="breaks_its_promise",
        file=WORKER,
        old="        return self.generations.frozen\n",
        new="        return self.generations.frozen and self.phase is not Phase.PASSED\n",
        why="it applies after its report",
        quick=True,
    ),
    Mutant(
        name="recomputes_v",
        file=COPY,
        old="            self.passed = Passed(step=decision.applied, commit=decision.commit)\n",
        new="            commit = msgspec.structs.replace(decision.commit, grad_square=0.5)\n"
        "            self.passed = Passed(step=decision.applied, commit=commit)\n",
        why="FORWARD applies the recorded v, never another",
    ),
    Mutant(
        name="judges_for_itself",
        file=COPY,
        old="            self.passed = Passed(step=decision.applied, commit=decision.commit)\n",
        new="            commit = msgspec.structs.replace(decision.commit, nonfinite=0)\n"
        "            self.passed = Passed(step=decision.applied, commit=commit)\n",
        why="a step that v leaves out is left out by all",
    ),
    Mutant(
        name="computes_all",
        file=WORKER,
        old="        return self.generations.share(self.samples.micro_batches)\n",
        new="        return tuple(range(self.samples.micro_batches))\n",
        why="each micro-batch counts once",
        quick=True,
    ),
    Mutant(
        name="forgets_its_share",
        file=SHARE,
        old="            self.summed = []\n        self.assigned = assigned\n",
        new="            self.summed = []\n        self.assigned = None\n",
        why="after a failure the shares are the decided ones, not those of the ranks",
        quick=True,
    ),
    Mutant(
        name="keeps_its_share",
        file=WORKER,
        old="        self._share = Share()\n        self.wishes.passed(",
        new="        self._share.summed = []\n        self.wishes.passed(",
        why="an assignment is for the first step only: after a swap to more ranks parts would be missing or double",
    ),
    Mutant(
        name="keeps_gradients_of_another_step",
        file=WORKER,
        old="in (DecisionKind.REDO, DecisionKind.FORWARD) and self.applied == decision.applied\n",
        new="in (DecisionKind.REDO, DecisionKind.FORWARD)\n",
        why="gradients of an older state are no part of this step",
    ),
    Mutant(
        name="takes_a_torn_state",
        file=ADOPTING,
        old="        self._copy.spoil()\n        return True\n",
        new="        decision = self.generations.decision\n"
        "        self._copy.hold(decision.applied if decision else 1, None)\n        return True\n",
        why="a state is whole when its transfer has ended, not when it begins",
        quick=True,
    ),
    Mutant(
        name="torn_state_counts_as_fresh",
        file=ADOPTING,
        old="        self._copy.spoil()\n        return True\n",
        new="        return True\n",
        why="a half overwritten state is nobody's initial one",
    ),
    Mutant(
        name="ignores_the_terms_of_stops",
        file=GENERATIONS,
        old="        if order.term < self.term or order.generation < max(self.number, self._over) or repeated:\n",
        new="        if order.generation < max(self.number, self._over) or repeated:\n",
        why="a coordinator that was superseded must not stop anybody",
    ),
    Mutant(
        name="obeys_stops_of_old_generations",
        file=GENERATIONS,
        old="        if order.term < self.term or order.generation < max(self.number, self._over) or repeated:\n",
        new="        if order.term < self.term or repeated:\n",
        why="an old Stop freezes a worker for which nobody waits any more",
    ),
    Mutant(
        name="begins_an_old_generation",
        file=GENERATIONS,
        old="plan.generation <= self._newest",
        new="plan.generation < self._newest",
        why="a generation that was broken, or is in force, is not begun again",
    ),
    Mutant(
        name="swaps_although_stopped",
        file=GENERATIONS,
        old="        return Flag.SWAP in commit.flags and self.pending is not None and not self.frozen\n",
        new="        return Flag.SWAP in commit.flags and self.pending is not None\n",
        why="a failure voids a pending swap",
    ),
    Mutant(
        name="swaps_before_all_are_armed",
        file=COMMIT,
        old="strict=False) if raised == world)\n",
        new="strict=False) if raised)\n",
        why="a swap is for all or for none",
    ),
    Mutant(
        name="flags_before_its_group_stands",
        file=GENERATIONS,
        old="        return (Flag.SWAP,) if self.pending and self.pending.prepared and self.pending.armed else ()\n",
        new="        return (Flag.SWAP,) if self.pending is not None else ()\n",
        why="the flag says that the pending group stands here, and that the coordinator knows it of all",
    ),
    Mutant(
        name="applies_in_an_old_state",
        file=COPY,
        old="        return self.applied == decision.applied - 1\n",
        new="        return self.applied <= decision.applied\n",
        why="FORWARD is for those who stand right before the step",
    ),
    # ---- decisions ----
    Mutant(
        name="ignores_who_passed",
        file=DECISIONS,
        old="            known[report.passed.step] = report.passed.commit\n",
        new="            pass\n",
        why="what passed anywhere is applied by all, and its flags with it",
    ),
    Mutant(
        name="forward_is_not_inherited",
        file=DECISIONS,
        old="    if previous is not None and previous.kind is DecisionKind.FORWARD and previous.commit is not None:\n",
        new="    if False and previous is not None and previous.commit is not None:\n",
        why="a FORWARD stands until all have applied it: whoever applied it may be dead by now",
    ),
    Mutant(
        name="anybody_can_reach_the_target",
        file=DECISIONS,
        old="    return commit is not None and report.reduced is not None and same_lanes(report.reduced, commit)\n",
        new="    return commit is not None\n",
        why="without reduced gradients a worker cannot carry out FORWARD",
    ),
    Mutant(
        name="oldest_checkpoint",
        file=DECISIONS,
        old="        newest = checkpoints[-1]\n",
        new="        newest = checkpoints[0]\n",
        why="no more is lost than must be",
    ),
    Mutant(
        name="begins_anew_instead_of_giving_up",
        file=DECISIONS,
        old="    if committed == 0 or anew:\n",
        new="    if True or anew:\n",
        why="a job that has lost its state says so; it does not silently begin from its start",
    ),
    Mutant(
        name="keeps_reduced_gradients_of_half_a_world",
        file=DECIDING,
        old="        if stopping.stop is None or record.plan is None or stopping.awaits(self._absences.promised):\n",
        new="        if stopping.stop is None or record.plan is None or stopping.awaits(set()):\n",
        why="a node that may come back with what it has passed is waited for",
    ),
    Mutant(
        name="undone_steps_are_remembered",
        file=DECIDING,
        old="        self._ledger.undo_after(decision.applied)\n",
        new="",
        why="what an expelled worker applied alone is held against nobody",
    ),
    Mutant(
        name="what_passed_dies_with_the_coordinator",
        file=DECIDING,
        old="        self._turn.change(passed=self._ledger.unannounced)\n",
        new="        pass\n",
        why="a step that was made up from reports is persisted with the decision that rests on it",
    ),
    Mutant(
        name="newcomers_join_those_who_timed_out",
        file=DECIDING,
        old="        if closing or (parted and not lacks_slots(turn, self._config, list(reports))):\n",
        new="        if closing:\n",
        why="those who do not reach each other are put together in turns, for ever",
    ),
    Mutant(
        name="lineage_stays_after_a_roll_back",
        file=DECIDING,
        old="            turn.change(lineage=plan.generation)\n",
        new="            pass\n",
        why="what is said of the abandoned lineage must not count on the new one",
    ),
    # ---- what has been applied ----
    Mutant(
        name="commits_when_the_first_has_applied",
        file=STANDINGS,
        old="        return bool(self._members) and not self._behind\n",
        new="        return self._behind < len(self._members)\n",
        why="a step counts once the last member has applied it",
        quick=True,
    ),
    Mutant(
        name="nothing_is_filled_in",
        file=LEDGER,
        old="        self.give_up_to(top, global_batch)\n",
        new="        pass\n",
        why="a step whose witnesses are all dead is announced all the same",
    ),
    Mutant(
        name="fills_in_without_v",
        file=LEDGER,
        old="                self.expect(report.passed.step, report.passed.commit)\n",
        new="                pass\n",
        why="a report still knows the loss of its last step",
    ),
    Mutant(
        name="replicas_may_differ",
        file=LEDGER,
        old="        elif _bits(known.commit) != _bits(news.commit):\n",
        new="        elif False:\n",
        why="diverged replicas are never tolerated",
    ),
    Mutant(
        name="forgotten_members_hold_nobody_up",
        file=STANDINGS,
        old="        self._behind = len(self._members) - sum(",
        new="        self._behind = self._at.total() - sum(",
        why="who has not said that it has applied a step may not have",
    ),
    Mutant(
        name="applied_of_an_abandoned_lineage",
        file=HEARING,
        old="        if message.generation < record.lineage or message.generation > record.generation:\n",
        new="        if message.generation > record.generation:\n",
        why="after a roll-back what was applied before it is void",
    ),
    Mutant(
        name="entered_of_an_abandoned_lineage",
        file=HEARING,
        old="        if message.generation >= self._turn.record.lineage:\n",
        new="        if message.generation:\n",
        why="after a roll-back the state that somebody entered an older generation with is void",
    ),
    # ---- the pending group ----
    Mutant(
        name="arms_before_all_are_prepared",
        file=JOINING,
        old="        if not turn.members.prepared(pending):\n            return\n",
        new="",
        why="flags go up once every member's group stands",
    ),
    Mutant(
        name="voids_what_is_armed",
        file=FAILURES,
        old="        if self._joining.armed:\n            self._stopping.begin(since)\n        else:\n",
        new="        self._joining.armed = False\n        if True:\n",
        why="once armed some may have swapped: Void would leave them alone in the new generation",
    ),
    Mutant(
        name="a_restored_pending_group_is_not_armed",
        file=JOINING,
        old="        self.armed = turn.record.pending is not None\n",
        new="        self.armed = False\n",
        why="the coordinator before may have armed it",
    ),
    Mutant(
        name="promotes_while_stopping",
        file=HEARING,
        old="        if parts.stopping.stop is not None:  # a failure voids a pending swap, whoever has passed it\n",
        new="        if False:\n",
        why="a failure voids a pending swap, whoever has passed it",
    ),
    Mutant(
        name="receivers_push",
        file=PLANNER,
        old="    receivers = [worker for worker in roles if worker not in having] if holders else []\n",
        new="    receivers = []\n",
        why="whoever lacks the state is sent it",
        quick=True,
    ),
    Mutant(
        name="forward_with_other_experts",
        file=MESSAGES,
        old="        return self.result if self.applied == step - 1 else None\n",
        new="        return self.state if self.applied == step - 1 and self.result is not None else None\n",
        why="with the step that is still to be applied the experts move on",
    ),
    Mutant(
        name="assigns_parts_of_another_step",
        file=ASSIGNMENT,
        old="mine if applied == decision.applied else ()",
        new="mine",
        why="only gradients of the step that is done again are kept",
    ),
    # ---- stops and reports ----
    Mutant(
        name="never_stops",
        file=STOPPING,
        old="        if self.stop is not None or turn.record.plan is None:\n",
        new="        if True or turn.record.plan is None:\n",
        why="a broken generation is left",
        quick=True,
    ),
    Mutant(
        name="reports_for_an_older_stop",
        file=STOPPING,
        old=" and (report.term, report.generation) == (self.stop.term, self.stop.generation)\n",
        new="\n",
        why="a report says where a worker stands at this Stop, not at one before",
    ),
    Mutant(
        name="the_dead_are_awaited",
        file=STOPPING,
        old="        self.reports.pop(worker, None)\n        self.complaints.pop(worker, None)\n",
        new="        self.complaints.pop(worker, None)\n",
        why="what an expelled worker reported does not count",
    ),
    Mutant(
        name="pending_members_are_not_stopped",
        file=STOPPING,
        old="        turn.order_all(turn.planned, self.stop)\n",
        new="        turn.order_all(turn.record.plan.workers, self.stop)\n",
        why="those of the pending plan may have swapped already",
    ),
    # ---- who is there ----
    Mutant(
        name="lets_leavers_go_at_once",
        file=DEPARTURES,
        old="if one.owed and (safe or not self._turn.members.unfinished(plan)):",
        new="if one.owed:",
        why="who has left counts until the others have gone on: whoever takes its place may not have the state yet",
    ),
    Mutant(
        name="takes_back_anybody",
        file=ADMISSION,
        old="        if _was_expelled(self._turn.planned, hello):\n",
        new="        if False:\n",
        why="a node that was expelled in its absence comes back with fresh workers only",
        quick=True,
    ),
    Mutant(
        name="hears_the_expelled",
        file="coordination/nodes/membership.py",
        old="        self._by_connection.pop(node.connection, None)\n",
        new="        pass\n",
        why="what has left is forgotten: its messages find no addressee",
    ),
    Mutant(
        name="superseded_coordinators_let_in",
        file=ADMISSION,
        old="        if hello.term > turn.record.term and not self._record_age.raise_term(hello):\n",
        new="        if False:\n",
        why="an agent that knows a newer coordinator must look for that one",
    ),
    Mutant(
        name="leases_run_while_the_coordinator_is_away",
        file=COORDINATOR,
        old="        self.members.renew_leases(self.turn.now)\n        self.parts.absences.pause_over()\n",
        new="",
        why="nobody is judged by what was not read in time",
    ),
    Mutant(
        name="leases_never_run_out",
        file="coordination/nodes/membership.py",
        old="        return [node for node in silent if now - node.seen > min(lease_s, node.lease.lasts_s)]\n",
        new="        return []\n",
        why="a node that falls silent is lost",
    ),
    Mutant(
        name="absent_nodes_are_awaited_for_ever",
        file=ABSENCES,
        old="        before = self._turn.now - lease_s\n",
        new="        before = self._turn.now - 1e9\n",
        why="who does not come back after a coordinator's crash is lost after a lease",
    ),
    Mutant(
        name="silent_workers_are_awaited_for_ever",
        file=STOPPING,
        old="        if self.stop is None or self._turn.now - self._since <= timeout_s:\n",
        new="        if True:\n",
        why="an agent may live whose worker does not answer",
    ),
    # ---- what is written, and when ----
    Mutant(
        name="loses_its_outbox",
        file=COORDINATOR,
        old="        return [*(Emit(event) for event in self._lost), *turn.flush()]\n",
        new="        turn.seq -= len(self._lost)\n        return turn.flush()\n",
        why="what the record says was announced is announced after a crash",
        quick=True,
    ),
    Mutant(
        name="announces_before_it_writes",
        file=TURN,
        old="        out += [Emit(event) for event in self._events]\n",
        new="        out = [*(Emit(event) for event in self._events), *out]\n",
        why="nothing is announced that a crash can make untrue",
    ),
    Mutant(
        name="terms_do_not_grow",
        file=COORDINATOR,
        old="        turn.change(term=self.record.term + 1, run_since=since or now, born=",
        new="        turn.change(term=max(1, self.record.term), run_since=since or now, born=",
        why="terms tell coordinators from each other",
        quick=True,
    ),
    # ---- checkpoints ----
    Mutant(
        name="checkpoints_of_some_parts",
        file=CHECKPOINTS,
        old="        return len(self.parts) == self.count\n",
        new="        return bool(self.parts)\n",
        why="whoever is no member may have passed alone: only that all have a part of it proves a step",
    ),
    Mutant(
        name="checkpoints_of_abandoned_steps",
        file=CHECKPOINTS,
        old="        return known and on_lineage(record, message)\n",
        new="        return known\n",
        why="what was written on an abandoned lineage never counts",
    ),
    Mutant(
        name="checkpoints_of_a_later_term",
        file=CHECKPOINTS,
        old="message.term <= record.term and message.generation",
        new="message.generation",
        why="a coordinator with an older store must not count what a newer one has had written",
    ),
    Mutant(
        name="checkpoints_of_steps_to_come",
        file=CHECKPOINTS,
        old="            if one.complete and name.step <= committed:\n",
        new="            if one.complete:\n",
        why="a checkpoint of a step counts once the step does",
    ),
    # ---- the agent ----
    Mutant(
        name="agent_forgets_what_was_applied",
        file=NODE_STEPS,
        old="            self._kept.note(message, now)\n",
        new="            pass\n",
        why="a coordinator that comes back must hear of the steps that the journal does not have",
    ),
    Mutant(
        name="agent_forgets_reports",
        file=PLACE,
        old="                if isinstance(kept, _GENERATION_BOUND) and kept.generation < message.generation:\n",
        new="                if isinstance(kept, _GENERATION_BOUND):\n",
        why="what is said of the generation that is entered, or of a later one, still counts",
    ),
    Mutant(
        name="agent_forgets_too_much_after_a_roll_back",
        file=NODE_STEPS,
        old="        self.committed = min(self.committed, step)\n",
        new="        pass\n",
        why="after a roll-back steps are committed once more, and told of once more",
    ),
    Mutant(
        name="agent_follows_older_coordinators",
        file=AGENT,
        old="        if welcome.term < self.term:\n",
        new="        if False:\n",
        why="a coordinator that was superseded leads nobody",
    ),
    Mutant(
        name="agent_passes_on_what_an_older_coordinator_says",
        file=AGENT,
        old="        if self._welcome is None or not comes_from(order, self.term):\n",
        new="        if self._welcome is None:\n",
        why="orders of an older term find no addressee",
    ),
    Mutant(
        name="agent_takes_workers_that_were_begun_for_fresh",
        file=PLACE,
        old="            self.keep(Begun(worker=self.worker, generation=order.plan.generation))\n",
        new="            pass\n",
        why="a worker whose listener gets no turn is in the generation all the same",
    ),
    Mutant(
        name="agent_tells_of_no_ends_again",
        file=PLACE,
        old="    gone = [gone for place in places if (gone := place.tell_who_is_gone()) is not None]\n",
        new="    gone: list[WorkerDown] = []\n",
        why="a worker may end while there is no coordinator",
    ),
    Mutant(
        name="agent_keeps_what_the_dead_said",
        file=AGENT,
        old='        place.refill("")\n        # Only its end',
        new="        # Only its end",
        why="what a worker said before its end would look like a worker come back",
    ),
    Mutant(
        name="agent_lets_stopped_workers_be",
        file=AGENT,
        old="            if place.looked_at(now, stopped=place.worker in stopped) > lease_s:\n",
        new="            if False:\n",
        why="a worker that is stopped for a lease is a failure that only its agent can see",
    ),
    Mutant(
        name="agent_comes_back_as_it_was",
        file=AGENT,
        old="        fresh = [self._fill(place, index) for index, place in enumerate(self._places)]\n",
        new="        fresh = list[AgentInstruction]()\n",
        why="who was expelled comes back with new workers",
    ),
    # ---- progress, experts, suspects ----
    Mutant(
        name="finished_before_all_are",
        file=PROGRESS,
        old="        return not self._turn.members.unfinished(plan) and self.ledger.all_at_committed\n",
        new="        return self.ledger.all_at_committed\n",
        why="a job is done when all have ended their loops, at the committed step",
        quick=True,
    ),
    Mutant(
        name="lost_experts_are_not_missed",
        file=BLOBS,
        old="    return [divmod(int(cell), shape.experts) for cell in np.flatnonzero(live == 0)]\n",
        new="    return []\n",
        why="an expert without a live copy takes a checkpoint",
    ),
    Mutant(
        name="experts_of_the_other_ranks",
        file=EXPERTS,
        old="    for worker, blob in zip(touched.tolist(), blobs, strict=True):\n",
        new="    for worker, blob in enumerate(blobs):\n",
        why="what is given to a worker comes to that one",
    ),
    Mutant(
        name="a_loss_is_not_mended",
        file="planning/keeping/repair.py",
        old="    for layer in np.flatnonzero((hosts < threshold).any(axis=1)):\n",
        new="    for layer in np.flatnonzero((hosts < 0).any(axis=1)):\n",
        why="what is left of a placement keeps the guarantee of f",
    ),
    Mutant(
        name="the_same_members_again_after_a_time_out",
        file=SUSPECTS,
        old="        late = any(complaint.timed_out or complaint.unreachable for complaint in complaints.values())\n",
        new="        late = False\n",
        why="after a time-out the same members are never put together again",
    ),
    Mutant(
        name="the_same_members_for_ever",
        file=SUSPECTS,
        old="        if not (late or again):\n",
        new="        if True:\n",
        why="who has tried in vain twice does not try again",
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
