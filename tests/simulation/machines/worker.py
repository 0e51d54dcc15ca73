"""One simulated worker process: a training thread and a listener around `WorkerMachine`, with a fake model.

The training thread does one thing at a time (`busy`). A Halt makes it leave collectives and transfers, never a
micro-batch or an apply. A half-written state is garbage: a value that no other process has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.coordination.worker import tasks
from holdfast.protocol.commit import with_flags
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.fingerprint import Fingerprint, fingerprint_contribution
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import index_of
from holdfast.protocol.plan import Phase
from tests.simulation.collectives import Group, Underway
from tests.simulation.faults.plans import Raises
from tests.simulation.invariants import Checker
from tests.simulation.machines import training
from tests.simulation.machines.building import Builder
from tests.simulation.machines.entering import SimEntrance
from tests.simulation.machines.experts.moving import Mover
from tests.simulation.machines.experts.stored import StoredExperts, shape_of
from tests.simulation.machines.host import attachment, raised_message
from tests.simulation.machines.saving import Saver, SimWriter, SnapshotCopier
from tests.simulation.machines.transfer import Pusher
from tests.simulation.machines.unit import Consent, Page, Work
from tests.simulation.process import Process, SimPage
from tests.simulation.world import World


class WorkerSurroundings(Protocol):
    """The operations of the cluster that a worker process uses."""

    world: World
    checker: Checker

    def boundary(self, worker: SimWorker, name: str) -> bool: ...


class HomeAgent(Protocol):
    """The operations of its agent that a worker process uses."""

    name: str
    writer: SimWriter

    def unit_of(self, worker: str, places: int) -> Page | None: ...

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def relay(self, worker: SimWorker, message: msg.WorkerMessage) -> None: ...

    def worker_ended(self, worker: SimWorker, code: int, kind: FailureKind, final: bool = False) -> None: ...

    def worker_raised(self, worker: SimWorker, error: msg.ScriptError | None) -> None: ...


class SimWorker(Process):
    """A worker process with its machine, its state and its gradients."""

    def __init__(self, cluster: WorkerSurroundings, agent: HomeAgent, worker: str, pid: int) -> None:
        super().__init__()
        self.id, self.pid, self.agent, self.node = worker, pid, agent, agent.name
        self.world, self.checker = cluster.world, cluster.checker
        self._cluster = cluster
        plan, parts = self.world.plan, self.world.parts
        shape = shape_of(plan)
        self.experts = StoredExperts(shape) if shape else None
        holding = HeldExperts(shape) if shape else None
        self._mover = Mover(self, self.experts, holding) if self.experts and holding else None
        self.machine = parts.worker(worker, samples=self.world.samples, holding=holding)
        #: The generation and step of the current gradients.
        self._attempt = (0, 0)
        #: The model's state; garbage while it is being written.
        self.state = training.initial_state(pid)
        self.whole = True
        self.gradients: training.SimSums = {}
        self.reduced: training.SimReduced | None = None
        #: The results of the newest reduction for all workers of the replica group.
        self._of_places: tuple[training.SimReduced, ...] = ()
        self.operation: Underway | None = None
        self.pusher = Pusher(self, self._mover.carrier if self._mover else None)
        #: The received state, until the training thread adopts it.
        self.receipt: training.SimReceipt | None = None
        #: Raise in apply; raise at the next micro-batch; corrupt its gradient in the sums; the state is corrupted.
        self.raise_next = self.raise_script = self.corrupting = self.corrupted = False
        #: Hang at the next boundary; the training thread hangs now.
        self.hanging = self.hung = False
        #: A setting of its script that differs from all other workers', or 0 if none differs.
        self.settings = 0
        self._troubles = self.world.troubles(agent.name)
        #: The last boundary reached.
        self.at = "starting"
        self.page = SimPage(self.world.timeline)
        self._busy = ""
        self._builder, self._saver, self.copier = Builder(self), Saver(self), SnapshotCopier(self)
        self._entrance = SimEntrance(self, self._builder, self.pusher, self._saver, self._mover)
        self.take_place(self.world.plan.places)

    @property
    def busy(self) -> str:
        """The training thread's current activity, or "" if it is free."""
        return self._busy

    @busy.setter
    def busy(self, what: str) -> None:
        self._busy = what
        self.page.begin(what)

    # ---- life ----

    def take_place(self, places: int) -> None:
        """Join a replica group of `places` workers."""
        self.places, self.place = places, index_of(self.id) % places
        page = self.agent.unit_of(self.id, places)
        consent = self._entrance.consent = Consent(self, page) if page is not None else None
        self._work = Work(self, consent, self._computed)

    def attach(self) -> None:
        """Attach to the coordinator and wait for a generation."""
        if self.boundary("attach"):
            return
        self.send(attachment(self.world, self.id, self.pid, self.experts, self.places))
        if self.world.plan.raises is Raises.BEFORE or self.world.plan.fails_under(self.places) == 1:
            self.busy = "before"
            self.world.after("start", self, self._script_raises, None)

    def kill(self) -> None:
        """Die without a message; the peers' collectives fail."""
        if self.alive:
            self.alive = False
            self._builder.fail()

    def stop(self) -> None:
        super().stop()
        self.page.stop()
        self._builder.stall()

    def resume(self) -> None:
        self._builder.unstall()
        super().resume()

    def glitch(self) -> None:
        """Fail the collective that this worker is waiting for."""
        group = self._builder.group(self.machine.generation)
        if group is not None and self.operation is not None:
            group.glitch(self.id)

    def send(self, message: msg.WorkerMessage) -> None:
        """Send a message to the coordinator through the agent."""
        if self.alive:
            self.checker.on_worker_message(self, message)
            self.agent.deliver(self.agent.relay, self, message)

    # ---- the listener thread ----

    def order(self, order: msg.Order) -> None:
        """Queue an order for the listener thread, which handles orders one after another."""
        timeline, until = self.world.timeline, self._troubles.deaf_until
        if until > timeline.now:
            timeline.at(until, self.deliver, self.handle_order, order)
        else:
            self.handle_order(order)

    def handle_order(self, order: msg.Order) -> None:
        """Handle an order from the coordinator."""
        match order:
            case msg.Posted():
                self._builder.posted(order)
                return
            case msg.LookAround():
                self._builder.look_around(order.generation)
                return
            case msg.AcceptCheckpoint() | msg.PruneCheckpoints() | msg.AskCheckpoint():
                self._saver.order(order)
                return
            case msg.Inject():
                return
            case _:
                instructions = self.machine.on_order(order)
        if isinstance(order, msg.Begin | msg.BecomeStandby):
            self.checker.began(self, order, bool(instructions))
        self.obey(instructions)
        self._work.withdraw_if_unwanted()
        boundary = "stopped" if isinstance(order, msg.Stop) else "begun" if isinstance(order, msg.Begin) else ""
        if not (boundary and self.boundary(boundary)):
            self.advance()

    def obey(self, instructions: Iterable[tasks.WorkerInstruction]) -> None:
        """Execute the machine's instructions."""
        for instruction in instructions:
            match instruction:
                case tasks.SendToCoordinator(message):
                    self.send(message)
                case tasks.Halt():
                    self._halt()
                case tasks.Build(plan, pending):
                    self._builder.begin(plan, pending)
                case tasks.Drop(generation):
                    self._builder.drop(generation)

    def _halt(self) -> None:
        """Leave collectives and transfers; check the commit operation one last time."""
        self.pusher.abort()
        self.receipt, operation = None, self.operation
        if self.busy in ("reduce", "move") and operation is not None:
            self.operation, self.busy = None, ""
            self._group().abandon(self, operation)
        elif self.busy == "vote" and operation is not None:
            self.world.after("abandon", self, self._leave_vote, operation)
        elif self.busy in ("load", "pause", "save", "bring", "put"):
            self.busy = ""

    def _leave_vote(self, operation: Underway) -> None:
        if self.operation is not operation or self.busy != "vote":
            return
        self.operation, self.busy = None, ""
        value = operation.value if self.world.rng.random() < 0.5 else None
        self._group().abandon(self, operation)
        if value is not None:
            self._vote_done(value)
        else:
            self.obey(self.machine.abandon_vote())
            self.advance()

    def _group(self) -> Group:
        group = self._builder.group(self.machine.generation)
        assert group is not None
        return group

    # ---- the training thread ----

    def advance(self) -> None:
        """Execute the current task, if the thread is free."""
        if not self.alive or self.hung or self.busy:
            return
        machine = self.machine
        match task := machine.task:
            case tasks.Forward():
                self._apply()
            case tasks.WarmUp() | tasks.Load() | tasks.Move() | tasks.Receive() | tasks.Enter():
                self._entrance.enter(task)
            case tasks.StashState(plan):
                self.copier.stash_state(plan)
            case tasks.Compute():
                self._compute(task)
            case tasks.Finish():
                self._save_last()
            case tasks.Done():
                self.agent.deliver(self.agent.worker_ended, self, 0, FailureKind.PROCESS_EXIT)
                self.kill()
            case _:
                if machine.phase is Phase.PASSED and not machine.frozen:
                    self._apply()

    def _compute(self, task: tasks.Compute) -> None:
        machine = self.machine
        if task.step > self.world.plan.steps:
            if not self.boundary("finishing"):
                self._leave_loop()
            return
        if self._attempt != (machine.generation, task.step):
            self._attempt = (machine.generation, task.step)
            if not task.summed:
                self.gradients.clear()
            self.checker.summed(self, task)
        todo = next((m for m in task.micro_batches if m not in self.gradients), None)
        if todo is None:
            if machine.begin_reduction():
                self._reduce()
        elif machine.begin_micro_batch(todo):
            self._work.begin(todo)

    def _leave_loop(self) -> None:
        if not self.world.plan.leaves:
            self.obey(self.machine.finish())
            return
        self.agent.deliver(self.agent.worker_ended, self, 0, FailureKind.PROCESS_EXIT, True)
        self.kill()

    def _computed(self, micro_batch: int, made: training.SimGradient) -> None:
        if self.hung:
            return
        self.busy = ""
        if self.raise_script or self.world.plan.raises_in(self.machine.step, micro_batch):
            self._script_raises(micro_batch)
            return
        self.gradients[micro_batch] = (made,)
        if self.corrupting:
            self.corrupt()
        self.advance()

    def corrupt(self) -> None:
        """Corrupt a gradient in the sums, or the next gradient if the sums are empty."""
        self.corrupting = not self.gradients
        if self.gradients:
            training.corrupted(self.gradients, self.world.samples, self.state, self.machine.step, self.world.rng)

    def _script_raises(self, micro_batch: int | None) -> None:
        """Raise an exception in the script, outside its loop if `micro_batch` is None; keep an intact state."""
        self.busy = ""
        machine, place = self.machine, f"Oops({self.id})" if self.raise_script else "Oops"
        if not machine.keep_state_only():
            self.raised("" if micro_batch is not None else place, looped=False)
            return
        self.gradients.clear()
        self.send(raised_message(machine, place, micro_batch, looped=micro_batch is not None))
        self.advance()

    def _reduce(self) -> None:
        if self.boundary("reducing"):
            return
        self.reduced = None
        if (tally := training.tally(self.machine, self.world.plan, len(self.gradients))) is not None:
            self.send(tally)
        generation = self.machine.generation
        step, plan = self.machine.step, self.world.plan
        combine = partial(training.reduce_shares, plan=plan, generation=generation, step=step, count=self.places)
        self.issue("reduce", training.SimShare(training.summed(self.gradients), self._compared()), combine)

    def _compared(self) -> list[float]:
        """Return the numbers that this worker compares with other workers of its role."""
        machine = self.machine
        state = hash((29, self.state)) % (1 << 62) if machine.compares_state else 0
        fingerprint = Fingerprint(step=machine.step, settings=self.settings, state=state)
        machine.set_fingerprint(fingerprint)
        return fingerprint_contribution(fingerprint, self.place, self.places, machine.generations.world)

    def issue(self, kind: str, payload: Any, combine: Any, *, step: int | None = None) -> None:
        self.checker.issues(self, kind)
        self.busy, self.operation = kind, None
        step = self.machine.step if step is None else step
        operation = self.operation = self._group().issue(self, kind, step, payload, combine)
        late_s = self.world.timing.operation_timeout_s + self.world.plan.longer_alone_s
        self.world.timeline.after(late_s, self.deliver, self._late, operation)

    def _late(self, operation: Underway) -> None:
        """Abandon a collective that has exceeded its time limit, and its connections."""
        if operation is self.operation and not self.hung:
            self._group().abandon(self, operation)
            self.operation_failed(operation, timed_out=True)

    def climbs(self, operation: Underway) -> bool:
        """Return whether this worker goes on to the next level of a collective."""
        return operation is self.operation and not self.hung and not self.boundary("climbing")

    def operation_done(self, operation: Underway, value: Any) -> None:
        """Handle the result of a collective."""
        if operation is not self.operation or self.hung:
            return
        kind, self.operation, self.busy = self.busy, None, ""
        if kind == "reduce":
            self._of_places = value
            self._reduced(value[self.place])
        elif kind == "move" and self._mover is not None:
            self._mover.moved(value)
        else:
            self._vote_done(value)

    def _reduced(self, value: training.SimReduced) -> None:
        """Handle the result of the step's reductions, unless a Stop arrived earlier."""
        if self._mover is not None and not self._mover.brings(self._reduced, value):
            return
        self.obey(self.machine.finish_reduction(value.v))
        if self.machine.phase is Phase.REFUSED:
            self.checker.refuses(self, self._of_places)
            self.boundary("refused")
        elif self.machine.phase is Phase.READY:
            self.reduced = value
            self.busy = "pause"
            if not self.boundary("reduced"):
                self.world.after("pause", self, self._vote)

    def _vote_done(self, raised: list[float]) -> None:
        """Handle the result of the commit operation: the flags of all ranks."""
        assert self.reduced is not None
        self.checker.passes(self)
        self.obey(self.machine.pass_vote(with_flags(self.reduced.v, raised, self.machine.generations.world)))
        if not self.boundary("passed"):
            self.advance()

    def operation_failed(self, operation: Underway, *, timed_out: bool = False) -> None:
        """Handle the failure of a collective."""
        if operation is not self.operation or self.hung:
            return
        kind, self.operation, self.busy = self.busy, None, ""
        if kind == "move":
            self._entrance.leave_move(self.machine.generation)
        if kind == "vote":
            self.obey(self.machine.abandon_vote())
        why = f"{kind}: {'it has taken too long' if timed_out else 'a peer is gone'}"
        missing = self._builder.cut_off(self.machine.generation) if timed_out else ()
        self.obey(self.machine.complain(self.machine.generation, why, timed_out=timed_out, unreachable=missing))
        self.advance()

    def _vote(self) -> None:
        if self.busy != "pause" or self.hung:
            return
        self.busy, machine = "", self.machine
        if not machine.begin_vote():
            return
        still_saving = self._saver.is_still_saving(machine.step)
        self.issue("vote", training.vote(self.world.plan, machine, still_saving=still_saving), training.combine)
        self.boundary("voted")

    def _apply(self) -> None:
        if self.pusher.active or self.copier.active or not self.machine.begin_apply():
            return
        self.busy, plan = "apply", self.machine.plan
        if self.machine.leaves_good_state and self.machine.phase is not Phase.FORWARD and plan is not None:
            self._saver.save(plan, self.machine.step - 1, self.state)
        commit = self.machine.passed.commit if self.machine.passed else None
        before, self.state, self.whole = self.state, self.world.garbage(), False
        self.world.after("apply", self, self._applied, before, commit)
        self.boundary("applying")

    def _applied(self, before: int, commit: msg.Commit | None) -> None:
        if self.hung:
            return
        if self.raise_next or self.world.plan.raises_in(self.machine.step, None):
            self.raised("" if self.raise_next else "Oops")
            return
        self.busy = ""
        assert commit is not None
        reduced = self.reduced or training.SimReduced((self.world.garbage(),), self.world.garbage(), commit)
        self.state, self.whole = training.next_state(before, reduced, commit), True
        plan = self.machine.plan
        assert plan is not None
        if self._mover is not None:
            self._mover.apply(plan, self.machine.step)
        instructions = self.machine.finish_apply(
            f"{self.state}{' corrupted' * self.corrupted}", last_step=self.world.plan.steps
        )
        self.gradients.clear()
        self.checker.applied(self, before, reduced, commit)
        self.obey(instructions)
        if self._mover is not None:
            self._mover.send_loads()
        self._saver.applied(plan, self.machine.applied or 0, self.state, commit)
        if not self.boundary("applied"):
            self.advance()

    def raised(self, place: str = "", *, looped: bool = True) -> None:
        """End with an exception of the script and lose the state; report `place` if it is set."""
        error = raised_message(self.machine, place, looped=looped).error if place else None
        self.agent.deliver(self.agent.worker_raised, self, error)
        self.kill()

    def _save_last(self) -> None:
        """Save the state and finish, because the job ends before its last step."""
        plan = self.machine.plan
        if plan is None or self.boundary("finishing"):
            return
        self.busy = "save"
        if not self.machine.is_saved_before_skips:
            self._saver.save(plan, self.machine.applied or 0, self.state)
        self.saved()

    def saved(self) -> None:
        """Finish if the last pending save is resolved."""
        if self.busy == "save" and self._saver.idle:
            self.busy = ""
            self.obey(self.machine.finish())

    def boundary(self, name: str) -> bool:
        """Apply the plan's faults at this boundary; return True if this process died or was paused."""
        return self._cluster.boundary(self, name)
