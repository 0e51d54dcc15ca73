"""The step from an interrupted generation (or none) to the next: collect all reports, decide, write, announce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from holdfast.coordination.failures.budget import WINDOW_S, Budget
from holdfast.coordination.failures.detections import node_hung, replica_differs
from holdfast.coordination.failures.escalation import MAX_RETRIES
from holdfast.coordination.failures.mismatch import REPLACEMENTS, Mismatch, find_mismatch
from holdfast.coordination.failures.suspects import (
    TRANSFER_TRIES,
    StateTransfers,
    Suspects,
    find_failed_transfers,
    find_lacking_members,
    find_last_report,
    select_fallback,
    unless_all,
)
from holdfast.coordination.generations.announcing import announce_generation, warn_of_one_replica
from holdfast.coordination.generations.assignment import count_kept, first_assignment, kept_by_units
from holdfast.coordination.generations.configuration_check import send_away, wanted_places
from holdfast.coordination.generations.decisions import (
    NothingLeft,
    Verdict,
    decide,
    prefer_snapshot,
    what_counts,
    without_state,
)
from holdfast.coordination.generations.planner import (
    fill_same_ranks,
    find_lost,
    held_experts,
    lacks_slots,
    plan_generation,
)
from holdfast.coordination.generations.refused_results import refusal_after, refused_again, refused_anew
from holdfast.coordination.generations.same_data import ADVICE, difference, split_by_data
from holdfast.coordination.grants import restarts_from_zero
from holdfast.coordination.job.admission import send_away_all
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.job.finishing import TOGETHER, add_stop_flag, completed_without_state, find_early_leaver
from holdfast.coordination.membership import Node, WorkerInfo
from holdfast.coordination.progress.recovery_cost import FAILURE, LAYOUT, SAVE
from holdfast.coordination.roles import every_role, only_whole
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.planning import Shortage
from holdfast.protocol.events import CorruptionFound, NodeRefused, RolledBack
from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.record import MAX_BASES, Refusal
from holdfast.protocol.state import SnapshotSource


class GenerationDecider:
    """Decides how the job continues. It is called after every input and acts only when all reports are in."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._transaction, self._config = context.transaction, context.config
        self._progress = context.progress
        self._ledger = context.ledger
        self._interruption = context.interruption
        self._failures = context.failures
        self._disconnected = context.disconnected
        self._standbys, self._replacements = context.standbys, context.replacements
        self._draining = context.draining
        self._checkpoints, self._evaluations = context.checkpoints, context.evaluations
        self._snapshots, self._layouts, self._failing = context.snapshots, context.layouts, context.failing
        self._loads, self._rendezvous = context.loads, context.rendezvous
        self._job_end, self._closing = context.job_end, context.closing
        self._script_errors, self._rank_hold = context.script_errors, context.rank_hold
        self._plan_distribution, self._newcomers = context.plan_distribution, context.newcomers
        self._record_age, self._start_probes = context.record_age, context.start_probes
        self._suspects = Suspects()
        #: Restarts of all workers because a step was refused.
        self._refusals = Budget()
        #: Replacements of workers that differ from the others, by likely cause.
        self._mismatches: defaultdict[str, Budget] = defaultdict(Budget)
        #: The generation in which workers differed last.
        self._mismatch_generation = 0

    def decide(self) -> None:
        """Decide how an interrupted generation continues, once all members reported, and begin the next generation.

        Before that, end the job if a member left its loop early or a step is refused again, replace workers that
        differ, and remove the nodes that made collectives fail. Return without a decision while reports, standbys or
        expert slots are missing.
        """
        transaction, record, stopping = self._transaction, self._transaction.record, self._interruption
        if stopping.stop is None or record.plan is None or stopping.awaits(self._disconnected.promised):
            return
        if alone := find_early_leaver(record.plan.workers, stopping.reports, transaction.members.left):
            gone, step, waiting = alone
            gone, waiting = transaction.place_of(gone), transaction.place_of(waiting)
            why = f"{gone} left its loop after step {step} while {waiting} went on"
            self._job_end.fail_job(f"{why}: {TOGETHER}")
            return
        if self._catch_up():
            return
        mismatch = find_mismatch(record.plan.workers, stopping.reports, record.plan.places)
        if mismatch is not None and not self._replace_minority(mismatch):
            return
        parted = mismatch is None and self._find_culprits(record.plan)
        if record.refusal is not None and refused_again(record.refusal, stopping.reports.values()):
            self._closing.fail(f"{stopping.refused}, in an attempt too that had kept nothing from before")
            if self._job_end.over is not None or transaction.record.plan is None:
                return
        closing = self._closing.under_way
        if not closing:
            self._draining.assign_lost_ranks()
            self._replacements.replace_lost_nodes(record.plan)
            if self._replacements.count_awaited_nodes(record.plan):
                return
        if lacks_slots(transaction, self._config, retained=True):
            if closing:
                self._closing.end()  # A closing job does not wait for more nodes.
            return
        self._choose_next_generation(parted=parted)

    def _replace_minority(self, mismatch: Mismatch) -> bool:
        """Replace the nodes that differ from the majority, or fail the job; return whether it goes on.

        The job fails if no majority exists, or after too many replacements for the same likely cause. Of two workers,
        the one that has received its state is replaced first. If the other one was wrong, it then differs from the
        replacement: that counts as one fault, not two. A job that ends here is not saved, because the correct members
        are unknown.
        """
        transaction, step, why, cause = self._transaction, mismatch.step, mismatch.why, mismatch.likely_cause
        # A node that reconnects with its old report is not another mismatch.
        if transaction.generation != self._mismatch_generation:
            self._mismatch_generation = transaction.generation
            self._mismatches[cause].count_try(transaction.now)
            transaction.emit(CorruptionFound, step=step, what=mismatch.what, detail=why, likely_cause=cause)
        tries, minority = self._mismatches[cause].tries, mismatch.minority
        if minority and tries <= REPLACEMENTS[cause]:
            self._failures.handle(*(replica_differs(node, f"step {step}: {why}", transaction.now) for node in minority))
            return True
        again = f" ({tries} times in {WINDOW_S:.0f} s)" if tries > 1 else ""
        self._job_end.fail_job(f"workers differ at step {step}{again}: {why}")
        return False

    def _choose_next_generation(self, *, parted: bool) -> None:
        """Choose how the next generation continues (the verdict) and its members, and execute the verdict.

        Workers with script errors are replaced, and draining members released, if the others have all their state. If
        only workers with script errors have the newest state, it is saved, and all workers restart. If the recovery
        always restarts all workers, they are replaced without a verdict; after too many refused steps the job closes as
        failed. Return without a verdict, too, while ranks are held for new processes, or expert slots are missing.

        Args:
            parted: whether the members with reports go on without newcomers, because they cannot all reach each other.
        """
        transaction, stopping, closing = self._transaction, self._interruption, self._closing.under_way
        raisers = [] if closing else self._script_errors.find_failed(stopping.reports)
        if raisers and self._lack_slots_without(raisers):
            return
        if self._rank_hold.waits and not closing:
            return  # Wait for the processes that will get these ranks.
        self._rank_hold.stop_waiting()
        refused = self._record_new_refusal()
        if self._config.spec.recovery.restarts_all and not closing:
            tries = self._refusals.count_try(transaction.now) if refused else 0
            if tries <= MAX_RETRIES:
                stopping.end()
                self._restart_workers()
                return
            self._closing.fail(f"{stopping.refused}; {tries} times in {WINDOW_S:.0f} s steps were refused")
            closing = True
        reports = self._only_complete_groups(what_counts(transaction.record, stopping.collect_reports()))
        arrivals = [info.id for info in transaction.members.workers() if info.id not in reports]
        if closing or (parted and not lacks_slots(transaction, self._config, list(reports))):
            # These members continue alone, and the others join during training. Otherwise members that cannot reach
            # each other would be grouped again and again.
            arrivals = [worker for worker in self._replacements.workers if worker not in reports and not closing]
        verdict = self._decide_from(reports, arrivals)
        if raisers:
            without = self._without_holders(raisers, verdict, reports) or self._decide_without(
                raisers, reports, arrivals
            )
            if without is None:
                without = self._repeat_rollback(verdict, arrivals)
            if without is None and isinstance(verdict, Verdict) and verdict.decision.applied:
                why = f"there is no other live copy of step {verdict.decision.applied}"
                # Steps that all members applied count, even if the job ends here.
                self._progress.announce_applied_steps()
                self._closing.renew(self._failures.explain(why))
                arrivals = []
            else:
                self._rank_hold.hold_ranks(raisers)
                self._script_errors.release(raisers)
                if self._rank_hold.waits or lacks_slots(transaction, self._config, retained=True):
                    return  # Wait for the processes that replace them.
                verdict = without or self._decide_from({}, arrivals)
        elif not closing and (leavers := self._draining.find_leaving_workers(reports)):
            verdict, reports, arrivals = self._release_draining(leavers, verdict, reports, arrivals)
        stopping.end()
        if self._job_end.over is None:
            workers = only_whole(transaction.members.live([*reports, *arrivals]), transaction.record.layout.places)
            self._execute(verdict, workers, reports)

    def _record_new_refusal(self) -> bool:
        """Record a step that members refused for wrong samples, so that the next generation recomputes it completely.

        Returns:
            Whether there is one that was not recorded before; then `corruption_found` is emitted.
        """
        transaction, stopping = self._transaction, self._interruption
        step = refused_anew(transaction.record.refusal, stopping.reports.values())
        if step:
            transaction.emit(CorruptionFound, step=step, what="samples", detail=stopping.refused)
            transaction.change(refusal=Refusal(step=step, clean_from=transaction.record.generation + 1))
        return step > 0

    def _decide_from(self, reports: Mapping[str, Report], arrivals: list[str]) -> Verdict | NothingLeft:
        """Return how the job continues from these reports and the saved states.

        Args:
            reports: the reports of members that may keep their state.
            arrivals: workers without a report, which may have the initial state.
        """
        record, committed = self._transaction.record, self._ledger.committed
        verdict = decide(
            record.decision,
            committed,
            list(reports.values()),
            record.checkpoints,
            self._standbys.fresh(arrivals),
            lost=partial(find_lost, record, reports=reports) if record.expert_shape is not None else None,
            away=self._snapshots.lost_experts,
            anew=self._may_restart,
            unreadable=record.unreadable,
            places=record.layout.places,
        )
        return self._prefer_snapshot(verdict)

    def _only_complete_groups(self, reports: dict[str, Report]) -> dict[str, Report]:
        """Return the reports of complete replica groups: all workers of the group have reported.

        When the job closes, groups with a script error are left out if the others can save live state: workers of those
        groups wait in the middle of a micro-batch and can no longer save.
        """
        places = self._transaction.record.layout.places
        reports = {worker: reports[worker] for worker in only_whole(list(reports), places)}
        if places == 1 or not self._closing.under_way or not (stuck := set(self._script_errors.find_failed(reports))):
            return reports
        others = {worker: report for worker, report in reports.items() if worker not in stuck}
        verdict = self._decide_from(others, [])
        return others if self._leads_to_unsaved(verdict) else reports

    def _prefer_snapshot(self, verdict: Verdict | NothingLeft) -> Verdict | NothingLeft:
        """Return the verdict, but with a newer snapshot instead of a checkpoint as the target of a rollback, if there
        is one.

        A closing job uses no snapshot, except the stashed state of a layout change; nor does a job that restarts all
        workers.
        """
        ends = self._closing.under_way and not self._transaction.record.stashed_step
        if ends or self._config.spec.recovery.restarts_all:
            return verdict
        committed = self._ledger.committed
        self._snapshots.update(committed, at_once=True)
        return prefer_snapshot(verdict, self._snapshots.find_newest(committed), committed)

    def _lack_slots_without(self, raisers: list[str]) -> bool:
        """Release the workers with script errors, for replacement, if the other members lack expert slots without them.

        Return whether they were released. False without static experts, and if there are no other members.
        """
        transaction, gone = self._transaction, set(raisers)
        others = [info.id for info in transaction.members.workers() if info.id not in gone]
        if not others or not self._config.spec.experiments.static_experts:
            # If each expert lives on its own node, the remaining members have room for all.
            return False
        if not lacks_slots(transaction, self._config, others):
            return False
        self._script_errors.release(raisers)
        return True

    def _without_holders(
        self, raisers: list[str], verdict: Verdict | NothingLeft, reports: Mapping[str, Report]
    ) -> Verdict | NothingLeft | None:
        """Return the verdict without the given workers as holders of the state, or None if a role or expert would have
        no holder.

        A verdict without holders is returned unchanged.
        """
        if not isinstance(verdict, Verdict) or not verdict.holders:
            return verdict
        holders = tuple(worker for worker in verdict.holders if worker not in raisers)
        others = replace(verdict, holders=holders)
        whole = every_role(holders, self._transaction.record.layout.places)
        return None if not whole or find_lost(self._transaction.record, others, reports) else others

    def _decide_without(self, raisers: list[str], reports: Mapping[str, Report], arrivals: list[str]) -> Verdict | None:
        """Return a verdict that treats the members `raisers` as failed, or None if the others have no live state to go
        on from.

        Nothing is announced here: the others may not have applied the newest step of `raisers`.
        """
        others = {worker: report for worker, report in reports.items() if worker not in raisers}
        verdict = self._decide_from(others, arrivals) if others else None
        if isinstance(verdict, Verdict) and verdict.decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD):
            return verdict
        return None

    def _repeat_rollback(self, verdict: Verdict | NothingLeft, arrivals: list[str]) -> Verdict | None:
        """Return the previous rollback once more, if `verdict` is a rollback to its step; else None.

        Also None if nothing is left, or if the saved states alone would lead to another step. The state of that step is
        readable elsewhere, so neither a save nor a full restart is needed.

        Args:
            verdict: how the job would continue with the reported states.
            arrivals: workers without a report.
        """
        last, again = self._transaction.record.decision, self._decide_from({}, arrivals)
        if isinstance(verdict, NothingLeft) or isinstance(again, NothingLeft) or last is None:
            return None
        decided = last, again.decision
        same = all(one.kind is DecisionKind.ROLLBACK and one.applied == verdict.decision.applied for one in decided)
        return again if same else None

    def _release_draining(
        self, leavers: list[str], verdict: Verdict | NothingLeft, reports: dict[str, Report], arrivals: list[str]
    ) -> tuple[Verdict | NothingLeft, dict[str, Report], list[str]]:
        """Release draining members if the others have all their state; return the new verdict, reports and arrivals.

        Warm standbys take their ranks in the same generation. Members that the others need for all experts stay. If
        none can go yet, postpone that, and return the arguments unchanged.

        Args:
            leavers: the workers of draining nodes.
        """
        here = self._transaction.members.live([*reports, *arrivals])
        leavers = self._draining.select_dispensable(leavers, here)
        names = set(map(node_of, leavers))
        # A new process on these nodes may be the only worker with an initial state.
        theirs = (
            [worker for worker in verdict.holders if node_of(worker) in names] if isinstance(verdict, Verdict) else []
        )
        without = self._without_holders([*leavers, *theirs], verdict, reports)
        if not leavers or not isinstance(without, Verdict):
            self._draining.postpone()
            return verdict, reports, arrivals
        taking = self._draining.retain(leavers, without.decision.applied)
        left = {worker: report for worker, report in reports.items() if worker not in leavers}
        come = (worker for worker in dict.fromkeys((*arrivals, *taking)) if worker not in left)
        come = [worker for worker in come if node_of(worker) not in names]
        return without, left, come

    def _catch_up(self) -> bool:
        """Announce part of an outage's steps, if one record cannot hold them all; return whether some were announced.

        All members have reported them. The next call announces the next part.
        """
        reports = self._interruption.reports
        self._ledger.add_final_reports(reports.values(), self._transaction.record.global_batch)
        whole = [worker for worker, report in reports.items() if report.applied is not None]
        return self._progress.catch_up(whole)

    def start(self) -> None:
        """Begin the first generation, or the first after all workers were lost, from saved or initial state.

        Return without effect if a generation is in force, if too few nodes are complete or expert slots are missing,
        while probes, replaced workers or agents with newer state are awaited, or if the workers' data differs.
        """
        transaction, record = self._transaction, self._transaction.record
        if record.plan is not None or self._interruption.stop is not None or self._disconnected.replacing:
            return
        if self._snapshots.is_awaiting_keepers or self._record_age.awaits_agents:
            return
        self._replacements.promote_to_restart()
        complete, needed = (
            transaction.members.complete_nodes,
            1 if self._closing.under_way else self._replacements.needed,
        )
        if (
            complete < needed
            or self._newcomers.gathering
            or (record.generation and lacks_slots(transaction, self._config))
        ):
            return
        if self._start_probes.are_open or not self._have_same_data():
            return
        workers = [info.id for info in transaction.members.workers()]
        known, fresh = record.checkpoints, self._standbys.fresh(workers)
        anew, unreadable, places = self._may_restart, record.unreadable, record.layout.places
        committed, away = self._ledger.committed, self._snapshots.lost_experts
        verdict = without_state(committed, known, fresh, away, anew=anew, unreadable=unreadable, places=places)
        self._execute(self._prefer_snapshot(verdict), workers, {})

    def _have_same_data(self) -> bool:
        """Compare the data of all workers before the first plan of a run; return whether the job may begin.

        The majority has the job's data, which is recorded, and the nodes of other workers are refused. Without a
        majority the job fails. If nodes were refused, return False: the job waits for others. True at once if the data
        is already recorded.
        """
        transaction, infos = self._transaction, list(self._transaction.members.workers())
        if transaction.record.data:
            return True  # Workers were compared with it as they came.
        groups = split_by_data([(info, info.attach.data) for info in infos])
        if not groups:
            return True
        most, *others = groups
        if others and 2 * len(most) <= sum(map(len, groups)):
            self._job_end.fail_job(self._describe_data_conflict(most[0], others[0][0]), EXIT_BAD_INPUT)
            return False
        transaction.change(data=most[0].attach.data)
        for name in {node_of(info.id) for group in others for info in group}:
            self._refuse(transaction.members.nodes[name])
        return not others

    def _describe_data_conflict(self, one: WorkerInfo, other: WorkerInfo) -> str:
        """Return the error message for two workers with different data, neither of which is in a majority."""
        where = self._transaction.place_of(one.id), self._transaction.place_of(other.id)
        what = difference(other.attach.data, one.attach.data, f"that of {where[0]}")
        return f"the nodes have different data: on {where[1]} {what}; {ADVICE}"

    def _refuse(self, node: Node) -> None:
        """Send away a node that has other data than the majority, report it, and tell the pool."""
        job, context = self._transaction.record.data, self._context
        what = next(filter(None, (difference(info.attach.data, job) for info in node.workers.values())), "")
        why = f"node {node.name} does not fit the job: {what}: {ADVICE}"
        context.last_refusal = send_away(self._transaction, node, why)
        self._transaction.emit(NodeRefused, node=node.name, why=why, address=node.address)
        context.pool_client.refuse_node(node.name, why)
        context.draining.forget(node)

    @property
    def _may_restart(self) -> bool:
        """Whether the job may restart from step 0 if no state and no checkpoint is left.

        It may if all workers restart anyway, if it was suspended without a saved state, or if it saves and no
        checkpoint is unreadable.
        """
        record, restarts = self._transaction.record, self._config.spec.recovery.restarts_all
        return restarts or restarts_from_zero(record.held) or (record.saves and not record.unreadable)

    def _find_culprits(self, plan: GenerationPlan) -> bool:
        """Find the node that made collectives fail if no member is lost, and handle it as hung.

        Without evidence, retry with the same members; after too many tries, the node to which they were charged goes.
        Failures that something else explains are ignored: a lost member, a script error, a refused step, or the end of
        the job.

        Returns:
            Whether the members go on without newcomers: the cause is known, or a state transfer failed.
        """
        members, reports, complaints = plan.workers, self._interruption.reports, dict(self._interruption.complaints)
        self._interruption.complaints.clear()
        # A worker that raised an error before a saving generation takes part in that generation like the others.
        raised = not plan.last and self._script_errors.find_failed(members)
        if not complaints or not set(members) <= set(reports) or raised:
            # A member is lost or has a script error: that is the cause.
            return False
        if any(report.refused or report.ending for report in reports.values()):
            # All members contributed. One refused the step result, or its script error will be reported.
            return False
        if self._closing.under_way and not any(complaint.timed_out for complaint in complaints.values()):
            # Members that are told to stop leave groups that others still build.
            return False
        now, first = self._transaction.now, next(iter(complaints.values()))
        owing = self._rendezvous.list_missing_members(plan)
        accused = unless_all(members, self._failures.find_self_accused(complaints.values()))
        transfers = self._collect_transfers(plan, complaints)
        named = accused or self._suspects.find_suspects(
            members, reports, complaints, self._ledger.committed, owing, transfers
        )
        if not named:
            node = select_fallback(members, complaints, transfers)
            if not self._failures.retry_collective(first, reports[first.worker], node):
                named = unless_all(members, {node: f"its collectives failed repeatedly, last error: {first.detail}"})
        self._failures.handle(
            *(node_hung(find_last_report(node, reports.values()), why, now) for node, why in named.items())
        )
        return bool(named or transfers.failed)

    def _collect_transfers(self, plan: GenerationPlan, complaints: Mapping[str, Complaint]) -> StateTransfers:
        """Return the evidence about the stopped generation's state transfers, and record by node which failed or
        succeeded.

        It holds the failed transfers, the members that still lack the state (none while it is the initial one), the
        receivers with too many tries, and the suspect nodes.
        """
        record, reports, history = (
            self._transaction.record,
            self._interruption.reports,
            self._transaction.members.transfers,
        )
        decision, failed = record.decision, find_failed_transfers(plan, complaints.values())
        lacking = find_lacking_members(plan, reports, decision.applied if decision is not None else 0)
        for receiver in plan.sources:
            if receiver not in lacking and receiver not in failed:
                history.note_receipt(node_of(receiver), map(node_of, plan.senders(receiver)))
        by_node: dict[str, set[str]] = {}
        for receiver, senders in failed.items():
            by_node.setdefault(node_of(receiver), set()).update(map(node_of, senders))
        for node, senders in by_node.items():
            history.note_failure(node, senders)
        nodes = dict.fromkeys(map(node_of, plan.workers))
        initial = decision is None or decision.applied == 0
        return StateTransfers(
            # Every worker can create the initial state, so a member that has it does not count more than another.
            lacking=frozenset() if initial else lacking,
            failed=failed,
            exhausted={receiver for receiver in failed if history.tries(node_of(receiver)) >= TRANSFER_TRIES},
            suspects=[node for node in nodes if history.is_suspect(node)],
            can_spare=self._can_spare,
        )

    def _can_spare(self, node: str) -> bool:
        """Return whether the others could continue without loss of state if a node left; True if no state is live."""
        reports = self._only_complete_groups(
            what_counts(self._transaction.record, self._interruption.collect_reports())
        )
        verdict = self._decide_from(reports, [])
        if not isinstance(verdict, Verdict) or not verdict.holders:
            return True
        return (
            self._without_holders([worker for worker in reports if node_of(worker) == node], verdict, reports)
            is not None
        )

    def _execute(self, verdict: Verdict | NothingLeft, workers: list[str], reports: Mapping[str, Report]) -> None:
        """Carry out a verdict: end or finish the job, or begin a generation, after a rollback if it needs one.

        A closing job ends if nothing is left to save, and a job fails if no state is left. If no worker is available,
        or none has a whole initial state, only the decision is recorded, and `start` continues later.

        Args:
            workers: the possible members of the generation, in complete replica groups.
            reports: the reports of members that keep their state.
        """
        if self._closing.under_way and not self._leads_to_unsaved(verdict):
            if not self._closing.renews or isinstance(verdict, NothingLeft):
                self._closing.end(_describe_loss(verdict, self._ledger.committed))
                return
            # The newest state is lost. It was needed only to continue, so go on from an older one.
            self._closing.on_renewed()
            verdict = self._prefer_snapshot(verdict)
        if completed_without_state(verdict, self._transaction, self._progress):
            if why := self._progress.skipped_too_often(self._config.spec.recovery.max_skipped_steps):
                self._job_end.fail_job(why)
            else:
                self._job_end.finish_job()
            return
        if isinstance(verdict, NothingLeft):
            self._job_end.fail_job(self._failures.explain(verdict.why))
            return
        transaction, decision = self._transaction, verdict.decision
        if decision.kind is DecisionKind.START and not verdict.holders:
            send_away_all(transaction, "no worker's initial state is whole")
            workers = []
        if not workers:
            # No worker is available. `start` decides again later, because a new node may know of newer state.
            transaction.change(plan=None, pending=None, decision=decision, passed=())
            return
        reason = self._interruption.reason if transaction.record.plan else "start"
        if self._closing.under_way:
            reason = SAVE
        if decision.kind is DecisionKind.ROLLBACK or (decision.kind is DecisionKind.START and self._ledger.committed):
            reason = self._roll_back(verdict)
        self._ledger.undo_after(decision.applied)
        self._begin_generation(workers, verdict, reports, reason)

    def _leads_to_unsaved(self, verdict: Verdict | NothingLeft) -> bool:
        """Return whether a verdict leads to a state that may not be in a checkpoint yet; False if nothing is left.

        This is a live state after step 0, or the stash of a layout change.
        """
        if not isinstance(verdict, Verdict) or self._layouts.is_from_stash(verdict.decision):
            return isinstance(verdict, Verdict)
        return verdict.decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD) and verdict.decision.applied > 0

    def _roll_back(self, verdict: Verdict) -> str:
        """Discard all progress after the decided step, and emit `rolled_back` unless the source is a layout change's
        stash.

        Returns:
            The reason of the next generation: from a stash `LAYOUT`, or `SAVE` if the job closes; else "rollback", or
                "start" if the job only resumes.
        """
        transaction = self._transaction
        known = transaction.record.plan is not None or (self._ledger.committed > 0 and not transaction.begins_again)
        why = verdict.why if known else "the job resumes from its checkpoint"
        why = "all workers were started again" if self._progress.restarting else why
        self._ledger.reset(verdict.decision.applied)
        self._checkpoints.on_rollback(to_snapshot=isinstance(verdict.decision.source, SnapshotSource))
        self._evaluations.on_rollback(verdict.decision.applied)
        if self._layouts.is_from_stash(verdict.decision):
            return SAVE if self._closing.under_way else LAYOUT
        self._transaction.emit(RolledBack, to_step=verdict.decision.applied, why=why)
        return "rollback" if known else "start"

    def restart_from_save(self) -> None:
        """Restart all workers from the state that the closing job has just saved, and no longer close the job.

        If the current layout is too large, they start under another one.
        """
        self._closing.on_renewed()
        if not self._failing.leave_too_large():
            self._restart_workers()

    def _restart_workers(self) -> None:
        """Drop the plan, release draining nodes, and replace all workers. `start` continues from saved state once they
        are complete.
        """
        self._draining.release_all()
        workers = self._transaction.planned
        self._progress.mark_restart()
        self._transaction.change(plan=None, pending=None, decision=None, passed=())
        self._disconnected.replace_workers(map(node_of, workers), "all workers are started again")

    def _begin_generation(
        self, workers: list[str], verdict: Verdict, reports: Mapping[str, Report], reason: str
    ) -> None:
        """Plan the next generation, write it to the record, announce it and send it to its members.

        Reported workers outside the plan are replaced. If the experts have no room, the job fails, or ends if it is
        closing.

        Args:
            workers: the possible members, in complete replica groups.
            reports: the reports of members that keep their state.
            reason: the reason for the event; "replace" instead of a failure if standbys filled all lost ranks.
        """
        self._draining.restore_retained(workers)
        self._transaction.begins_again = False
        record, transaction = self._transaction.record, self._transaction
        decision = add_stop_flag(verdict.decision, record)
        # A worker that receives the state, although it could have computed it, also gives up its experts.
        holding = {worker: report for worker, report in reports.items() if worker in verdict.holders}
        experts, moved = held_experts(decision, holding), self._replacements.pop_stand_ins()
        whose = {name: lost for name, (lost, _) in moved.items()}
        plan = plan_generation(
            record,
            transaction.members,
            workers,
            list(verdict.holders),
            experts,
            self._config,
            self._loads.tokens,
            whose,
        )
        if isinstance(plan, Shortage):
            if self._closing.under_way:
                self._closing.end()
            else:
                self._job_end.fail_job(str(plan), EXIT_BAD_INPUT)
            return
        puts_away = self._layouts.on_decision(decision, ends=self._closing.under_way)
        plan = msgspec.structs.replace(plan, last=self._closing.under_way, puts_away=puts_away)
        refusal = refusal_after(record.refusal, decision)
        assignment = () if refusal is not None else first_assignment(record, plan, decision, reports, whose)
        whole = bool(whose) and fill_same_ranks(record.plan, plan.workers, whose)
        if whole and reason == FAILURE and record.plan and len(plan.members) == len(record.plan.members):
            reason = "replace"
        anew = decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK)
        self._progress.record_decision(
            plan, record.plan, decision, count_kept(record, plan, decision, reports, assignment)
        )
        if puts_away:
            self._progress.mark_layout_change(decision)
        self._progress.record_replacements(moved, plan, self._replacements.why, all_replaced=whole)
        if anew:
            transaction.change(lineage=plan.generation)
        if anew or not _any_member_reported(record.plan, reports):
            # No reporting worker was in the last generation, so its later saved state must not count.
            transaction.change(bases=(*record.bases, (plan.generation, decision.applied))[-MAX_BASES:])
        transaction.change(generation=plan.generation, plan=plan, pending=None, decision=decision, refusal=refusal)
        transaction.change(**wanted_places(transaction, plan))
        # Former members hold a state that is soon outdated. Replace their processes by fresh ones.
        rest = [worker for worker in reports if plan.rank(worker) is None]
        idle = [node_of(worker) for worker in rest if transaction.members.worker(worker) is not None]
        self._disconnected.replace_workers(idle, "the node waits for its turn")
        # A worker with a script error saves nothing for its replica group, and its later messages must not count.
        others = [info.id for info in transaction.members.workers() if plan.rank(info.id) is None]
        self._script_errors.release(self._script_errors.find_failed(others))
        for info in transaction.members.workers():
            transaction.members.finish(info, finished=False)
        self._newcomers.on_plan_made()
        announce_generation(transaction, plan, reason, decision)
        warn_of_one_replica(transaction, record.plan, snapshots=self._config.spec.checkpoint.snapshot_every > 0)
        kept = kept_by_units(plan, decision, reports, assignment) if refusal is None else ()
        self._plan_distribution.send_begin(plan, record.plan, decision, assignment, kept)
        self._record_passed_steps(decision)

    def _record_passed_steps(self, decision: Decision) -> None:
        """Record the steps that this decision rests on and that are not in the journal yet.

        The workers that reported them may be lost, so a later coordinator could not learn of them again.
        """
        record = self._transaction.record
        assert record.plan is not None
        if decision.kind is DecisionKind.FORWARD and decision.commit is not None:
            self._ledger.record_decision(decision.applied, decision.commit)
        self._progress.announce_applied_steps()
        self._transaction.change(passed=self._ledger.unannounced)


def _describe_loss(verdict: Verdict | NothingLeft, committed: int) -> str:
    """Return the progress that a closing job loses, in words; "" if it loses none.

    Args:
        committed: the newest step that all members applied.
    """
    kept = verdict.decision.applied if isinstance(verdict, Verdict) else 0
    if kept >= committed:
        return ""
    newest = f", the newest checkpoint is of step {kept}" if kept else ""
    return f"nothing could be saved: step {committed} has no live copy{newest}"


def _any_member_reported(plan: GenerationPlan | None, reports: Collection[str]) -> bool:
    """Return whether a member of a generation is among the reporting workers."""
    return plan is not None and any(worker in reports for worker in plan.workers)
