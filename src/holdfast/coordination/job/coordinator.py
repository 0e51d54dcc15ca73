"""The coordinator's state machine: every decision about a job, as (input, now) -> instructions.

First the handler of (input, job phase) runs; the tables are at the end of `Coordinator`. Then all due work runs, always
in the same order (`_do_due_work`). Each call is one transaction: all durable changes go into one Persist before all
events and messages. So a crash leaves the state before the call or the state after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.detections import node_lost
from holdfast.coordination.inputs import REQUESTS, Disconnected, Failure, FileFailed, Input, Received, Request, Tick
from holdfast.coordination.instructions import Emit, EndJob, Instruction
from holdfast.coordination.job.admission import Admission
from holdfast.coordination.job.context import JobContext, JobPhase
from holdfast.coordination.job.deciding import GenerationDecider
from holdfast.coordination.job.finishing import LoopExits
from holdfast.coordination.job.handler_tables import Row, always, handler_row, until_over
from holdfast.coordination.job.handlers import AgentReport, MessageHandlers
from holdfast.coordination.job.missing_nodes import NeedReporter
from holdfast.coordination.job.requests import handle_request
from holdfast.coordination.membership import Membership, Node
from holdfast.coordination.nodes.pair_probes import PairProbe
from holdfast.coordination.nodes.probing import Newcomer, NewcomerProbes, ProbeVerdict
from holdfast.coordination.progress.journal_repair import missing_events
from holdfast.coordination.timing.lease import least_lease_s
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.position import Position
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record

_ALIVE = msg.Heartbeat()
#: Fields of the record that a resumed job discards: its new workers report them again, or it does not need them.
_OF_ONE_RUN = (
    *("outcome", "plan", "pending", "decision", "passed", "raised", "given_up", "will", "stopped", "refusal"),
    *("script_digest", "config", "data", "global_batch", "micro_batches", "seed", "expert_shape"),
    *("saves", "saves_in_time"),
    *("layout", "layouts", "change", "layout_s", "too_large", "failed_layouts", "evaluated", "flop_per_sample"),
    *("leaving", "standbys", "slow", "relieved", "wanted", "places"),
)
_EMPTY = Record(schema=SCHEMA, job="", term=0)


class Coordinator:
    """Coordinates one job. The shell passes inputs with the time, and executes the returned instructions in order."""

    def __init__(
        self,
        config: CoordinatorConfig,
        tail: Position,
        record: Record | None,
        ended: tuple[int, int] | None = None,
    ) -> None:
        """Load the state of a job.

        Args:
            tail: the position after the last event in the journal.
            record: the stored record, or None if the store is empty.
            ended: for a job that is over and will be resumed: the highest term and generation in its journal.
        """
        self.config = config
        record = record or Record(schema=SCHEMA, job=config.spec.name, term=0)
        self._begins_again = ended is not None
        if ended is not None:
            term, generation = max(record.term, ended[0]), max(record.generation, ended[1])
            record = msgspec.structs.replace(record, term=term, generation=generation)
        #: Events that are in the record but not in the journal.
        self._missing_events = missing_events(record, tail)
        self.transaction = Transaction(record, reduce(Position.after, self._missing_events, tail))
        self.transaction.begins_again = self._begins_again
        self.context = context = JobContext(self.transaction, config)
        self.need_reporter = NeedReporter(context)
        self._admission = Admission(context)
        self._newcomer_probes = NewcomerProbes(self.transaction, context.pair_probes)
        self._decider = GenerationDecider(context)
        self._handlers = MessageHandlers(context)
        self._loop_exits = LoopExits(context)
        self._last_tick: float | None = None
        #: The last late tick: after it, learned lease times cannot be trusted for a while.
        self._late_tick = 0.0

    # ---- the shell's side ----

    @property
    def record(self) -> Record:
        """The durable state."""
        return self.transaction.record

    @property
    def members(self) -> Membership:
        """The connected nodes and their workers."""
        return self.transaction.members

    @property
    def over(self) -> EndJob | None:
        """How the job ended, or None if it has not ended."""
        return self.context.job_end.over

    @property
    def state(self) -> str:
        """The state for users: "stopping" while the job closes, else its outcome or the phase.

        One of waiting, running, recovering, stopping, finished, stopped or failed.
        """
        if self.over is None and self.context.closing.under_way:
            return "stopping"
        return self.record.outcome or self.context.phase

    def start(self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> list[Instruction]:
        """Open a new term and return the instructions for it: the record, missing journal events, and the events of the
        start.

        A resumed job, or one that failed in an earlier run, discards the fields of the record that belong to one run.
        If the record has an outcome after that, the outcome is repeated.

        Args:
            url: this coordinator's address, for the record and the events.
            pid: this process, for the events.
            checkpoints: intact checkpoints in the checkpoint directory, used if the record has none, or if the job is
                resumed.
        """
        transaction, first = self.transaction, self.record.term == 0
        transaction.now = self._last_tick = now
        self.context.progress.start_term(now, first=first)
        since = self.record.run_since if self.config.takeover else 0.0
        identity = self.record.identity or self.config.identity
        born = self.record.born or now
        transaction.change(term=self.record.term + 1, run_since=since or now, born=born, identity=identity, url=url)
        if self._begins_again or (self.record.outcome == "failed" and not self.config.takeover):
            transaction.change(**{name: getattr(_EMPTY, name) for name in _OF_ONE_RUN})
        if self._begins_again and checkpoints:
            # Use only checkpoints that are in the directory: others may have been removed.
            transaction.change(checkpoints=())
        if not self.record.checkpoints and checkpoints and self.record.plan is None:
            # Continue after the highest term in the directory, so that new checkpoints are newer than all old ones.
            term = max(self.record.term, 1 + max(known.term for known in checkpoints))
            transaction.change(checkpoints=tuple(checkpoints), term=term)
        if not self.config.takeover:
            # The user may have corrected the data. The workers of this run report it again.
            transaction.change(data=())
        emulated, told = self.config.spec.experiments.emulated_seconds, self.context.flop.event_fields
        transaction.origin = {"url": url, "coordinator_pid": pid, **told}
        if first:
            transaction.emit(ev.JobStarted, url=url, coordinator_pid=pid, **emulated, **told)
        else:
            transaction.emit(ev.CoordinatorRestarted, **transaction.origin)
        if self._begins_again and not self.record.checkpoints and transaction.position.step:
            self.context.ledger.reset(0)
            transaction.emit(ev.RolledBack, to_step=0, why="the job begins again, and has no checkpoint")
        self.context.record_age.start()
        self.context.pool_client.start()
        self.context.disconnected.expect(map(node_of, transaction.planned))
        self.context.pending_generation.restart_timeout()
        self.context.closing.resume_closing(again=not self.config.takeover)
        self.context.failing.on_start()
        if self.record.outcome:
            self.context.job_end.repeat_outcome()
        return [*(Emit(event) for event in self._missing_events), *transaction.flush()]

    def handle(self, event: Input, now: float) -> list[Instruction]:
        """Handle one input, do the work that is due after it, and return the instructions for the shell.

        A heartbeat without news only renews the lease; one with steps is recorded, but triggers further work only if it
        completes a step. A tick also emits joined nodes, the committed step and missing nodes.

        Raises:
            BadInputError, UnreachableError, RefusedError: a user's request is refused.
        """
        self.transaction.now = max(now, self.transaction.now)
        if isinstance(event, Received) and event.message == _ALIVE:
            # The most frequent message. It only renews the lease.
            self.members.renew(event.connection, self.transaction.now)
            return []
        self._dispatch(event)
        # A heartbeat alone triggers no decision, unless a step has become complete.
        if self.context.ledger.due or not (isinstance(event, Received) and isinstance(event.message, msg.Heartbeat)):
            self._do_due_work()
            self.context.pool_client.update()
        if isinstance(event, Tick) and self.over is None:
            self.context.newcomers.emit_joined()
            self.context.progress.send_committed_step(self.config.heartbeat_s)
            self.need_reporter.update()
        return self.transaction.flush()

    def _dispatch(self, event: Input) -> None:
        """Call the handler of an input: by the message and its sender, or by the input's type and the job's phase."""
        if isinstance(event, Received):
            self._on_received(event)
        else:
            self._INPUT_HANDLERS[type(event)][self.context.phase](self, event)

    def _do_due_work(self) -> None:
        """Do all work that follows from the new state: end, recover, start, commit and finish, or improve the plan.

        In this order: fail a deserted job, refuse nodes that others cannot reach, release draining nodes, decide how an
        interrupted generation continues, or start the first one. Unless reports are awaited, then announce completed
        steps, finish the job, or start planned changes and improvements.
        """
        self.context.record_age.confirm()
        if why := self.context.escalation.explain_deserted(awaited=bool(self.context.disconnected.promised)):
            self.context.job_end.fail_job(why)
        if self.over is not None:
            return
        spare = self.members.complete_nodes - self.context.replacements.needed
        for node, why in self.context.start_probes.judge(spare):
            self.context.last_refusal = why
            self._admission.refuse_node(node, why)
        self.context.draining.release_unplanned()
        self._decider.decide()
        self.context.draining.release_unplanned()  # The decision may have released more draining nodes.
        self._decider.start()
        plan = self.record.plan
        if plan is None or self.context.interruption.stop is not None or self.over is not None:
            # While reports are awaited, the next membership is unknown.
            return
        self.context.draining.release_proven(plan, self.context.checkpoints.newest_written)
        if at_boundary := self.context.progress.announce_applied_steps():
            self.context.forget_past_failures()
        if self._fails_for_skipped_steps(plan):
            return
        self.context.update_saved_state(plan)
        if self.context.progress.finished(plan):
            if self.context.closing.renews:
                self._decider.restart_from_save()
            elif plan.last:
                self.context.closing.end()
            else:
                self.context.job_end.finish_job()
            return
        self.context.pending_generation.arm()
        if at_boundary and self._stable_plan is not None:
            self.context.start_planned_changes(plan)
        if self._stable_plan is not None and not self.context.draining.find_next_leavers(plan):
            self._improve_plan(plan)

    def _fails_for_skipped_steps(self, plan: GenerationPlan) -> bool:
        """Close the job as failed if too many steps in a row were skipped; return whether it was.

        Return False while the job is closing already, or before all members have entered the generation or ended their
        loops.
        """
        why = self.context.progress.skipped_too_often(self.config.spec.recovery.max_skipped_steps)
        if not why or plan.last:
            return False
        # Before all members have entered, a resumed job may have yet to roll back. Members that ended their loops need
        # not enter a generation that came into force with the last step.
        if not (self.members.entered(plan) or self.context.progress.finished(plan)):
            return False
        self.context.closing.fail(why)
        return True

    def _improve_plan(self, plan: GenerationPlan) -> None:
        """Prepare improvements of a settled plan: warm standbys, additional nodes, a better expert placement.

        If the recovery restarts all workers together, additional nodes interrupt the generation instead of joining
        during training. The placement is changed only if the plan is still not about to change.
        """
        self.context.standbys.order_warm_ups(plan)
        self.context.draining.promote_replacements()
        self.context.replacements.promote_for_missing_nodes(plan)
        if not self.config.spec.recovery.restarts_all:
            self.context.pending_generation.prepare(plan)
        elif self.context.pending_generation.newcomers(plan):
            # Only a restart of all workers admits new nodes.
            self.context.interruption.start(self.transaction.now)
        if self._stable_plan is not None and (experts := self.context.find_better_placement(plan)) is not None:
            self.context.pending_generation.rearrange(plan, experts)

    @property
    def _stable_plan(self) -> GenerationPlan | None:
        """The plan in force, or None if it is about to change.

        It is stable if all members have entered it, no other plan is pending, no state is stashed, no drained node is
        retained, no node is expected back, and the job is not closing.
        """
        plan = self.record.plan
        if plan is None or plan.last or plan.puts_away or self.members.owed:
            return None
        calm = (
            self.context.phase is JobPhase.RUNNING
            and self.record.pending is None
            and not self.context.disconnected.promised
        )
        return plan if calm and self.members.entered(plan) else None

    # ---- connections ----

    def _on_received(self, event: Received) -> None:
        """Dispatch an agent's message: a Hello of an unknown connection, a message of an admitted node, or a probe's
        answer.

        A message of an admitted node renews its lease. Messages of a newcomer that is still probed are kept for later;
        an expelled node's are dropped.
        """
        node = self.members.on(event.connection)
        message = event.message
        if isinstance(message, msg.Hello):
            if node is None:
                self._on_hello(event.connection, message)
        elif node is not None:
            node.seen = self.transaction.now
            if not (node.standby and self.context.standbys.on_ended(node, message)):
                self._AGENT_HANDLERS[type(message)][self.context.phase](self, node, message)
        elif isinstance(message, msg.AddressProbed):
            self._on_address_probed(event.connection, message)
        else:
            # The node was expelled, or is not admitted yet.
            self._newcomer_probes.keep(event.connection, message)

    def _on_hello(self, connection: int, hello: msg.Hello) -> None:
        """Probe or admit an agent that has connected, and process the worker messages that it kept.

        An older connection of the same agent is ended first. A newcomer is probed before it is admitted, if it must be.
        An admitted node gets the orders that it missed, or the job's outcome.
        """
        known = self.members.nodes.get(hello.node)
        if known is not None and known.session == hello.session:
            # The agent reconnected before the end of its old connection was noticed.
            self.transaction.close(known.connection)
            self._dispatch(Disconnected(known.connection))
        if self._admission.check_address(hello) is None and self._newcomer_probes.start(connection, hello):
            return
        node = self._admission.admit(connection, hello)
        if node is None:
            return
        self.context.start_probes.start(node)
        if not node.returning and not node.aside:
            self.context.newcomers.on_node_arrived(node)
        generation = self.transaction.generation
        ended = {kept.worker: kept for kept in hello.kept if isinstance(kept, msg.WorkerDown)}
        # The other members have continued without these workers.
        superseded = {
            worker for worker, down in ended.items() if down.has_left_loop and worker not in self.transaction.planned
        }
        for kept in hello.kept:
            if isinstance(kept, msg.AppliedSteps | msg.WorkerDown):
                if not self.context.standbys.on_ended(node, kept):
                    self._AGENT_HANDLERS[type(kept)][self.context.phase](self, node, kept)
            elif kept.worker not in superseded:
                self._handlers.on_worker_message(node, kept)
            if self.members.on(connection) is not node:
                # The node was expelled because of a message in its Hello.
                return
        # The node's whole report is processed. Until here it counted as disconnected.
        self.context.disconnected.on_node_returned(node)
        if self.over is None:
            self._admission.catch_up(node, generation, ended.keys() | self.members.left.keys())
        else:
            self.context.job_end.answer_late_node(node)

    def _on_address_probed(self, connection: int, answer: msg.AddressProbed) -> None:
        """Handle the result of a connection attempt between two nodes. Answers to unknown probes are ignored."""
        probe = self.context.pair_probes.on_probed(connection, answer)
        if probe is not None:
            self._on_probe_ended(probe)

    def _on_probe_ended(self, probe: PairProbe) -> None:
        """Use an ended probe for the check before the first generation, and to admit or refuse the newcomer that it
        tested.
        """
        self.context.start_probes.on_probed(probe)
        self._admit_or_refuse(self._newcomer_probes.on_probed(probe))

    def _admit_or_refuse(self, probed: tuple[Newcomer, ProbeVerdict] | None) -> None:
        """Refuse a newcomer after a failed probe, or admit it and handle its messages kept meanwhile. None is ignored.

        Once the job is over, a refused newcomer is admitted too, to learn the outcome.
        """
        if probed is None:
            return
        newcomer, outcome = probed
        if outcome is ProbeVerdict.REFUSED and self.over is None:
            self._admission.refuse_newcomer(newcomer.connection, newcomer.hello, newcomer.why)
            return
        self._on_hello(newcomer.connection, newcomer.hello)
        for message in newcomer.backlog:
            self._dispatch(Received(newcomer.connection, message))

    def _on_disconnected(self, event: Disconnected) -> None:
        """Forget a newcomer's probe, or handle the loss of the connection's node as a failure."""
        self._newcomer_probes.forget(event.connection)
        if (node := self.members.on(event.connection)) is not None:
            self.context.failures.handle(node_lost(node.name, FailureKind.CONNECTION_LOST, self.transaction.now))

    def _on_disconnected_when_over(self, event: Disconnected) -> None:
        """Forget a newcomer's probe, or remove the connection's node, which has learned the job's outcome."""
        self._newcomer_probes.forget(event.connection)
        if (node := self.members.on(event.connection)) is not None:
            self.context.draining.depart(node, self.context.job_end.farewell)

    def _on_leave(self, node: Node, leave: msg.Leave) -> None:
        """Remove a node that ends on its own, with the failure of its workers, and count it for quarantine if it must
        be.
        """
        self.context.failures.remove_workers(
            self.context.draining.depart(node, leave.reason, leave.detail), self.transaction.now
        )
        self.context.escalation.on_leave(node, leave)

    def _on_leave_when_over(self, node: Node, leave: msg.Leave) -> None:
        """Remove a node that ends on its own, and send it the job's outcome if it waits for an answer."""
        self.context.draining.depart(node, leave.reason)
        if leave.awaits_answer:
            self.context.job_end.answer_late_node(node)

    # ---- time ----

    def _was_paused(self) -> bool:
        """Return whether this process was paused for over half a lease, so that silence proves nothing about nodes.

        Then renew all leases, restart timeouts, and force a write, which detects whether another coordinator leads.
        Also store this tick's time, and whether the tick came late.
        """
        last, self._last_tick = self._last_tick, self.transaction.now
        away_s = 0.0 if last is None else self.transaction.now - last
        if away_s > least_lease_s(self.config.lease_s, self.config.heartbeat_s) / 2:
            self._late_tick = self.transaction.now
        if away_s <= self.config.lease_s / 2:
            return False
        # Another coordinator may lead by now. A write detects that: agents that are connected here then look for it.
        self.transaction.change()
        self.members.renew_leases(self.transaction.now)
        self.context.disconnected.pause_over()
        self._admission.on_pause_over()
        self.context.pair_probes.pause_over()
        self.context.hang_detection.restart_waiting()
        return True

    def _on_tick_when_over(self, _tick: Tick) -> None:
        """Note a pause of this process, and admit all newcomers that are still probed, to send them the outcome."""
        self._was_paused()
        for probed in self._newcomer_probes.end():
            self._admit_or_refuse(probed)

    def _on_tick(self, _tick: Tick) -> None:
        """Handle nodes with expired leases or overdue reconnection as failures, and run the timeouts of all components.

        After a pause of this process do nothing. After a late tick, use the full lease for a while instead of learned
        ones.
        """
        if self._was_paused():
            return
        config, now = self.config, self.transaction.now
        in_time = now - self._late_tick > config.lease_s
        least_s = least_lease_s(config.lease_s, config.beat_s(len(self.members.nodes)) if in_time else config.lease_s)
        expired = [(node.name, node.seen) for node in self.members.expired(now, config.lease_s, least_s)]
        ends = self.context.closing.under_way
        away = self.context.disconnected.overdue(
            config.lease_s, self.context.layouts.needed_nodes, config.return_timeout_s, ends=ends
        )
        self.context.failures.handle(
            *(node_lost(name, FailureKind.LEASE_EXPIRED, at) for name, at in [*expired, *away])
        )
        if self.context.pending_generation.overdue:
            self.context.failures.undo_pending(now, ())
        self.context.hang_detection.tick()
        self._loop_exits.tick()
        for probed in self._newcomer_probes.tick():
            self._admit_or_refuse(probed)
        for probe in self.context.pair_probes.tick():
            self._on_probe_ended(probe)
        self.context.start_probes.tick()
        self.context.standbys.tick()
        self.context.failing.tick()
        self.context.closing.tick()

    def _on_agent_report(self, node: Node, message: AgentReport) -> None:
        self._handlers.on_agent_report(node, message)

    def _on_probed(self, node: Node, answer: msg.AddressProbed) -> None:
        self._on_address_probed(node.connection, answer)

    def _on_ask_plan(self, node: Node, ask: msg.AskPlan) -> None:
        """Send a node the plan that it asked for; expel the node if its request is impossible."""
        if why := self.context.plan_distribution.on_ask_plan(node, ask):
            self._handlers.expel(node, why)

    def _on_worker_down(self, node: Node, down: msg.WorkerDown) -> None:
        """Handle the end of a worker.

        Bad input of a member, or of any worker before the first generation, fails the job. A script that has left its
        loop is recorded. A node is ended if its script cannot use the state. Any other end is a failure. Reports of
        workers that ended before with their replica group are ignored.
        """
        if not self._handlers.must_handle_end(node, down) or self.context.failing.on_worker_down(down):
            return
        known, member = self.members.drop(node, down.worker), self.transaction.is_member(down.worker)
        # All members have the same script and settings, so bad input of one member is bad input of all.
        if down.exit_code == EXIT_BAD_INPUT and (not self.transaction.generation or (member and not down.final)):
            self.context.job_end.fail_job(down.detail, EXIT_BAD_INPUT)
            return
        if down.has_left_loop:
            self._loop_exits.on_loop_left(down, known)
            return
        if self.context.script_errors.close_if_final(down) and self._handlers.end_useless_node(node, down.detail):
            return
        if self.over is None:
            self._handlers.on_process_ended(node, down, was_here=known is not None)
        self.context.script_errors.on_process_ended(down)

    def _on_worker_down_when_over(self, node: Node, down: msg.WorkerDown) -> None:
        """Remove a worker that has ended, and send its node the job's outcome."""
        self.members.drop(node, down.worker)
        self.context.job_end.answer_late_node(node)

    # ---- requests of users and of the shell ----

    def _on_failure(self, failure: Failure) -> None:
        """Handle a failure that the shell detected, unless it only shows a process that hangs at the job's end.

        Failures of disconnected nodes are ignored.
        """
        if not self.context.job_end.handle_hang(failure.node) and failure.node in self.members.nodes:
            self.context.failures.handle(failure)

    def _on_file_failed(self, failed: FileFailed) -> None:
        self.transaction.emit(ev.OutputLost, file=failed.file, why=failed.why)

    def _on_request(self, request: Request) -> None:
        handle_request(self.context, request)

    #: Handlers of the shell's inputs, by job phase.
    _INPUT_HANDLERS: ClassVar[dict[type, Row]] = {
        Disconnected: handler_row(_on_disconnected, _on_disconnected, _on_disconnected, _on_disconnected_when_over),
        Tick: handler_row(_on_tick, _on_tick, _on_tick, _on_tick_when_over),
        Failure: always(_on_failure),
        FileFailed: until_over(_on_file_failed),
        **dict.fromkeys(REQUESTS, always(_on_request)),
    }

    #: Handlers of agents' messages, by job phase.
    _AGENT_HANDLERS: ClassVar[dict[type, Row]] = {
        msg.Heartbeat: until_over(_on_agent_report),
        msg.FromWorker: always(_on_agent_report),
        msg.AskPlan: until_over(_on_ask_plan),
        msg.AddressProbed: always(_on_probed),
        msg.Posts: until_over(_on_agent_report),
        **dict.fromkeys(
            (msg.AppliedSteps, msg.NodeSnapshots, msg.EndNotice, msg.MemoryTaken), until_over(_on_agent_report)
        ),
        **dict.fromkeys((msg.OutputFailed, msg.ClockOffset, msg.GpusRead), until_over(_on_agent_report)),
        **dict.fromkeys((msg.Late, msg.ProbeAnswer, msg.Stacks, msg.OwnTimes), until_over(_on_agent_report)),
        msg.WorkerDown: handler_row(_on_worker_down, _on_worker_down, _on_worker_down, _on_worker_down_when_over),
        msg.Leave: handler_row(_on_leave, _on_leave, _on_leave, _on_leave_when_over),
    }
