"""What must hold after every event (DESIGN.md 3), checked as the events happen, from outside the machines.

`_truth` is the decided lineage: the state that each step must have led to. A step enters it when the first member of
the newest persisted plan applies it; a decision that undoes the step takes it out again.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.coordination.failures.class_table import REPLICA_DIFFERS
from holdfast.coordination.failures.mismatch import RECEIVED
from holdfast.coordination.inputs import Input, Received
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.waiting import NO_NODE_CONNECTED
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
    """Something that must never happen did."""


class Checker:
    """Watches one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._truth = Truth()
        self._promised: set[str] = set()
        self._work, self._put_away = KeptWork(world.plan), StatesPutAway(world)
        self._record: Record | None = None
        self._barred: set[str] = set()  # (who is let back may still hear of an earlier refusal)
        #: the nodes that other nodes could not reach
        self.refused: set[str] = set()
        self._counts = WhoCounts()
        #: the nodes with a worker whose settings differ, and with which settings (generation, step, role) has passed
        self._differing = set[str]()
        self._compared: dict[tuple[int, int, int], int] = {}
        #: parts of a reduction that were found right, and for which state and step: nearly all members have the same
        self._right: tuple[tuple[int, int], tuple[int, ...]] = ((0, 0), ())
        #: generation -> the workers of its plan
        self._members: dict[int, tuple[str, ...]] = {}
        self._term = 0
        self._commits: dict[int, Commit] = {}
        self._last: ev.AnyEvent | None = None
        #: when a step was committed last, or the job ended
        self.progress_at = world.timeline.now
        #: what the journal's events add up to
        self._position = Position()
        self._generation = 0
        self._outcome = ""
        self._waiting = False
        self._saved: dict[str, int] = {}
        #: the message of an expelled worker that is being handled: no write may come of it
        self._stale: msg.WorkerMessage | None = None

    # ---- a worker's side ----

    def told(self, worker: Peer, message: msg.WorkerMessage) -> None:
        """A worker says something; a report is a promise."""
        if isinstance(message, msg.Report):
            self._experts_of_the_step(worker)
            self._promised.add(worker.id)
            if wrong := self._work.reported(message, whole=worker.whole):
                self._fail(wrong)

    def began(self, worker: Peer, order: msg.Begin | msg.StandBy, accepted: bool) -> None:
        """A Begin reached a worker; or the word that it has left its generation, and promises nothing any more."""
        left = isinstance(order, msg.StandBy)
        if not accepted and not (left and worker.machine.plan is None):
            return
        self._promised.discard(worker.id)
        if left or worker.id in self._counts.were_owed:  # (others have what it had of a step, too, perhaps)
            self._work.left(worker.id)
        else:
            self._work.began(worker.id, order)

    def issues(self, worker: Peer, kind: str) -> None:
        """A worker issues a collective: of a step, or the one that moves experts, while its state may still come."""
        self._keeps_promise(worker, "issues a collective")
        if kind != "move" and not worker.whole:
            self._fail(f"{worker.id} takes part in a step without a whole state")

    def passes(self, worker: Peer) -> None:
        """A worker's commit operation returns v."""
        self._keeps_promise(worker, "passed")
        compared, machine = worker.machine.fingerprint, worker.machine
        place = machine.generation, machine.step, worker.place
        if compared is None or self._compared.setdefault(place, compared.settings) != compared.settings:
            self._fail(
                f"{worker.id} passes step {machine.step} with other settings than others of its role: {compared}"
            )

    def lets_differ(self, node: str) -> None:
        """A worker of a node is given settings that no other worker has."""
        self._differing.add(node)

    def refuses(self, worker: Peer, of_places: tuple[training.SimReduced, ...]) -> None:
        """Check that a refused v is wrong: a corruption must have left some place without each micro-batch once.

        Args:
            of_places: what was reduced at each place of a unit.
        """
        if of_places[0].v.unequal_roles:
            if not self._differing:
                self._fail(f"{worker.id} refuses a step because workers differ, and nobody lets any differ")
            return
        step, kinds = worker.machine.step, {fault.kind for fault in self._world.plan.faults}
        expected = training.expected_parts(worker.state, step, self._world.plan.micro_batches)
        if FaultKind.CORRUPT_SUM not in kinds or all(reduced.parts == expected for reduced in of_places):
            self._fail(f"{worker.id} refuses step {step}, which is right, or wrong by nobody's corruption")

    def summed(self, worker: Peer, task: Compute) -> None:
        """What the machine says is summed must be there, and nothing else."""
        if set(task.summed) != set(worker.gradients):
            self._fail(f"{worker.id} holds {sorted(worker.gradients)}, its machine says {sorted(task.summed)}")
        if wrong := self._work.redone_by(worker.id, task.step, task.summed):
            self._fail(wrong)
        if not worker.whole:
            self._fail(f"{worker.id} computes without a whole state")
        self._experts_of_the_step(worker)
        if worker.experts is not None and not worker.experts.serves(task.step - 1):
            self._fail(f"{worker.id} serves experts that are not of the step before {task.step}")

    def applied(self, worker: Peer, before: int, reduced: training.SimReduced, commit: Commit) -> None:
        """A worker applied a step."""
        machine, plan = worker.machine, self._world.plan
        self._keeps_promise(worker, "applied")
        step = machine.applied or 0
        if not self._right_parts(reduced.parts, before, step):
            self._fail(f"{worker.id} applied step {step} with other parts than each micro-batch once: {reduced}")
        if training.wrong_v(plan, reduced, commit):
            self._fail(f"{worker.id} applied step {step} with other samples or logged values than its own: {commit}")
        if worker.id in self._counts.workers:
            self.holds(worker)
            known = self._commits.setdefault(step, commit)
            if not training.same_bits(known, commit):
                self._fail(f"{worker.id} applied step {step} with {commit}, not the recorded {known}")

    def _right_parts(self, parts: tuple[int, ...], state: int, step: int) -> bool:
        """Tell whether these are the parts of a step on a state: every micro-batch exactly once."""
        known, right = self._right
        if known == (state, step) and parts is right:
            return True
        if parts != training.expected_parts(state, step, self._world.plan.micro_batches):
            return False
        self._right = (state, step), parts
        return True

    def holds(self, worker: Peer) -> None:
        """A worker holds a state (applied, received or loaded): it must be that of the decided lineage."""
        step = worker.machine.applied or 0
        right = worker.id not in self._counts.workers
        if not (right or self._truth.hold(step, worker.place, worker.places, worker.state)):
            self._fail(f"{worker.id} has another state of step {step} than the lineage")

    def _experts_of_the_step(self, worker: Peer) -> None:
        """All that the machine would report is in memory, and of the state of the applied step."""
        machine, stored = worker.machine, worker.experts
        if stored is None or machine.holding is None or machine.applied is None:
            return
        if not stored.are_of(machine.holding.held, machine.applied):
            self._fail(f"{worker.id} does not have the experts of step {machine.applied} that it would report")

    def lacks_experts(self, worker: Peer, plan: msg.GenerationPlan, why: str) -> NoReturn:
        """A worker cannot take up the placement that it is given."""
        self._fail(f"{worker.id} lacks experts in generation {plan.generation}: {why}")

    def _keeps_promise(self, worker: Peer, what: str) -> None:
        if worker.id in self._promised:
            self._fail(f"{worker.id} {what} after its report and before the next Begin")

    # ---- the coordinator's side ----

    def handles(self, event: Input | None) -> msg.WorkerMessage | None:
        """An input is handled; return what may have no effect: all of an expelled worker, but its saved parts."""
        message = event.message if isinstance(event, Received) else None
        said = message.message if isinstance(message, msg.FromWorker) else None
        counts = said is None or said.worker not in self._counts.expelled or isinstance(said, msg.CheckpointNews)
        self._stale = None if counts else said
        return self._stale

    def goes_on(self, stale: msg.WorkerMessage | None) -> None:
        """What an input led to goes on, after something else was handled; `stale`: as `handles` returned."""
        self._stale = stale

    def persisted(self, machine: Coordinator, record: Record) -> None:
        """A record was swapped in."""
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
        """Every expert lives on as many distinct nodes as the plan says, and as are possible.

        A plan that gives the experts of leavers to the others has as many copies as these have room for.
        """
        shape, experts = shape_of(self._world.plan), plan.expert_plan
        record = self._record
        hands_over = self._world.plan.pooled or (experts is not None and experts.beside)
        wanted_back = [one.node for one in record.leaving] if hands_over and record is not None else []
        if shape is not None and (wrong := broken_guarantee(plan, shape, wanted_back)):
            self._fail(f"generation {plan.generation}: {wrong}")

    def _decided(self, record: Record) -> None:
        """A decision is written: what it undoes never counted, and its members with state must be able to follow."""
        decision, plan = record.decision, record.plan
        if decision is None:
            return
        if plan is not None:  # (else nobody is there who could follow it: whoever comes is told what is decided then)
            kept = 0 if decision.kind is DecisionKind.START else decision.applied
            self._truth.forget_after(-1 if decision.kind is DecisionKind.START else kept)
            self._commits = {step: commit for step, commit in self._commits.items() if step <= kept}
        if decision.kind is DecisionKind.FORWARD and decision.commit is not None:
            known = self._commits.get(decision.applied, decision.commit)
            if not have_same_lanes(known, decision.commit):
                self._fail(f"FORWARD({decision.applied}) carries {decision.commit}, {known} was applied")
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
        """A checkpoint that a decision names lies there, with a state of the lineage."""
        left = [name for name in self._saved if not self._world.checkpoints.files[name].damaged]
        if decision.kind is DecisionKind.START and self._committed and left:
            self._fail(f"the job begins anew although {left} are there")
        if decision.kind is DecisionKind.ROLLBACK:
            world = self._world
            known = self._truth, world.checkpoints, world.memory, places
            if wrong := wrong_source(decision.source, decision.applied, *known):
                self._fail(f"{decision} {wrong}")

    def told_by_outdated(self, heard: HeardGeneration, message: CoordinatorMessage, record: Record) -> None:
        """A coordinator whose store is older than the job tells an agent something."""
        if heard.generation > record.generation:
            self._fail(f"an outdated store of generation {record.generation} led to {message} for {heard}")

    def emitted(self, machine: Coordinator, event: ev.AnyEvent) -> None:
        """An event is in the journal."""
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
        """Return why a node is blamed wrongly, "" if it is not."""
        # Of two workers that differ, the one that was sent its state goes.
        differs = event.node in self._differing or RECEIVED in event.detail
        if event.category == REPLICA_DIFFERS and not differs:
            return f"{event.node} is replaced because it differs, and it does not"
        return wrongly_blamed(self._world.plan, self._world.data_plane, self._record, event)

    def _accused(self, event: ev.NodeRefused | ev.FailureDetected) -> None:
        """A node is refused or blamed: not if connections between other nodes failed."""
        if isinstance(event, ev.NodeRefused):
            self.refused.add(event.node)
            wrong = wrongly_refused(self._world.plan, self._world.data_plane, self._record, event)
        else:
            wrong = self._wrongly_blamed(event)
        if wrong:
            self._fail(wrong)

    def journal_cut(self) -> None:
        """The journal has lost its newest events: what is left is what was said."""
        self._last, self._position = None, Position()
        self._generation, self._waiting, self._outcome = 0, False, ""
        for event in self._world.journal.events:
            self._follow(event)
        told = {event.step for event in self._world.journal.events if isinstance(event, ev.CheckpointSaved)}
        self._saved = {name: step for name, step in self._saved.items() if step in told}

    def _follow(self, event: ev.AnyEvent) -> None:
        self._last, self._position = event, self._position.after(event)
        match event:
            case ev.JobWaiting(why=why):
                self._waiting = why != NO_NODE_CONNECTED  # Then the job may still train.
            case ev.GenerationStarted(generation=generation):
                self._generation, self._waiting = generation, False
            case ev.JournalRepaired() | ev.CoordinatorRestarted():
                self._waiting = False  # as far as anybody knows; a later coordinator says so itself where it waits
            case ev.JobFinished(resumable=resumable):
                self._outcome = "" if resumable else "done"
            case ev.JobFailed():
                self._outcome = "failed"
            case _:
                pass

    def _repaired(self, event: ev.JournalRepaired) -> None:
        """What stands for lost events says exactly where they ended."""
        plan, step = self._world.plan, event.to_step
        if not self._world.journal.edited:
            self._fail(f"the journal was not on disk when its record was: {event}")
        if step and not self._truth.knows(step):
            self._fail(f"the journal is said to have ended at step {step}, which no member applied")
        if event.samples != step * plan.micro_batches * plan.micro_batch:
            self._fail(f"the journal is said to have ended at step {step} with {event.samples} samples")

    def _job_finished(self, event: ev.JobFinished) -> None:
        interrupted = event.resumable and self._world.interrupted
        wrong = wrong_end(self._world.plan, event, self._commits) if not interrupted else ""
        if wrong or event.steps != self._committed:
            self._fail(f"finished, {wrong or 'not where the journal ends'}: {event}")

    @property
    def _committed(self) -> int:
        return self._position.step

    def _in_order(self, event: ev.AnyEvent) -> None:
        last = self._last
        first = event.from_seq if isinstance(event, ev.JournalRepaired) else event.seq
        if first != (last.seq if last else 0) + 1:
            self._fail(f"{event} does not follow {last}")
        if isinstance(event, ev.RECORDED) and (self._record is None or event.seq > self._record.newest_event):
            self._fail(f"the record does not know of {event}")
        if (last is None) != isinstance(event, ev.JobStarted) and not isinstance(event, ev.JournalRepaired):
            self._fail(f"job_started must be the first event, and no other: {event}")
        if last is not None and event.term < last.term:
            self._fail(f"{event} of an older term after {last}")
        if isinstance(event, ev.ActionRequested) and event.about_seq != event.seq - 1:
            self._fail(f"{event} does not stand right behind what it is about")
        if self._outcome and not isinstance(event, ev.NodeLeft | ev.CoordinatorRestarted | ev.ActionRequested):
            self._fail(f"{event} after the job is {self._outcome}")

    def _step_committed(self, event: ev.StepCommitted) -> None:
        step, plan = event.step, self._world.plan
        if not self._world.shows(event.time) or event.step_s < 0:
            self._fail(f"step {step} was committed at a time that no clock but a wrong one shows: {event}")
        if self._waiting:
            self._fail(f"step {step} was committed while the job waits for nodes")
        if step != self._committed + 1:
            self._fail(f"step {step} was committed after step {self._committed}")
        if event.samples != plan.micro_batches * plan.micro_batch:
            self._fail(f"step {step} was committed with {event.samples} samples")
        if event.last_step not in (0, plan.steps):
            self._fail(f"step {step} was committed as one of {event.last_step}")
        commit = self._commits.get(step)
        if commit is None or not self._truth.knows(step):
            self._fail(f"step {step} was committed, but no member applied it")
        if event.loss != event.loss:
            self._nobody_knows(step)
        elif training.told_wrongly(event, commit):
            self._fail(f"step {step} was announced as {event}, the lineage has {commit}")
        # (The newest record may know a later generation already. Where all leave, who was to be sent a state has none.)
        here = [one for one in map(self._world.worker, self._members[event.generation]) if one is not None]
        late = [one.id for one in here if (one.machine.applied or 0) < step]
        if late and any(one.machine.applied is not None for one in here):
            self._fail(f"step {step} was committed, but {late} have not applied it")

    def _nobody_knows(self, step: int) -> None:
        """The loss of a step is unknown: never while somebody lives who counts, and holds what it has led to."""
        for worker in self._counts.workers:
            process = self._world.worker(worker)
            if process is not None and (process.machine.applied or 0) >= step:
                self._fail(f"step {step} was committed without its loss, although {worker} lives")

    def _checkpoint_saved(self, step: int) -> None:
        assert self._record is not None
        # (Two first ranks may save the same step: that of a generation and that of the one which it was left for.)
        known = (known for known in self._record.checkpoints if known.step == step and known.name not in self._saved)
        saved = next(known, None)
        if saved is None:
            self._fail(f"a checkpoint of step {step} was saved that the record does not know: {self._record}")
        file = self._world.checkpoints.files.get(saved.name)
        if file is None or file.step != step:
            self._fail(f"checkpoint {saved} of step {step} is {file}")
        if step > self._committed or not self._truth.all_right(step, file):
            self._fail(f"checkpoint {saved} is not on the decided lineage: {file}")
        self._saved[saved.name] = step

    def pruned(self, name: str) -> None:
        """A checkpoint is removed: none that the job can go back to, unless it has a newer one that is whole."""
        known = self._record.checkpoints if self._record else ()
        if any(one.name == name for one in known):
            self._fail(f"checkpoint {name} was removed, which the record counts on: {known}")
        if name in self._saved and not known:
            self._fail(f"checkpoint {name} was removed, and the record knows of no other")
        self._saved.pop(name, None)

    def _without_effect(self, write: object) -> None:
        if self._stale is not None:
            self._fail(f"{self._stale} of an expelled worker had an effect: {write}")

    # ---- how it ends ----

    def refused_for_good(self, node: str, refused: msg.Refused) -> None:
        """A node was turned away: it has done nothing wrong, unless it is quarantined, or was reported as refused."""
        if not self._outcome and node not in self._barred | self.refused:
            self._fail(f"{node} was refused for good: {refused.why}")

    def _failed(self, machine: Coordinator, why: str) -> None:
        """NothingLeft, and only where nothing is left; or what all scripts raise, or a second refusal."""
        if unsaved(self._world.plan, why, self._committed, self._saved.values()):
            self._fail(f"the job failed, and step {self._committed} is not saved: {self._saved}")
        if may_fail(self._world.plan, why):
            return
        if "live copy" not in why:
            self._fail(f"the job failed: {why}")
        places, able = machine.record.layout.places, list[str]()
        raised = {unit_of(info.id, places) for info in machine.members.workers() if info.raised}
        for info in machine.members.workers():  # (nobody can go on with who has raised, nor with the rest of its unit)
            process = None if unit_of(info.id, places) in raised else self._world.worker(info.id)
            if process is not None and process.experts is None:  # (else its dense state alone is not enough)
                able += [info.id] * (process.whole and (process.machine.applied or 0) >= self._committed > 0)
        if every_role(able, places):
            self._fail(f"the job failed although {able} hold step {self._committed}: {why}")
        left = [name for name in self._saved if not self._world.checkpoints.files[name].damaged]
        if left or (left := self._put_away.lost(machine.members.nodes)):
            self._fail(f"the job failed although there is {left}: {why}")

    def job_ended(self, exit_code: int, why: str) -> None:
        """A coordinator ends the job: the journal must say so already, unless its user has interrupted it."""
        if exit_code == EXIT_INTERRUPTED and not self._outcome and self._world.interrupted:
            return
        if (exit_code == EXIT_DONE) != (self._outcome == "done") or not self._outcome:
            self._fail(f"the job ended with {exit_code} ({why}); the journal says {self._outcome!r}")

    def finished(self) -> None:
        """The run is over."""
        if not self._outcome and not self._world.interrupted:
            self._fail("the run is over and the journal does not say how")
        events = self._world.journal.events
        if findings := (*audit_events(events).findings, *unjust(self._world.plan, events)):
            self._fail(f"the journal does not prove what was done, or that it was just: {findings}")

    def stuck(self) -> NoReturn:
        """No step was committed for longer than may be, or far too much has happened: the job does not end."""
        self._fail("the job is stuck")

    def _fail(self, what: str) -> NoReturn:
        now = self._world.timeline.now - START
        raise InvariantError(f"at {now:.4f}: {what}\nseed {self._world.plan.seed}: {self._world.plan}")

    _writer: Coordinator | None = None
