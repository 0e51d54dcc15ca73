"""The invariants of a job (DESIGN.md 3), checked after every event from outside the machines.

`_truth` is the decided lineage: the correct state after each step. A step enters it when the first member of the newest
persisted plan applies it. A decision that undoes the step removes it.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.coordination.failures.class_table import REPLICA_DIFFERS
from holdfast.coordination.failures.mismatch import RECEIVED
from holdfast.coordination.inputs import Input, Received
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.missing_nodes import NO_NODE_CONNECTED
from holdfast.coordination.roles import every_role, unit_of
from holdfast.coordination.worker.tasks import Compute
from holdfast.errors import EXIT_DONE, EXIT_INTERRUPTED
from holdfast.observability.history.audit import audit_events
from holdfast.protocol import events as ev
from holdfast.protocol.commit import Commit, have_same_lanes
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.agent import CoordinatorMessage, HeardGeneration
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record
from tests.simulation.durable import Truth, wrong_source
from tests.simulation.faults.ends import barred, may_fail, unjust, unsaved, wrong_end, wronged
from tests.simulation.faults.kept_work import KeptWork
from tests.simulation.faults.one_way import wrongly_blamed, wrongly_refused
from tests.simulation.faults.plans import FaultKind
from tests.simulation.faults.put_away import StatesPutAway
from tests.simulation.faults.who_counts import WhoCounts, still_known, wrongly_moved, wrongly_taken_in
from tests.simulation.machines import training
from tests.simulation.machines.experts.stored import broken_guarantee, shape_of
from tests.simulation.world import START, Peer, World


class InvariantError(AssertionError):
    """An invariant is violated."""


class Checker:
    """Checks one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._truth = Truth()
        self._promised: set[str] = set()
        self._work, self._put_away = KeptWork(world.plan), StatesPutAway(world)
        self._record: Record | None = None
        # A node stays here after it is undrained, because an earlier refusal may still arrive.
        self._barred: set[str] = set()
        #: The nodes refused because other nodes could not reach them.
        self.refused: set[str] = set()
        self._counts = WhoCounts()
        #: The nodes with differing workers, and the settings with which each (generation, step, role) passed.
        self._differing = set[str]()
        self._compared: dict[tuple[int, int, int], int] = {}
        #: The last correct parts with their state and step, cached because nearly all members have the same parts.
        self._right: tuple[tuple[int, int], tuple[int, ...]] = ((0, 0), ())
        #: The workers of each generation's plan.
        self._members: dict[int, tuple[str, ...]] = {}
        self._term = 0
        self._commits: dict[int, Commit] = {}
        self._last: ev.AnyEvent | None = None
        #: The time of the last committed step, or of the job's end.
        self.progress_at = world.timeline.now
        #: The position after the journal's events.
        self._position = Position()
        self._generation = 0
        self._outcome = ""
        self._waiting = False
        self._saved: dict[str, int] = {}
        #: The current message of an expelled worker, which must not cause a write.
        self._stale: msg.WorkerMessage | None = None

    # ---- a worker's side ----

    def on_worker_message(self, worker: Peer, message: msg.WorkerMessage) -> None:
        """Check a worker's message; a report is a promise."""
        if isinstance(message, msg.Report):
            self._experts_of_the_step(worker)
            self._promised.add(worker.id)
            if wrong := self._work.reported(message, whole=worker.whole):
                self._fail(wrong)

    def began(self, worker: Peer, order: msg.Begin | msg.BecomeStandby, accepted: bool) -> None:
        """Release a worker from its promise after a Begin, or a BecomeStandby that removes it from its generation."""
        left = isinstance(order, msg.BecomeStandby)
        if not accepted and not (left and worker.machine.plan is None):
            return
        self._promised.discard(worker.id)
        # Other workers may also have its results of a step.
        if left or worker.id in self._counts.were_owed:
            self._work.left(worker.id)
        else:
            self._work.began(worker.id, order)

    def issues(self, worker: Peer, kind: str) -> None:
        """Check a collective that a worker issues; only an expert move may start before its state arrives."""
        self._keeps_promise(worker, "issues a collective")
        if kind != "move" and not worker.whole:
            self._fail(f"{worker.id} takes part in a step without a complete state")

    def passes(self, worker: Peer) -> None:
        """Check a worker with a completed commit operation."""
        self._keeps_promise(worker, "passed")
        compared, machine = worker.machine.fingerprint, worker.machine
        place = machine.generation, machine.step, worker.place
        if compared is None or self._compared.setdefault(place, compared.settings) != compared.settings:
            self._fail(f"{worker.id} passes step {machine.step} with settings that differ from its role: {compared}")

    def lets_differ(self, node: str) -> None:
        """Note that a worker on a node gets settings that differ from all others."""
        self._differing.add(node)

    def refuses(self, worker: Peer, of_places: tuple[training.SimReduced, ...]) -> None:
        """Check that a refused step result is wrong: a corruption must have changed a worker's micro-batches.

        Args:
            worker: The worker that refuses.
            of_places: The reduced values of each worker of a replica group.
        """
        if of_places[0].v.unequal_roles:
            if not self._differing:
                self._fail(f"{worker.id} refuses a step because workers differ, but no fault made workers differ")
            return
        step, kinds = worker.machine.step, {fault.kind for fault in self._world.plan.faults}
        expected = training.expected_parts(worker.state, step, self._world.plan.micro_batches)
        if FaultKind.CORRUPT_SUM not in kinds or all(reduced.parts == expected for reduced in of_places):
            self._fail(f"{worker.id} refuses step {step}, which is correct or was not corrupted by a fault")

    def summed(self, worker: Peer, task: Compute) -> None:
        """Check that a worker has exactly the sums that its machine lists."""
        if set(task.summed) != set(worker.gradients):
            self._fail(f"{worker.id} holds {sorted(worker.gradients)}, its machine says {sorted(task.summed)}")
        if wrong := self._work.redone_by(worker.id, task.step, task.summed):
            self._fail(wrong)
        if not worker.whole:
            self._fail(f"{worker.id} computes without a complete state")
        self._experts_of_the_step(worker)
        if worker.experts is not None and not worker.experts.serves(task.step - 1):
            self._fail(f"{worker.id} serves experts without the state before step {task.step}")

    def applied(self, worker: Peer, before: int, reduced: training.SimReduced, commit: Commit) -> None:
        """Check a step that a worker has applied."""
        machine, plan = worker.machine, self._world.plan
        self._keeps_promise(worker, "applied")
        step = machine.applied or 0
        if not self._right_parts(reduced.parts, before, step):
            self._fail(f"{worker.id} applied step {step} without each micro-batch exactly once: {reduced}")
        if training.wrong_v(plan, reduced, commit):
            self._fail(f"{worker.id} applied step {step} with wrong samples or logged values: {commit}")
        if worker.id in self._counts.workers:
            self.holds(worker)
            known = self._commits.setdefault(step, commit)
            if not training.same_bits(known, commit):
                self._fail(f"{worker.id} applied step {step} with {commit}, not the recorded {known}")

    def _right_parts(self, parts: tuple[int, ...], state: int, step: int) -> bool:
        """Return whether these parts of a step contain every micro-batch exactly once."""
        known, right = self._right
        if known == (state, step) and parts is right:
            return True
        if parts != training.expected_parts(state, step, self._world.plan.micro_batches):
            return False
        self._right = (state, step), parts
        return True

    def holds(self, worker: Peer) -> None:
        """Check that a worker's applied, received or loaded state is on the decided lineage."""
        step = worker.machine.applied or 0
        right = worker.id not in self._counts.workers
        if not (right or self._truth.hold(step, worker.place, worker.places, worker.state)):
            self._fail(f"{worker.id} has a state of step {step} that differs from the lineage")

    def _experts_of_the_step(self, worker: Peer) -> None:
        """Check that all experts the machine would report are in memory with the applied step."""
        machine, stored = worker.machine, worker.experts
        if stored is None or machine.holding is None or machine.applied is None:
            return
        if not stored.are_of(machine.holding.held, machine.applied):
            self._fail(f"{worker.id} does not have the experts of step {machine.applied} that it would report")

    def lacks_experts(self, worker: Peer, plan: msg.GenerationPlan, why: str) -> NoReturn:
        """Fail because a worker cannot apply its placement."""
        self._fail(f"{worker.id} lacks experts in generation {plan.generation}: {why}")

    def _keeps_promise(self, worker: Peer, what: str) -> None:
        if worker.id in self._promised:
            self._fail(f"{worker.id} {what} after its report and before the next Begin")

    # ---- the coordinator's side ----

    def handles(self, event: Input | None) -> msg.WorkerMessage | None:
        """Note an input; return an expelled worker's message without effect, which is any except checkpoint news."""
        message = event.message if isinstance(event, Received) else None
        inner = message.message if isinstance(message, msg.FromWorker) else None
        counts = inner is None or inner.worker not in self._counts.expelled or isinstance(inner, msg.CheckpointNews)
        self._stale = None if counts else inner
        return self._stale

    def goes_on(self, stale: msg.WorkerMessage | None) -> None:
        """Continue an input's effects after another input; `stale` is the result of `handles`."""
        self._stale = stale

    def persisted(self, machine: Coordinator, record: Record) -> None:
        """Check a record that a coordinator has written."""
        if record.term < self._term or (record.term == self._term and machine is not self._writer):
            self._fail(f"term {record.term} of a superseded coordinator was written after term {self._term}")
        self._without_effect(record)
        self._term, self._writer = record.term, machine
        before, self._record = self._record, record
        self._barred |= barred(record)
        again = self._counts.take(record)
        if wrong := still_known(self._counts.expelled, machine.members, self._world):
            self._fail(wrong)
        if before is not None and before.plan is record.plan and before.pending is record.pending:
            return
        if before is not None and (wrong := wrongly_moved(before, record)):
            self._fail(wrong)
        if record.plan is not None:
            self._members[record.plan.generation] = record.plan.workers
        plans = [plan for plan in (record.plan, record.pending) if plan is not None]
        if before is None:
            return
        for plan in plans:
            self._guarantees(plan)
        if record.generation < before.generation or record.lineage < before.lineage:
            self._fail(f"generation or lineage went back: {before} {record}")
        if wrong := wrongly_taken_in(again, self._world):
            self._fail(wrong)
        promoted = (
            record.plan is not None
            and before.pending is not None
            and record.plan.generation == before.pending.generation
        )
        if record.decision is not before.decision and not promoted:
            self._decided(record)

    def _guarantees(self, plan: msg.GenerationPlan) -> None:
        """Check that every expert is on the announced and possible number of distinct nodes.

        If a plan moves the experts of draining nodes, the other nodes hold as many copies as they have room for.
        """
        shape, experts = shape_of(self._world.plan), plan.expert_plan
        record = self._record
        hands_over = self._world.plan.pooled or (experts is not None and experts.beside)
        wanted_back = [one.node for one in record.leaving] if hands_over and record is not None else []
        if shape is not None and (wrong := broken_guarantee(plan, shape, wanted_back)):
            self._fail(f"generation {plan.generation}: {wrong}")

    def _decided(self, record: Record) -> None:
        """Check a written decision: it undoes no committed step, and its members with state can follow it."""
        decision, plan = record.decision, record.plan
        if decision is None:
            return
        # Without a plan no worker can follow the decision; a later decision applies to new workers.
        if plan is not None:
            kept = 0 if decision.kind is DecisionKind.START else decision.applied
            self._truth.forget_after(-1 if decision.kind is DecisionKind.START else kept)
            self._commits = {step: commit for step, commit in self._commits.items() if step <= kept}
        if decision.kind is DecisionKind.FORWARD and decision.commit is not None:
            known = self._commits.get(decision.applied, decision.commit)
            if not have_same_lanes(known, decision.commit):
                self._fail(f"FORWARD({decision.applied}) carries {decision.commit}, but {known} was applied")
            self._commits[decision.applied] = decision.commit
        if decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD) and decision.applied < self._committed:
            self._fail(f"{decision} undoes step {self._committed}, which is committed")
        if plan is not None and (wrong := self._work.undone_by(decision, plan.workers, plan.places)):
            self._fail(wrong)
        if wrong := self._put_away.decided(record, decision, self._writer.members.nodes if self._writer else ()):
            self._fail(wrong)
        self._goes_back_to_its_own(decision, record.layout.places)
        for worker in plan.workers if plan else ():
            process = self._world.worker(worker)
            settled = decision.kind is DecisionKind.REDO and plan is not None and worker not in plan.sources
            if process is not None and settled and process.machine.applied == decision.applied and process.whole:
                self.holds(process)

    def _goes_back_to_its_own(self, decision: msg.Decision, places: int) -> None:
        """Check that a decision's checkpoint exists with a state on the lineage."""
        left = [name for name in self._saved if not self._world.checkpoints.files[name].damaged]
        if decision.kind is DecisionKind.START and self._committed and left:
            self._fail(f"the job starts from the beginning although the checkpoints {left} exist")
        if decision.kind is DecisionKind.ROLLBACK:
            world = self._world
            known = self._truth, world.checkpoints, world.memory, places
            if wrong := wrong_source(decision.source, decision.applied, *known):
                self._fail(f"{decision} {wrong}")

    def on_outdated_message(self, heard: HeardGeneration, message: CoordinatorMessage, record: Record) -> None:
        """Check a message from a coordinator with an outdated store to an agent."""
        if heard.generation > record.generation:
            self._fail(f"an outdated store of generation {record.generation} led to {message} for {heard}")

    def emitted(self, machine: Coordinator, event: ev.AnyEvent) -> None:
        """Check an event that a coordinator has written to the journal."""
        self._without_effect(event)
        self._in_order(event)
        if wrong := wronged(self._world.plan, self._record, event):
            self._fail(wrong)
        if isinstance(event, ev.StepCommitted | ev.JobFinished | ev.JobFailed):
            self.progress_at = self._world.timeline.now
        match event:
            case ev.StepCommitted():
                self._step_committed(event)
            case ev.NodeRefused() | ev.FailureDetected():
                self._accused(event)
            case ev.RolledBack(to_step=step) if step > self._committed:
                self._fail(f"rolled back forward, from step {self._committed} to {step}")
            case ev.GenerationStarted(generation=generation):
                if generation <= self._generation:
                    self._fail(f"generation {generation} was announced after generation {self._generation}")
            case ev.CheckpointSaved(step=step):
                self._checkpoint_saved(step)
            case ev.JournalRepaired():
                self._repaired(event)
            case ev.JobFinished():
                self._job_finished(event)
            case ev.JobFailed(why=why):
                self._failed(machine, why)
            case _:
                pass
        self._follow(event)

    def _wrongly_blamed(self, event: ev.FailureDetected) -> str:
        """Return the error if a node is blamed wrongly, else ""."""
        # If two workers differ, the worker that received its state is replaced.
        differs = event.node in self._differing or RECEIVED in event.detail
        if event.category == REPLICA_DIFFERS and not differs:
            return f"{event.node} is replaced because it differs, but it does not differ"
        return wrongly_blamed(self._world.plan, self._world.data_plane, self._record, event)

    def _accused(self, event: ev.NodeRefused | ev.FailureDetected) -> None:
        """Check that a refused or blamed node is at fault, not a connection between other nodes."""
        if isinstance(event, ev.NodeRefused):
            self.refused.add(event.node)
            wrong = wrongly_refused(self._world.plan, self._world.data_plane, self._record, event)
        else:
            wrong = self._wrongly_blamed(event)
        if wrong:
            self._fail(wrong)

    def journal_cut(self) -> None:
        """Recompute the checked state after the journal lost its newest events."""
        self._last, self._position = None, Position()
        self._generation, self._waiting, self._outcome = 0, False, ""
        for event in self._world.journal.events:
            self._follow(event)
        saved_steps = {event.step for event in self._world.journal.events if isinstance(event, ev.CheckpointSaved)}
        self._saved = {name: step for name, step in self._saved.items() if step in saved_steps}

    def _follow(self, event: ev.AnyEvent) -> None:
        self._last, self._position = event, self._position.after(event)
        match event:
            case ev.JobWaiting(why=why):
                self._waiting = why != NO_NODE_CONNECTED  # Then the job may still train.
            case ev.GenerationStarted(generation=generation):
                self._generation, self._waiting = generation, False
            case ev.JournalRepaired() | ev.CoordinatorRestarted():
                self._waiting = False  # A later coordinator reports a wait itself.
            case ev.JobFinished(resumable=resumable):
                self._outcome = "" if resumable else "done"
            case ev.JobFailed():
                self._outcome = "failed"
            case _:
                pass

    def _repaired(self, event: ev.JournalRepaired) -> None:
        """Check that a repair event has the exact end of the lost events."""
        plan, step = self._world.plan, event.to_step
        if not self._world.journal.edited:
            self._fail(f"the journal was not on disk when its record was: {event}")
        if step and not self._truth.knows(step):
            self._fail(f"the repair says that the journal ended at step {step}, which no member applied")
        if event.samples != step * plan.micro_batches * plan.micro_batch:
            self._fail(f"the repair says that the journal ended at step {step} with {event.samples} samples")

    def _job_finished(self, event: ev.JobFinished) -> None:
        interrupted = event.resumable and self._world.interrupted
        wrong = wrong_end(self._world.plan, event, self._commits) if not interrupted else ""
        if wrong or event.steps != self._committed:
            self._fail(f"the job finished, but {wrong or 'not at the last step of the journal'}: {event}")

    @property
    def _committed(self) -> int:
        return self._position.step

    def _in_order(self, event: ev.AnyEvent) -> None:
        last = self._last
        first = event.from_seq if isinstance(event, ev.JournalRepaired) else event.seq
        if first != (last.seq if last else 0) + 1:
            self._fail(f"{event} does not follow {last}")
        if isinstance(event, ev.RECORDED) and (self._record is None or event.seq > self._record.newest_event):
            self._fail(f"the record does not contain {event}")
        if (last is None) != isinstance(event, ev.JobStarted) and not isinstance(event, ev.JournalRepaired):
            self._fail(f"job_started must be the first event and occur only once: {event}")
        if last is not None and event.term < last.term:
            self._fail(f"{event} of an older term after {last}")
        if isinstance(event, ev.ActionRequested) and event.about_seq != event.seq - 1:
            self._fail(f"{event} does not directly follow the event that it refers to")
        if self._outcome and not isinstance(event, ev.NodeLeft | ev.CoordinatorRestarted | ev.ActionRequested):
            self._fail(f"{event} after the job is {self._outcome}")

    def _step_committed(self, event: ev.StepCommitted) -> None:
        step, plan = event.step, self._world.plan
        if not self._world.shows(event.time) or event.step_s < 0:
            self._fail(f"step {step} was committed at a time that no coordinator's clock showed: {event}")
        if self._waiting:
            self._fail(f"step {step} was committed while the job waits for nodes")
        if step != self._committed + 1:
            self._fail(f"step {step} was committed after step {self._committed}")
        if event.samples != plan.micro_batches * plan.micro_batch:
            self._fail(f"step {step} was committed with {event.samples} samples")
        if event.last_step not in (0, plan.steps):
            self._fail(f"step {step} was committed with a wrong last step: {event.last_step}")
        commit = self._commits.get(step)
        if commit is None or not self._truth.knows(step):
            self._fail(f"step {step} was committed, but no member applied it")
        if event.loss != event.loss:
            self._nobody_knows(step)
        elif training.is_announced_wrongly(event, commit):
            self._fail(f"step {step} was announced as {event}, but the lineage has {commit}")
        # The newest record may already have a later generation. If all members with a state leave, the others have
        # none.
        here = [one for one in map(self._world.worker, self._members[event.generation]) if one is not None]
        late = [one.id for one in here if (one.machine.applied or 0) < step]
        if late and any(one.machine.applied is not None for one in here):
            self._fail(f"step {step} was committed, but {late} have not applied it")

    def _nobody_knows(self, step: int) -> None:
        """Check that the loss of a step is unknown only if no member with its state is alive."""
        for worker in self._counts.workers:
            process = self._world.worker(worker)
            if process is not None and (process.machine.applied or 0) >= step:
                self._fail(f"step {step} was committed without its loss, although {worker} is alive")

    def _checkpoint_saved(self, step: int) -> None:
        assert self._record is not None
        # The first ranks of two successive generations may save the same step.
        known = (known for known in self._record.checkpoints if known.step == step and known.name not in self._saved)
        saved = next(known, None)
        if saved is None:
            self._fail(f"a checkpoint of step {step} was saved, but the record does not contain it: {self._record}")
        file = self._world.checkpoints.files.get(saved.name)
        if file is None or file.step != step:
            self._fail(f"checkpoint {saved} of step {step} is {file}")
        if step > self._committed or not self._truth.all_right(step, file):
            self._fail(f"checkpoint {saved} is not on the decided lineage: {file}")
        self._saved[saved.name] = step

    def pruned(self, name: str) -> None:
        """Check that a removed checkpoint is not needed, because the job has a newer complete one."""
        known = self._record.checkpoints if self._record else ()
        if any(one.name == name for one in known):
            self._fail(f"checkpoint {name} was removed, but the record needs it: {known}")
        if name in self._saved and not known:
            self._fail(f"checkpoint {name} was removed, but the record has no other")
        self._saved.pop(name, None)

    def _without_effect(self, write: object) -> None:
        if self._stale is not None:
            self._fail(f"{self._stale} of an expelled worker had an effect: {write}")

    # ---- how it ends ----

    def refused_for_good(self, node: str, refused: msg.Refused) -> None:
        """Check that a permanently refused node is quarantined, drained or was reported as refused."""
        if not self._outcome and node not in self._barred | self.refused:
            self._fail(f"{node} was refused permanently: {refused.why}")

    def _failed(self, machine: Coordinator, why: str) -> None:
        """Check that a job fails only if no state is left, all scripts raise, or a step is refused twice."""
        if unsaved(self._world.plan, why, self._committed, self._saved.values()):
            self._fail(f"the job failed, but step {self._committed} is not saved: {self._saved}")
        if may_fail(self._world.plan, why):
            return
        if "live copy" not in why:
            self._fail(f"the job failed: {why}")
        places, able = machine.record.layout.places, list[str]()
        raised = {unit_of(info.id, places) for info in machine.members.workers() if info.raised}
        # A replica group with an exception of its script cannot continue.
        for info in machine.members.workers():
            process = None if unit_of(info.id, places) in raised else self._world.worker(info.id)
            # With experts the dense state alone is not enough.
            if process is not None and process.experts is None:
                able += [info.id] * (process.whole and (process.machine.applied or 0) >= self._committed > 0)
        if every_role(able, places):
            self._fail(f"the job failed although {able} have the state of step {self._committed}: {why}")
        left = [name for name in self._saved if not self._world.checkpoints.files[name].damaged]
        if left or (left := self._put_away.lost(machine.members.nodes)):
            self._fail(f"the job failed although {left} is available: {why}")

    def job_ended(self, exit_code: int, why: str) -> None:
        """Check that the journal already has the job's end, unless the user has interrupted it."""
        if exit_code == EXIT_INTERRUPTED and not self._outcome and self._world.interrupted:
            return
        if (exit_code == EXIT_DONE) != (self._outcome == "done") or not self._outcome:
            self._fail(f"the job ended with {exit_code} ({why}), but the journal has {self._outcome!r}")

    def finished(self) -> None:
        """Check the journal at the end of the run."""
        if not self._outcome and not self._world.interrupted:
            self._fail("the run has ended, but the journal has no outcome")
        events = self._world.journal.events
        if findings := (*audit_events(events).findings, *unjust(self._world.plan, events)):
            self._fail(f"the journal does not prove the run, or an action was not justified: {findings}")

    def stuck(self) -> NoReturn:
        """Fail because no step was committed for too long, or the run has too many events."""
        self._fail("the job is stuck")

    def _fail(self, what: str) -> NoReturn:
        now = self._world.timeline.now - START
        raise InvariantError(f"at {now:.4f}: {what}\nseed {self._world.plan.seed}: {self._world.plan}")

    _writer: Coordinator | None = None
