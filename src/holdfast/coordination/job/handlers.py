"""Handlers of messages from workers. Work that follows from every input is in `coordinator`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from holdfast.coordination.experts.blobs import explain_unreadable
from holdfast.coordination.failures.detections import invalid_message
from holdfast.coordination.generations.configuration_check import check_configuration
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.job.handler_tables import Row, handler_row, ignore, until_over
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.costs import Cost
from holdfast.coordination.progress.ledger import DivergedError
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.commit import step_weight
from holdfast.protocol.events import NodeRefused, OutputLost
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import node_of

#: A page with this many new steps shows that the node is still replaying: wait longer for its report.
MUCH_NEWS = msg.PAGE_STEPS // 2
#: Files of nodes that cannot be written, reported at most.
_MAX_LOST_OUTPUTS = 256
#: Messages of agents about their workers.
AgentReport = (
    msg.FromWorker
    | msg.Posts
    | msg.AppliedSteps
    | msg.Heartbeat
    | msg.Seen
    | msg.NodeSnapshots
    | msg.EndNotice
    | msg.ClockOffset
    | msg.OutputFailed
    | msg.GpusRead
)


class MessageHandlers:
    """Handles the messages of workers on admitted nodes."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._transaction = context.transaction
        #: The files that nodes cannot write, as far as that was reported.
        self._lost_outputs = set[tuple[str, str]]()

    def on_agent_report(self, node: Node, message: AgentReport) -> None:
        """Handle a message of an admitted agent about its workers or machine; fail the job if replicas have diverged.

        Impossible rendezvous addresses expel the node.
        """
        match message:
            case msg.Heartbeat():
                self._on_heartbeat(node, message)  # The most frequent case.
            case msg.FromWorker():
                self.on_worker_message(node, message.message)
            case msg.Posts():
                if why := self._context.rendezvous.on_posts(node.name, message.posts):
                    self.expel(node, why)
            case msg.AppliedSteps():
                self._on_applied_steps(node, message)
            case msg.Late() | msg.ProbeAnswer() | msg.Stacks() | msg.OwnTimes() | msg.MemoryTaken():
                self._on_progress_report(node, message)
            case msg.NodeSnapshots():
                self._context.snapshots.on_parts_held(node, message)
            case msg.EndNotice():
                self._on_end_notice(node, message)
            case msg.ClockOffset() | msg.GpusRead() | msg.OutputFailed():
                self._on_machine_report(node, message)
        ledger, ending = self._context.progress.ledger, self._context.job_end
        if ledger.differing and ending.over is None and (why := ledger.describe_divergence()):
            ending.fail_job(f"replicas diverged: {why}")

    def _on_progress_report(self, node: Node, message: msg.Seen) -> None:
        """Pass a report about hangs, stacks, memory or slow nodes to the component that uses it."""
        inquiry = self._context.hang_detection
        match message:
            case msg.Late():
                inquiry.on_late(node, message)
            case msg.ProbeAnswer():
                inquiry.on_answer(node, message)
            case msg.Stacks():
                inquiry.on_stacks(node, message)
            case msg.MemoryTaken():
                inquiry.memories.on_memory_taken(node, message)
            case msg.OwnTimes():
                inquiry.stragglers.on_own_times(node.name, message)
                self._context.straggling.on_own_times(node.name, message)

    def _on_machine_report(self, node: Node, message: msg.ClockOffset | msg.GpusRead | msg.OutputFailed) -> None:
        """Store a node's clock offset or the state of its GPUs, or report a file that it cannot write.

        An offset that is not larger than its uncertainty is stored as 0.
        """
        match message:
            case msg.ClockOffset():
                # Delays of a loaded machine must not count as an offset of its clock.
                known = math.isfinite(message.ahead_s) and abs(message.ahead_s) > message.uncertainty_s
                node.clock_off_s = message.ahead_s if known else 0.0
            case msg.GpusRead():
                node.gpus = message.gpus
            case msg.OutputFailed():
                self._on_output_failed(node, message)

    def _on_output_failed(self, node: Node, message: msg.OutputFailed) -> None:
        """Emit `output_lost` for a file that a node cannot write: once for each file, at most 256 times in all."""
        key = node.name, message.file
        if key not in self._lost_outputs and len(self._lost_outputs) < _MAX_LOST_OUTPUTS:
            self._lost_outputs.add(key)
            self._transaction.emit(OutputLost, node=node.name, file=message.file, why=message.why)

    def _on_end_notice(self, node: Node, message: msg.EndNotice) -> None:
        """Start draining a node that will end soon. If it cannot be drained, and the job saves, request a checkpoint
        now.
        """
        why = self._context.draining.on_end_notice(node.name, message.grace_s)
        if why and self._transaction.record.saves:
            self._context.checkpoints.request_checkpoint(self._context.ledger.committed)

    def on_worker_message(self, node: Node, message: msg.WorkerMessage) -> None:
        """Call the handler of a worker's message for the job's phase.

        From workers that have not attached, only Attach and news of checkpoints are handled.
        """
        known, alone = message.worker in node.workers, msg.Attach | msg.CheckpointNews
        if known or (isinstance(message, alone) and node_of(message.worker) == node.name):
            self._WORKER_HANDLERS[type(message)][self._context.phase](self, node, message)

    def _on_applied_steps(self, node: Node, page: msg.AppliedSteps) -> None:
        """Record a page of steps that a node's workers applied while no coordinator was connected.

        Each step needs a live worker that has reached it, and the current lineage. Diverged replicas fail the job,
        implausible steps expel the node, and much news extends the wait for reports. A step that carries a swap puts
        the pending generation in force.
        """
        record, ledger = self._transaction.record, self._context.ledger
        if not self.check_plausible(node, page.given_up, *page.workers.values(), *(kept.step for kept in page.steps)):
            return
        ledger.give_up_to(page.given_up, record.global_batch)
        reached, tops = page.given_up, {worker: top for worker, top in page.workers.items() if worker in node.workers}
        learnt = further = 0
        for kept in page.steps:
            witness = next((worker for worker, top in tops.items() if top >= kept.step), None)
            if witness is None or not record.lineage <= kept.generation <= record.generation:
                continue
            reached, learnt = kept.step, learnt + step_weight(kept.commit) * (not ledger.knows(kept.step))
            try:
                # If the node's clock was set meanwhile, the time must not be in the future.
                time = min(self._transaction.now, kept.time + node.ahead_s) if kept.time else 0.0
                ledger.learn(kept, witness, time)
            except DivergedError as error:
                self._context.job_end.fail_job(f"replicas diverged: {error}")
                return
            self._promote_if_swapped(kept.step, kept.generation, kept.commit)
        for worker, top in tops.items():
            if reached:
                further = max(further, min(top, reached) - (ledger.applied_by(worker) or 0))
                ledger.record_step(worker, min(top, reached))
        if max(learnt, further) >= MUCH_NEWS:  # A worker sends its report after the steps before it.
            self._context.interruption.restart_timeout()

    def _on_heartbeat(self, node: Node, heartbeat: msg.Heartbeat) -> None:
        """Record the steps that a node's workers have applied, from a heartbeat.

        Ignored if it is from before a rollback; implausible steps expel the node.
        """
        record, applied = self._transaction.record, heartbeat.applied
        if not record.lineage <= heartbeat.generation <= record.generation:
            return  # The heartbeat is from before a rollback.
        if not self.check_plausible(node, *applied):
            return
        if len(applied) == 1 and applied[0]:
            self._context.ledger.record_steps(node.workers, applied[0])
            return
        for info in node.workers.values():
            if info.index < len(applied) and applied[info.index]:
                self._context.ledger.record_step(info.id, applied[info.index])

    def _on_attach(self, node: Node, attach: msg.Attach) -> None:
        """Add a worker that has started, unless its layout, script settings or local rank do not fit. A known worker is
        ignored.

        An unfit node is refused, one with an impossible local rank expelled. Once the job has an outcome, the worker is
        told that it is done. Otherwise the node's new workers may join, replace lost ones, or wait as standbys.
        """
        if attach.worker in node.workers or attach.worker in node.broken:
            return
        if not node.has_place_for(attach.worker):
            # Another worker of its replica group has already ended, together with the job.
            if self._transaction.record.outcome:
                self._transaction.send(node.connection, msg.ToWorker(worker=attach.worker, order=msg.JobDone()))
                return
            self.expel(node, f"worker {attach.worker} has none of the node's {node.expected} places")
            return
        if self._context.layouts.replace_if_outdated(node, attach):
            return
        if differing := check_configuration(self._transaction, node, attach, self._context.failing.revert_change):
            self._report_unfit(node, differing)
            return
        self._transaction.members.attach(node, attach)
        self._context.interruption.on_worker_attached(attach.worker)
        if self._transaction.record.outcome:
            self._transaction.order(attach.worker, msg.JobDone())
            return
        if node.standby and node.complete and not node.returning:
            self._context.progress.costs.add_measurement(Cost.START, self._transaction.now - node.came)
        if node.aside:
            return  # Standbys are warmed up later, while the others train.
        self._context.newcomers.on_worker_attached(
            node, is_new=attach.worker not in self._transaction.planned_on(node.name)
        )
        self._context.rank_hold.on_process_attached(attach.worker, node.came)
        if node.complete:
            self._context.escalation.on_node_complete(node)
            self._context.failing.on_node_complete(node)
        if not self._context.disconnected.on_worker_attached(node):
            self._context.newcomers.on_node_arrived(node)
            self._context.pending_generation.on_worker_attached()

    def _report_unfit(self, node: Node, why: str) -> None:
        """Report a node that was refused because it does not fit the job, and forget it; a refused standby is reported
        as such.

        A node that was part of the job is not reported or forgotten, but `why` is kept as the last refusal: the node
        counts as lost once its connection ends.
        """
        if node.standby:
            self._context.standbys.report_unfit(node, why)
            return
        self._context.last_refusal = why
        if self.forget_if_unknown(node, why):
            self._transaction.emit(NodeRefused, node=node.name, why=why, address=node.address)

    def _on_applied(self, node: Node, message: msg.Applied) -> None:
        """Handle a worker's report that it has applied a step to its state.

        Diverged replicas fail the job. A step with a swap flag puts the pending generation in force. Reports of other
        lineages are ignored; an implausible step expels the node.
        """
        record = self._transaction.record
        if message.generation < record.lineage or message.generation > record.generation:
            return
        if not self.check_plausible(node, message.step):
            return
        try:
            self._context.ledger.add_report(message, self._transaction.now)
            self._context.progress.last_step = message.last_step
        except DivergedError as error:
            self._context.job_end.fail_job(f"replicas diverged: {error}")
            return
        if message.generation == self._transaction.generation:
            self._context.hang_detection.pace.on_applied(message.step, self._transaction.now)
        self._promote_if_swapped(message.step, message.generation, message.commit)

    def _promote_if_swapped(self, step: int, generation: int, commit: msg.Commit) -> None:
        """Put the pending generation in force if this step of the current generation carries the swap, and is not
        announced yet.
        """
        # After an outage, steps that are in the journal are reported again. Their swap is not the pending one.
        if (
            generation == self._transaction.generation
            and msg.Flag.SWAP in commit.flags
            and step > self._context.ledger.committed
        ):
            self._promote_pending(step)

    def _on_entered(self, node: Node, message: msg.Entered) -> None:
        """Record that a worker has entered a generation, with its step, and the end and size of its state transfer.

        The first worker in the pending generation puts it in force. Older or unknown generations are ignored; an
        implausible step expels the node.
        """
        if not self.check_plausible(node, message.applied):
            return
        info, pending = node.workers[message.worker], self._transaction.record.pending
        if pending is not None and message.generation == pending.generation:
            self._promote_pending(message.applied)
        if message.generation <= info.entered or message.generation > self._transaction.record.generation:
            return
        self._transaction.members.enter(info, message.generation)
        if message.generation >= self._transaction.record.lineage:
            self._context.ledger.record_step(info.id, message.applied)
        self._record_transfer(node, message)
        recovery = self._context.progress.recovery
        if message.generation == self._transaction.generation and recovery is not None:
            recovery.add_transfer(message.received_bytes, message.transfer_s)
            if self._transaction.members.entered(self._transaction.record.plan):
                recovery.regrouped = self._transaction.now

    def _record_transfer(self, node: Node, message: msg.Entered) -> None:
        """Record that a member has received the state from the senders of the plan in force."""
        plan = self._transaction.record.plan
        if plan is not None and plan.generation == message.generation:
            senders = map(node_of, plan.senders(message.worker))
            self._transaction.members.transfers.note_receipt(node.name, senders)

    def _promote_pending(self, step: int) -> None:
        """Put the pending generation in force: all members passed `step` with their swap flags set.

        Announce the steps before it first. If a member was lost since, interrupt the new generation at once. Ignored
        while a generation is interrupted, because a failure cancels a pending swap.
        """
        context = self._context
        # A failure cancels a pending swap, even if some members have passed it.
        if context.interruption.stop is not None:
            return
        context.ledger.prove(step, self._transaction.generation)
        # Release before the promotion: new members have not applied the steps of the old generation.
        if context.progress.announce_applied_steps():
            context.forget_past_failures()
        lost_at = context.pending_generation.lost_at
        context.pending_generation.promote(step, context.progress)
        # All flags were set before the loss of a member was noticed.
        if lost_at is not None:
            context.interruption.start(lost_at)

    def _on_prepared(self, node: Node, message: msg.Prepared) -> None:
        self._transaction.members.prepare(node.workers[message.worker], message.generation)

    def _on_disarmed(self, node: Node, message: msg.Disarmed) -> None:
        """Handle a member's answer that it has withdrawn its swap, unless the generation is interrupted."""
        if self._transaction.is_member(message.worker) and self._context.interruption.stop is None:
            self._context.pending_generation.on_disarmed(message)

    def _on_warmed(self, node: Node, message: msg.Warmed) -> None:
        self._context.standbys.on_warmed(node, message)

    def _on_finished(self, node: Node, message: msg.Finished) -> None:
        """Record that a worker has ended its loop after a step, and whether its script asked to stop the job.

        The end counts only in the generation in force, the step in the current lineage; an implausible step expels the
        node.
        """
        if not self.check_plausible(node, message.step):
            return
        record, info = self._transaction.record, node.workers[message.worker]
        # A worker that ended its loop in an older generation reports it again in this one.
        if message.generation == self._transaction.generation:
            info.stopped = message.why if message.stopped else None
            self._transaction.members.finish(info)
        if record.lineage <= message.generation <= record.generation:
            self._context.ledger.record_step(info.id, message.step)

    def _on_loads(self, node: Node, message: msg.Loads) -> None:
        """Store a member's expert loads. Ignore loads of an unknown generation, and of workers that are not members;
        expel the node if the step is implausible.
        """
        # Only the newest count is kept: one of an unknown generation would hide all later counts.
        known = message.generation <= self._transaction.record.generation
        if known and self._transaction.is_member(message.worker) and self.check_plausible(node, message.step):
            self._context.loads.on_loads(message)

    def _on_checkpoint_message(self, node: Node, message: Any) -> None:
        """Record news of a checkpoint. If the job must continue from another one, interrupt the generation.

        Reports of damage count only from members.
        """
        damaged = isinstance(message, msg.CheckpointDamaged)
        if damaged and not self._transaction.is_member(message.worker):
            return
        if self._context.checkpoints.on_report(message, self._context.ledger.committed):
            self._context.interruption.start(self._transaction.now)

    def _on_snapshot_message(self, node: Node, message: Any) -> None:
        """Record a member's news of a snapshot.

        If the snapshot that the job starts from is damaged, interrupt the generation, or revert the change of layout
        that it belongs to. A left-out snapshot cancels a layout change.
        """
        if not self._transaction.is_member(message.worker):
            return
        if (
            isinstance(message, msg.SnapshotDamaged)
            and not message.node
            and self._context.failing.revert_change(message.why)
        ):
            return
        if self._context.snapshots.on_snapshot_message(message):
            self._context.interruption.start(self._transaction.now)
        elif isinstance(message, msg.SnapshotLeftOut) and message.generation == self._transaction.generation:
            self._context.layouts.cancel_stash(f"node {node.name}: {message.why}", lasting=message.lasting)

    def _on_evaluation_done(self, node: Node, message: msg.EvaluationDone) -> None:
        """Record the evaluation results of a member, unless their steps are implausible, which expels the node."""
        steps = [result.step for result in message.results]
        if self._transaction.is_member(message.worker) and self.check_plausible(node, *steps):
            self._context.evaluations.on_evaluation_done(message)

    def _on_flop_tally(self, node: Node, message: msg.FlopTally) -> None:
        """Record a member's count of operations for a step, unless the step is implausible, which expels the node."""
        if self._transaction.is_member(message.worker) and self.check_plausible(node, message.step - 1):
            self._context.flop.on_tally(message)

    def _on_script_failed(self, node: Node, message: msg.ScriptFailed) -> None:
        """Close the job as failed, because a member's script cannot continue. Messages of other workers are ignored."""
        if self._transaction.is_member(message.worker):
            self._context.closing.fail(message.why)

    def _on_raised(self, node: Node, message: msg.Raised) -> None:
        """Handle a script error in a process that still runs.

        A standby's process is replaced, a retained worker is only marked, and an error of any other worker is a
        failure.
        """
        if node.standby:
            self._context.standbys.on_raised(node, message.worker, message.detail)
        elif node.owed:
            # The others have done that step without it.
            node.workers[message.worker].raised = True
        else:
            self._context.script_errors.on_raised(node, message)

    def _on_complaint(self, node: Node, message: msg.Complaint) -> None:
        """Handle a worker's complaint that its collectives or transfers fail.

        From a member of the pending generation: cancel that, and leave the unreachable workers, and the one that
        complains of them, out for a while; if some members may have swapped already, interrupt the current generation
        instead. From a member of the one in force: interrupt it and keep the complaint, unless the interruption
        explains it. Others are ignored.
        """
        pending = self._transaction.record.pending
        if pending is not None and message.generation == pending.generation:
            if pending.rank(message.worker) is None:
                return
            cut_off = (message.worker,) if message.unreachable else ()
            self._context.failures.undo_pending(self._transaction.now, (*message.unreachable, *cut_off))
        elif self._transaction.is_member(message.worker) and (
            message.generation == self._transaction.generation or self._transaction.left_behind(message)
        ):
            if self._context.interruption.explains(message):
                return
            self._context.interruption.start(self._transaction.now)
            self._context.interruption.add_complaint(message)

    def _on_vote_refused(self, node: Node, message: msg.VoteRefused) -> None:
        """Interrupt the generation in force because a member refused a step's result, and keep the reason.

        Ignored if the message is of another generation.
        """
        if message.generation == self._transaction.generation:
            self._context.interruption.start(self._transaction.now)
            self._context.interruption.refused = message.why

    def _on_report(self, node: Node, report: msg.Report) -> None:
        """Keep a member's report about where it stands, if it answers the current stop order.

        A report with impossible steps or unreadable experts expels the node.
        """
        if not self._context.interruption.is_answer(report):
            return
        if not self.check_plausible(node, report.applied or 0, report.passed.step if report.passed is not None else 0):
            return
        if why := explain_unreadable(report, self._transaction.record.expert_shape):
            self.expel(node, f"the report of {report.worker} cannot be read: {why}")
            return
        self._context.interruption.add_report(report)

    def must_handle_end(self, node: Node, down: msg.WorkerDown) -> bool:
        """Return whether a worker's end must be handled.

        Not if its replica group was lost before it. An implausible last step expels the node instead.
        """
        return down.worker not in node.broken and self.check_plausible(node, down.applied)

    def check_plausible(self, node: Node, *steps: int) -> bool:
        """Return whether these steps can have been reached since the last known step; expel the node if not."""
        step, stopping = max(steps, default=0), self._context.interruption
        until = self._transaction.now if stopping.stop is None else stopping.begun
        if self._context.ledger.plausible(step, self._context.progress.since_known(until)):
            return True
        self.expel(node, f"step {step} cannot have been applied")
        return False

    def expel(self, node: Node, why: str) -> None:
        """Make a node restart its workers, because no decision can rest on its reports."""
        self._context.failures.handle(invalid_message(node.name, why, self._transaction.now))

    def on_process_ended(self, node: Node, down: msg.WorkerDown, *, was_here: bool) -> None:
        """Handle a process that ended without an order, as a failure; its rank may be held for the next process.

        If it had not attached and is not planned, only the other workers of its replica group are removed.

        Args:
            was_here: whether the worker had attached.
        """
        if was_here or down.worker in self._transaction.planned:
            self._context.rank_hold.hold_ranks([down.worker])
            self._context.failures.handle(self._context.hang_detection.classify_end(node, down))
        else:
            # This worker had not attached yet, but others of its replica group may have.
            self._transaction.drop_group_of(down.worker)

    def end_useless_node(self, node: Node, why: str) -> bool:
        """Send a node the order to end, because its script cannot use the received state; forget it unless it was part
        of the job.

        Returns:
            Whether it is forgotten, so that no failure must be handled.
        """
        self._transaction.send(node.connection, msg.EndNode(exit_code=EXIT_BAD_INPUT, why=why, alone=True))
        return self.forget_if_unknown(node, why)

    def forget_if_unknown(self, node: Node, why: str) -> bool:
        """Forget a refused node, and tell the pool, unless it was part of the job.

        Returns:
            False if it was part of the job, or is a standby: it counts as lost once its connection ends.
        """
        if node.aside or node.told or node.returning or self._transaction.planned_on(node.name):
            return False
        self._context.pool_client.refuse_node(node.name, why)
        self._context.draining.forget(node)
        return True

    def _on_unasked_report(self, node: Node, report: msg.Report) -> None:
        """Interrupt the generation after a report that was not requested: an earlier coordinator had interrupted it."""
        if report.generation >= self._transaction.generation:
            self._context.interruption.start(self._transaction.now)

    #: Handlers of workers' messages, by job phase.
    _WORKER_HANDLERS: ClassVar[dict[type, Row]] = {
        msg.Attach: handler_row(_on_attach, _on_attach, _on_attach, _on_attach),
        msg.Begun: until_over(ignore),  # Only `Admission` uses it, as evidence.
        msg.Warmed: until_over(_on_warmed),
        msg.Entered: until_over(_on_entered),
        msg.Prepared: until_over(_on_prepared),
        msg.Disarmed: until_over(_on_disarmed),
        msg.Applied: until_over(_on_applied),
        msg.ReceivedSteps: until_over(ignore),  # Only agents use it.
        msg.Report: handler_row(ignore, _on_unasked_report, _on_report, ignore),
        msg.Complaint: until_over(_on_complaint),
        msg.VoteRefused: until_over(_on_vote_refused),
        msg.Finished: until_over(_on_finished),
        msg.CheckpointWritten: until_over(_on_checkpoint_message),
        msg.CheckpointKept: until_over(_on_checkpoint_message),
        msg.CheckpointUnwritten: until_over(_on_checkpoint_message),
        msg.CheckpointDamaged: until_over(_on_checkpoint_message),
        **dict.fromkeys(
            (msg.SnapshotTaken, msg.SnapshotLeftOut, msg.SnapshotDamaged), until_over(_on_snapshot_message)
        ),
        msg.Loads: until_over(_on_loads),
        msg.EvaluationDone: until_over(_on_evaluation_done),
        msg.FlopTally: until_over(_on_flop_tally),
        msg.ScriptFailed: until_over(_on_script_failed),
        msg.Raised: until_over(_on_raised),
        msg.Post: until_over(ignore),  # The agent sends it in a bundle, `Posts`.
    }
