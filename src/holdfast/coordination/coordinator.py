"""The coordinator's machine: every decision about a job, as (input, now) -> instructions.

A job is waiting (no epoch), running (an epoch, perhaps with a pending one beside it), or stopping (an epoch is broken,
reports are awaited). Within one call everything durable goes into one Persist that precedes all events and messages,
so a crash at any write leaves either the state before or the state after, never a promise without its record.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.admission import expel, refusal, send_away_all, takes_part
from holdfast.coordination.announcing import announce_epoch, announce_node
from holdfast.coordination.checkpoints import CheckpointBook
from holdfast.coordination.decisions import NothingLeft, Verdict, decide, without_state
from holdfast.coordination.ending import Ending
from holdfast.coordination.injection import injection
from holdfast.coordination.inputs import (
    RESTART,
    CoordinatorConfig,
    Disconnected,
    Emit,
    EndJob,
    FailNode,
    Input,
    Instruction,
    JournalTail,
    Planned,
    Received,
    Tick,
)
from holdfast.coordination.joining import Joining
from holdfast.coordination.ledger import DivergedError, StepLedger
from holdfast.coordination.loads import LoadBook
from holdfast.coordination.membership import Membership, Node, WorkerInfo
from holdfast.coordination.planner import first_assignment, held_experts, lacks_slots, lost_of, make_plan
from holdfast.coordination.progress import Progress, continued
from holdfast.coordination.rebalancing import Rebalancing
from holdfast.coordination.rendezvous import pass_on
from holdfast.coordination.renewing import Renewing
from holdfast.coordination.stopping import Stopping
from holdfast.coordination.turn import Turn
from holdfast.coordination.waiting import Waiting
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.planning import Shortage
from holdfast.protocol import events as ev
from holdfast.protocol import messages as msg
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import DecisionKind, EpochPlan
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record


class Coordinator:
    """One job's coordination. The shell feeds it inputs with the time and carries out what it returns, in order."""

    def __init__(self, config: CoordinatorConfig, tail: JournalTail, record: Record | None) -> None:
        self.config = config
        record = record or Record(schema=SCHEMA, job=config.job, term=0)
        #: events of the last transition that did not reach the journal any more
        self._lost = [event for event in record.outbox if event.seq > tail.seq]
        tail = continued(tail, self._lost, record.global_batch)
        self.turn = Turn(record, tail.seq)
        self.progress = Progress(self.turn, tail)
        self.loads = LoadBook(self.turn)
        self.joining = Joining(self.turn, config, self.loads)
        self.rebalancing = Rebalancing(self.turn, config, self.loads, tail.step)
        self.checkpoints = CheckpointBook(self.turn)
        self.ending = Ending(self.turn)
        self.renewing = Renewing(self.turn)
        #: nodes of the restored plan that have not come back yet, with the time their lease runs from
        self._absent: dict[str, float] = {}
        self.stopping = Stopping(self.turn)
        self.waiting = Waiting(self.turn, self.stopping, config)
        self._last_tick: float | None = None

    # ---- the shell's side ----

    @property
    def record(self) -> Record:
        """The durable state."""
        return self.turn.record

    @property
    def members(self) -> Membership:
        """Who is there."""
        return self.turn.members

    @property
    def ledger(self) -> StepLedger:
        """Who has applied what."""
        return self.progress.ledger

    @property
    def over(self) -> EndJob | None:
        """How the job ended, None while it goes on."""
        return self.ending.over

    @property
    def state(self) -> str:
        """waiting, running, recovering, or the outcome."""
        if self.record.outcome:
            return self.record.outcome
        if self.stopping.stop is not None:
            return "recovering"
        return "running" if self.record.plan else "waiting"

    def start(self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> list[Instruction]:
        """Open a new term; what the journal lacks of the last transition is emitted first.

        Args:
            checkpoints: intact ones that lie in the checkpoint directory; they count where the record knows of none.
        """
        turn = self.turn
        turn.now = self._last_tick = now
        turn.change(term=self.record.term + 1)
        if self.record.outcome == "failed" and not self.config.takeover:
            turn.change(outcome="", plan=None, pending=None, decision=None)
        if not self.record.checkpoints and checkpoints and self.record.plan is None:
            turn.change(checkpoints=tuple(checkpoints))
        if self.record.term == 1:
            turn.emit(ev.JobStarted, url=url, coordinator_pid=pid, emulate_compute=self.config.emulate_compute)
        else:
            turn.emit(ev.CoordinatorRestarted, url=url, coordinator_pid=pid)
        for plan in (self.record.plan, self.record.pending):
            for worker in plan.workers if plan else ():
                self._absent[node_of(worker)] = now
        self.joining.renew()
        if self.record.outcome:
            self.ending.taken_over()
        return [*(Emit(event) for event in self._lost), *turn.flush()]

    def handle(self, event: Input, now: float) -> list[Instruction]:
        """Take in one input.

        Raises:
            BadInputError: a user's request that is refused (FailNode).
        """
        self.turn.now = max(now, self.turn.now)
        if isinstance(event, Received):
            self._received(event)
        elif isinstance(event, Disconnected):
            self._disconnected(event.connection)
        elif isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Planned):
            self._planned(event)
        elif isinstance(event, FailNode):
            self.turn.send(*injection(self.config, self.members, event))
        else:
            self.ending.by_will(event.exit_code, event.why)
        return self.turn.flush()

    # ---- connections ----

    def _received(self, event: Received) -> None:
        node = self.members.on(event.connection)
        message = event.message
        if isinstance(message, msg.Hello):
            if node is None:
                self._hello(event.connection, message)
            return
        if node is None:
            return  # expelled, or never let in: nothing of it counts
        node.seen = self.turn.now
        if isinstance(message, msg.FromWorker):
            self._from_worker(node, message.message)
        elif isinstance(message, msg.WorkerDown):
            self._worker_down(node, message)
        elif isinstance(message, msg.Leave):
            self._leave(node, message)

    def _hello(self, connection: int, hello: msg.Hello) -> None:
        if hello.term > self.record.term:
            # The agent knows a newer coordinator: this one was paused and superseded. Let the agent look for the other.
            self.turn.close(connection)
            return
        known = self.members.nodes.get(hello.node)
        if known is not None and known.session == hello.session:
            # It has lost its old connection, and nobody told us yet.
            self.turn.close(known.connection)
            self._disconnected(known.connection)
        why_not = refusal(self.record, self.members, hello)
        if why_not is not None:
            self.turn.send(connection, why_not)
            self.turn.close(connection)
            return
        if not self.record.script_digest:
            self.turn.change(script_digest=hello.digest)
        node = self.members.add(hello, connection, self.turn.now)
        node.returning = self.renewing.back(hello.node) or hello.node in self._absent
        config = self.config
        self.turn.send(
            connection,
            msg.Welcome(
                term=self.record.term,
                lease_s=config.lease_s,
                heartbeat_s=config.heartbeat_s,
                committed=self.ledger.committed,
            ),
        )
        known_epoch = self.turn.epoch
        for kept in hello.kept:
            self._from_worker(node, kept)
        # Only now is everything known that the node has to say: until here it was awaited as absent.
        self._absent.pop(hello.node, None)
        self._catch_up(node, known_epoch)
        self._maybe_decide()
        self._maybe_finish()

    def _catch_up(self, node: Node, epoch: int) -> None:
        """Tell a node that came (back) what its workers should know by now; `epoch` was in force when it came."""
        plan = self.record.plan
        if self.over is not None:
            return
        gone = [worker for worker in self.turn.planned_on(node.name) if worker not in node.workers]
        if gone:
            self._workers_gone(gone, self.turn.now)
        for worker in list(node.workers):
            if self.stopping.stop is not None:
                self.turn.order(worker, self.stopping.stop)
            elif plan is None or plan.epoch != epoch or plan.rank(worker) is None:
                continue  # nothing to catch up with, or just told
            elif node.workers[worker].entered < epoch:
                # The rendezvous of the coordinator before is lost: only a new epoch helps.
                self._break()

    def _disconnected(self, connection: int) -> None:
        node = self.members.on(connection)
        if node is None:
            return
        if self.over is not None:
            self.members.remove(node.name)
            self.turn.emit(ev.NodeLeft, node=node.name, reason=self.ending.farewell)
            return
        self._lose(node, "connection_lost", self.turn.now)

    def _leave(self, node: Node, leave: msg.Leave) -> None:
        self.members.remove(node.name)
        self.renewing.lost(node.name)
        self.turn.emit(ev.NodeLeft, node=node.name, reason=leave.reason)
        if self.over is not None:
            return
        self._workers_gone(list(node.workers), self.turn.now)
        if not self.members.nodes and leave.reason == "quarantined":
            self.ending.failed(f"the last node, {node.name}, is quarantined: {leave.detail}")

    def _lose(self, node: Node, kind: str, failed_at: float, detail: str = "") -> None:
        """Expel a node, and see what becomes of the job."""
        expel(self.turn, node, kind, failed_at, detail)
        self.renewing.lost(node.name)
        self._workers_gone(list(node.workers), failed_at)

    def _workers_gone(self, workers: list[str], failed_at: float) -> None:
        for worker in workers:
            self.ledger.forget(worker)
            self.stopping.reports.pop(worker, None)
        record = self.record
        if record.plan is not None and any(record.plan.rank(worker) is not None for worker in workers):
            self._break(failed_at)
        elif record.pending is not None and any(record.pending.rank(worker) is not None for worker in workers):
            self._undo_pending(failed_at)
        if self.stopping.stop is not None:
            self._maybe_decide()

    # ---- time ----

    def _tick(self) -> None:
        config, now = self.config, self.turn.now
        paused = self._last_tick is not None and now - self._last_tick > config.lease_s / 2
        self._last_tick = now
        if paused:
            # It was this process that was away: nobody may be judged by what was not read in time.
            self.members.renew_all(now)
            self._absent = dict.fromkeys(self._absent, now)
            self.stopping.renew()
            self.renewing.pause_over()
        if self.over is not None:
            return
        expired = self.members.expired(now, config.lease_s)
        for node in expired:
            self.turn.close(node.connection)
            expel(self.turn, node, "lease_expired", node.seen)
            self.renewing.lost(node.name)
        if expired:  # all at once: none of them may be a member of what is decided now
            workers = [worker for node in expired for worker in node.workers]
            self._workers_gone(workers, min(node.seen for node in expired))
        self._tick_absent()
        self._tick_reports()
        self.renewing.give_up(config.lease_s)
        self._maybe_start()
        if self.joining.overdue:
            self._undo_pending(now)
        self._maybe_prepare()
        self.progress.tell(config.heartbeat_s)
        self.waiting.tell(self._absent, restarting=self.renewing.awaited)

    def _tick_absent(self) -> None:
        for name, since in list(self._absent.items()):
            if self.turn.now - since <= self.config.lease_s or self.over is not None:
                continue
            del self._absent[name]
            self.turn.emit(ev.FailureDetected, node=name, kind="lease_expired", after_s=self.turn.now - since)
            self.turn.emit(ev.NodeLeft, node=name, reason="failed")
            self._workers_gone(self.turn.planned_on(name), since)

    def _tick_reports(self) -> None:
        """Expel who does not answer Stop although its agent lives."""
        waited = self.stopping.waited()
        if waited <= self.config.report_timeout_s:
            return
        for name in dict.fromkeys(node_of(worker) for worker in self.stopping.awaited(self.members, self._absent)):
            node = self.members.nodes.get(name)
            if node is not None:
                self.turn.send(
                    node.connection, msg.Refused(why="no report after Stop", exit_code=EXIT_FAILED, retry=True)
                )
                self.turn.close(node.connection)
                self._lose(node, "hang", self.turn.now - waited)

    # ---- what workers say ----

    def _from_worker(self, node: Node, message: msg.WorkerMessage) -> None:
        if node_of(message.worker) != node.name:
            return
        if isinstance(message, msg.Attach):
            self._attach(node, message)
            return
        info = node.workers.get(message.worker)
        if info is None or self.over is not None:
            return
        if isinstance(message, msg.Applied):
            self._applied(message)
        elif isinstance(message, msg.Post):
            pass_on(self.turn, message)
        elif isinstance(message, msg.Entered):
            self._entered(info, message)
        elif isinstance(message, msg.Report):
            self._report(message)
        elif isinstance(message, msg.Fault):
            self._fault(node, message)
        elif not isinstance(message, msg.Begun):
            self._from_member(info, message)

    def _from_member(self, info: WorkerInfo, message: msg.MemberMessage) -> None:
        if isinstance(message, msg.Prepared):
            info.prepared = max(info.prepared, message.epoch)
            if self.stopping.stop is None:
                self.joining.arm()
        elif isinstance(message, msg.Finished):
            info.finished = True
            self.ledger.settle(info.id, message.step)
            self._maybe_finish()
        elif isinstance(message, msg.Loads):
            if self.turn.is_member(message.worker):
                self.loads.take(message)
        elif self.turn.is_member(message.worker) and self.checkpoints.take(message, self.ledger.committed):
            # (Whoever is no member may have passed alone: its checkpoints are on no decided lineage.)
            self._break()

    def _attach(self, node: Node, attach: msg.Attach) -> None:
        if attach.worker in node.workers or not takes_part(self.turn, node, attach):
            return
        node.workers[attach.worker] = WorkerInfo(attach)
        if self.record.outcome:
            self.turn.order(attach.worker, msg.JobDone())
            return
        announce_node(self.turn, node, is_new=attach.worker not in self.turn.planned_on(node.name))
        if not self.renewing.attached(node):
            self.joining.arrived()
        self._maybe_decide()
        self._maybe_start()
        self._maybe_prepare()

    def _applied(self, message: msg.Applied) -> None:
        record = self.record
        if message.epoch < record.lineage or message.epoch > record.epoch:
            return
        try:
            self.ledger.note(message)
        except DivergedError as error:
            self.ending.failed(f"replicas diverged: {error}")
            return
        if message.epoch == self.turn.epoch and message.commit.swap == message.world:
            self._promote(message.step)
        self._release()

    def _entered(self, info: WorkerInfo, message: msg.Entered) -> None:
        pending = self.record.pending
        if pending is not None and message.epoch == pending.epoch:
            self._promote(message.applied)
        if message.epoch <= info.entered or message.epoch > self.record.epoch:
            return
        info.entered = message.epoch
        if message.epoch >= self.record.lineage:
            self.ledger.settle(info.id, message.applied)
        if message.epoch != self.turn.epoch:
            return
        recovery = self.progress.recovery
        if recovery is not None:
            recovery.moved(message.received_bytes, message.transfer_s)
            if self.members.entered(self.record.plan):
                recovery.regrouped = self.turn.now
        self._release()
        self._maybe_prepare()

    def _fault(self, node: Node, message: msg.Fault) -> None:
        pending = self.record.pending
        if pending is not None and message.epoch == pending.epoch:
            self._undo_pending(self.turn.now)
        elif message.epoch == self.turn.epoch or self.turn.left_behind(message):
            self.stopping.complaint = (node.name, message.detail)
            self._break(self.turn.now)

    def _worker_down(self, node: Node, down: msg.WorkerDown) -> None:
        known = node.workers.pop(down.worker, None)
        if down.exit_code == EXIT_BAD_INPUT and self.turn.epoch == 0:
            self.ending.failed(down.detail, EXIT_BAD_INPUT)
            return
        if down.exit_code == EXIT_BAD_INPUT:
            self.turn.send(node.connection, msg.EndNode(exit_code=EXIT_BAD_INPUT, why=down.detail, alone=True))
        if self.over is not None or known is None:
            return
        self.turn.emit(ev.FailureDetected, node=node.name, kind=down.kind, after_s=0.0, detail=down.detail)
        self._workers_gone([down.worker], self.turn.now)

    # ---- stopping and deciding ----

    def _break(self, failed_at: float | None = None) -> None:
        """An epoch is broken: all members freeze and report."""
        if self.stopping.stop is not None or self.record.plan is None:
            return
        self.progress.failed(self.turn.now if failed_at is None else failed_at)
        self.stopping.begin()
        self._maybe_decide()

    def _report(self, report: msg.Report) -> None:
        if self.stopping.stop is not None:
            self.stopping.report(report)
            self._maybe_decide()
        elif self.turn.epoch and report.epoch >= self.turn.epoch:
            # Kept by the agent from before this coordinator's start: the epoch was being left.
            self._break()

    def _maybe_decide(self) -> None:
        record, stopping = self.record, self.stopping
        if stopping.stop is None or record.plan is None or record.outcome:
            return
        if stopping.awaited(self.members, self._absent) or lacks_slots(self.turn, self.config):
            return
        if stopping.complaint is not None and len(stopping.reports) >= len(record.plan.workers):
            node, detail = stopping.complaint
            self.turn.emit(ev.FailureDetected, node=node, kind="connection_lost", after_s=0.0, detail=detail)
        reports = stopping.end()
        ledger = self.ledger
        for report in reports.values():
            if report.applied is not None:
                ledger.settle(report.worker, report.applied)
        ledger.fill_in(reports.values(), record.global_batch)
        if self.config.on_failure == RESTART:
            self._restart()
            return
        arrivals = [info.id for info in self.members.workers() if info.id not in reports]
        verdict = decide(record.decision, ledger.committed, list(reports.values()), record.checkpoints, arrivals)
        if lost := lost_of(record, verdict, reports):
            verdict = without_state(ledger.committed, record.checkpoints, [], lost)
        self._carry_out(verdict, [*reports, *arrivals])

    def _carry_out(self, verdict: Verdict | NothingLeft, workers: list[str]) -> None:
        if isinstance(verdict, NothingLeft):
            self.ending.failed(verdict.why)
            return
        if verdict.decision.kind is DecisionKind.START and not verdict.holders:
            send_away_all(self.turn, "no worker's initial state is whole")
            workers = []
        if not workers:
            # Nobody is there; whoever comes first begins from what this verdict says.
            self.turn.change(plan=None, pending=None, decision=verdict.decision)
            self.stopping.reports = {}
            return
        decision = verdict.decision
        reason = "failure" if self.record.plan else "start"
        if decision.kind is DecisionKind.ROLLBACK or (decision.kind is DecisionKind.START and self.ledger.committed):
            reason = "rollback" if self.record.plan or self.ledger.committed else "start"
            why = verdict.why if reason == "rollback" else "the job resumes from its checkpoint"
            why = "all workers were started again" if self.progress.restarting else why
            self.ledger.reset(decision.applied)
            self.checkpoints.rolled_back()
            self.turn.emit(ev.RolledBack, to_step=decision.applied, why=why)
        self.ledger.undo_after(decision.applied)
        self._begin(workers, decision, list(verdict.holders), reason)

    def _restart(self) -> None:
        """Stop all workers and start others, which begin from the newest checkpoint once all of them are there."""
        workers = self.turn.planned
        self.progress.restarts()
        self.turn.change(plan=None, pending=None, decision=None)
        self.stopping.reports = {}
        self.renewing.renew(map(node_of, workers), "all workers are started again")
        self._maybe_start()

    def _begin(self, workers: list[str], decision: msg.Decision, holders: list[str], reason: str) -> None:
        """Persist the next epoch and tell its members."""
        record, turn = self.record, self.turn
        experts = held_experts(decision, self.stopping.reports)
        plan = make_plan(record, self.members, workers, holders, experts, self.config, self.loads.tokens)
        if isinstance(plan, Shortage):
            self.ending.failed(str(plan), EXIT_BAD_INPUT)
            return
        begin = msg.Begin(
            plan=plan, decision=decision, assignment=first_assignment(record, plan, decision, self.stopping.reports)
        )
        anew = decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK)
        self.progress.decided(plan, record.plan, decision)
        turn.change(
            epoch=plan.epoch, plan=plan, pending=None, decision=decision, lineage=plan.epoch if anew else record.lineage
        )
        # Whoever was a member and is none any more holds a state that soon is an old one: fresh processes can be used.
        rest = [worker for worker in self.stopping.reports if plan.rank(worker) is None]
        idle = [node_of(worker) for worker in rest if self.members.worker(worker) is not None]
        self.renewing.renew(idle, "the node waits for its turn")
        self.stopping.reports = {}
        for info in self.members.workers():
            info.finished = False
        announce_epoch(self.turn, plan, reason)
        for worker in plan.workers:
            turn.order(worker, begin)
        self._release()

    def _maybe_start(self) -> None:
        """Begin the first epoch (or the first after everybody was gone) once enough nodes are here."""
        if self.record.plan is not None or self.stopping.stop is not None or self.over is not None:
            return
        complete = [node for node in self.members.nodes.values() if node.complete]
        needed = self.config.start_nodes if self.record.epoch == 0 else 1
        lacking = self.record.epoch and lacks_slots(self.turn, self.config)
        if self.renewing.awaited or len(complete) < needed or lacking:
            return
        workers = [info.id for info in self.members.workers()]
        known, anew = self.record.checkpoints, self.config.on_failure == RESTART
        self._carry_out(without_state(self.ledger.committed, known, workers, anew=anew), workers)

    def _maybe_prepare(self) -> None:
        plan = self._settled
        if plan is None:
            pass
        elif self.config.on_failure != RESTART:
            self.joining.prepare(plan)
        elif self.joining.newcomers(plan):
            self._break()  # only a restart lets them in

    @property
    def _settled(self) -> EpochPlan | None:
        """The plan in force, where nothing is about to change it; else None."""
        plan = self.record.plan
        calm = self.stopping.stop is None and self.record.pending is None and self.over is None and not self._absent
        return plan if calm and self.members.entered(plan) else None

    def _planned(self, planned: Planned) -> None:
        plan = self._settled
        experts = self.rebalancing.weigh(planned, plan, self.progress.costs)
        if plan is not None and experts is not None:
            self.joining.rearrange(plan, experts)

    def _undo_pending(self, failed_at: float) -> None:
        """A joiner is gone or stuck. Once armed, some may have swapped already: only Stop is safe then."""
        if self.record.pending is None or self.stopping.stop is not None:
            return
        if self.joining.armed:
            self._break(failed_at)
        else:
            self.joining.void()

    def _promote(self, step: int) -> None:
        """`step` passed with every swap flag up: the pending epoch is the job's from here on."""
        if self.stopping.stop is None:  # a failure voids a pending swap, whoever has passed it
            self.joining.promote(step, self.progress)

    # ---- progress ----

    def _release(self) -> None:
        """Announce what all members have applied; while reports are awaited nobody knows who a member is."""
        plan = self.record.plan
        if plan is None or self.stopping.stop is not None:
            return
        self.progress.release(plan)
        self.checkpoints.accept(self.ledger.committed)
        self._maybe_finish()
        settled = self._settled
        if settled is not None:
            self.rebalancing.ask(settled, self.ledger.committed)

    def _maybe_finish(self) -> None:
        plan = self.record.plan
        if plan is None or self.stopping.stop is not None or self.over is not None:
            return
        if self.progress.finished(plan):
            self.ending.done(self.progress)
