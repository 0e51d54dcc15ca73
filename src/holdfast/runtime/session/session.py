"""The thread shell around a worker's phase machine: link and listener on one side, the training thread on the other.

The machine (coordination.worker) decides; this carries out. One condition guards the machine. The listener thread
feeds orders in and carries out what comes back; the training thread asks for its task and crosses boundaries, each
under the lock and only if its generation is still the machine's. Nothing that takes long is done under the lock.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from holdfast.clock import Clock
from holdfast.control.link.framing import FromWorkerProcess
from holdfast.coordination.experts.holding import Holding
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import (
    Build,
    Compute,
    Done,
    Drop,
    Enter,
    Entering,
    Finish,
    Forward,
    Halt,
    Load,
    Move,
    Receive,
    Task,
    Tell,
    Wait,
    WorkerInstruction,
)
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import node_of
from holdfast.runtime.checkpoints.saver import (
    CheckpointSaver,
    DamagedCheckpointError,
    load_experts,
)
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.graveyard import Graveyard
from holdfast.runtime.session.building import GroupBuilder, GroupBuilding
from holdfast.runtime.session.expert_exchange import ExpertExchange
from holdfast.runtime.session.resources import Generations, Resources
from holdfast.runtime.session.state_exchange import Shared, StateExchange
from holdfast.runtime.state.hashing import state_hash
from holdfast.runtime.state.state import StateMismatchError

logger = logging.getLogger(__name__)

CLOSE_S = 2.0

T = TypeVar("T")


class Link(Protocol):
    """The way to the coordinator."""

    def send(self, message: FromWorkerProcess) -> None: ...

    def start(self, on_order: Callable[[msg.Order], None], on_lost: Callable[[], None]) -> None: ...


class Session:
    """One worker's part in a job, from Attach to JobDone."""

    def __init__(
        self,
        *,
        worker: str,
        link: Link,
        workload: Workload,
        build: GroupBuilder,
        graveyard: Graveyard,
        faults: Faults,
        clock: Clock,
        saver: CheckpointSaver | None = None,
        inbox_host: str | None = None,
        verify_state: bool = False,
        after_apply: Callable[[int, msg.Commit], None] | None = None,
    ) -> None:
        """Make a session that nobody knows of yet; `attach` announces it.

        Args:
            saver: writes checkpoints; None for none.
            inbox_host: the address to receive state at; None where no peer can ever send any.
            verify_state: report a hash of all state with every applied step.
            after_apply: the script's part of a step, called with it and its v before anything is saved or sent.
        """
        self.workload = workload
        self.faults = faults
        self._link = link
        self._graveyard = graveyard
        self._saver = saver
        self._verify_state = verify_state
        self._after_apply = after_apply
        self._changed = threading.Condition(threading.RLock())
        experts = workload.experts
        holding = Holding(experts.shape(1)) if experts is not None else None
        self._machine = WorkerMachine(worker, micro_batches=workload.micro_batches, holding=holding)
        self._generations = Generations(self._post)
        self._shared = Shared(
            changed=self._changed, machine=self._machine, generations=self._generations, carry_out=self._carry_out
        )
        self._building = GroupBuilding(self._shared, build)
        self._exchange = StateExchange(self._shared, workload.state, faults, inbox_host)
        self._experts = ExpertExchange(self._shared, experts, workload.state, faults, clock) if experts else None
        if saver is not None:
            saver.notify(self._shared.notify)
        self.last_applied: msg.Passed | None = None
        faults.on_hold(self._hold)

    # ---- for the training thread ----

    @property
    def worker(self) -> str:
        return self._machine.worker

    @property
    def rank(self) -> int:
        """This worker's rank in the present generation, 0 before the first."""
        with self._changed:
            return self._machine.generations.rank if self._machine.plan else 0

    @property
    def world(self) -> int:
        """How many workers the present generation has."""
        with self._changed:
            return self._machine.generations.world

    @property
    def applied(self) -> int | None:
        """The step whose state is here."""
        with self._changed:
            return self._machine.applied

    def attach(self, *, config: dict[str, str], host: str, slots: int = 1) -> None:
        """Announce this worker, and listen for orders from now on.

        Args:
            config: software, model and settings in words; all workers of a job must have the same.
            slots: this node's room for experts, per layer.
        """
        experts = self.workload.experts
        self._link.start(self._on_order, self._on_lost)
        port = self._exchange.start()
        order = self.workload.loader.order
        message = msg.Attach(
            worker=self.worker,
            pid=os.getpid(),
            host=host,
            state_port=port,
            config=config,
            global_batch=order.global_batch,
            micro_batches=order.micro_batches,
            experts=experts.shape(slots) if experts is not None else None,
            saves=self._saver is not None,
        )
        self._link.send(message)

    def next_compute(self) -> tuple[Compute, int] | None:
        """Do whatever comes before the next gradients, and return them with their generation; None: the job is done."""
        while True:
            with self._changed:
                task, generation, step = self._machine.task, self._machine.generation, self._machine.step
                if isinstance(task, Wait):
                    self._changed.wait()
            self.faults.at("", step)
            if isinstance(task, Done):
                return None
            if isinstance(task, Compute):
                self._leave_before(generation)
                return task, generation
            self._take_up(task)

    def settle(self, step: int) -> bool:
        """Wait until it is decided what becomes of a step that was left; return whether it is applied here by now."""
        self.next_compute()
        passed = self.last_applied
        return passed is not None and passed.step == step

    def communicator(self, generation: int) -> Communicator | None:
        """Return the group of a generation that was entered; None where it is over."""
        with self._changed:
            resources = self._generations.of(generation)
            return resources.communicator if resources is not None else None

    def halted(self, generation: int) -> bool:
        """Return whether a generation is over for this worker."""
        with self._changed:
            return self._left(generation)

    def cross(self, generation: int, boundary: Callable[[WorkerMachine], bool]) -> bool:
        """Cross a boundary of the machine; False where the generation is over or the machine frozen."""
        with self._changed:
            return not self._left(generation) and boundary(self._machine)

    def vote(self, generation: int) -> tuple[msg.Flag, ...] | None:
        """READY -> VOTED; return the flags that this worker raises, None where frozen."""
        with self._changed:
            if self._left(generation) or not self._machine.voting():
                return None
            return self._machine.generations.flags

    def vote_passed(self, commit: msg.Commit) -> None:
        """The commit operation returned v."""
        with self._changed:
            self._carry_out(self._machine.vote_passed(commit))

    def vote_abandoned(self) -> None:
        """The commit operation was left."""
        with self._changed:
            self._carry_out(self._machine.vote_abandoned())

    def peer_lost(self, generation: int, error: Exception | str) -> None:
        """A collective failed: tell, and wait for the coordinator's word."""
        self._shared.lost(generation, error)

    def apply(self, generation: int, step: int, commit: msg.Commit) -> bool:
        """Carry a passed step out; False where a Stop was faster: the decision will say what becomes of it.

        Raises:
            Exception: whatever the optimizer raised: the state is void then, and the process has to end. Or what
                `after_apply` raised: the step is applied and saved, and the job ends.
        """
        self._await_push(generation)
        with self._changed:
            # A Begin may have come since: only the generation that this call belongs to may go on.
            if self._machine.generation != generation or not self._machine.begin_apply():
                return False
            plan = self._machine.plan
            assert plan is not None
            resources, origin = self._generations.of(generation), (plan.term, generation)
        self.workload.apply(commit)
        self.faults.at("applying", step)
        failure = self._run_after_apply(step, commit)
        self.workload.state.watch.note()
        digest = state_hash(self.workload.state.capture()) if self._verify_state else ""
        with self._changed:
            rank = self._machine.generations.rank
            forward = self._machine.phase is msg.Phase.FORWARD
            self._carry_out(self._machine.applied_step(digest))
            self.last_applied = msg.Passed(step=step, commit=commit)
        if failure is not None:
            self._give_up(step, generation, rank, failure)
        if self._experts is not None and rank == 0:
            self._experts.tell_loads(step=step, generation=generation)
        if self._experts is None:
            if self._saver is not None and rank == 0:
                self._saver.offer(self.workload.state, step, origin)
        elif resources is not None and resources.communicator is not None and not forward:
            saver, comm = self._saver, resources.communicator
            self._experts.after_step(comm, saver, step=step, origin=origin, verify=self._verify_state)
        return True

    def _run_after_apply(self, step: int, commit: msg.Commit) -> Exception | SystemExit | None:
        """Run the script's part of a step; return what it raised: model and optimizer are whole all the same."""
        if self._after_apply is None:
            return None
        try:
            self._after_apply(step, commit)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (what a script raises: again, once all is saved)
            return error
        return None

    def _give_up(self, step: int, generation: int, rank: int, failure: Exception | SystemExit) -> NoReturn:
        """Have the job end with what `after_apply` raised, save with all others what the step led to, and raise it."""
        place = traceback.extract_tb(failure.__traceback__)[-1]
        cause = f"{type(failure).__name__}: {failure} ({place.filename}:{place.lineno})"
        why = f"after_apply raised at step {step} on node {node_of(self.worker)}, rank {rank}: {cause}"
        traceback.print_exception(failure)
        self._link.send(msg.ScriptFailed(worker=self.worker, generation=generation, step=step, why=why[:8000]))
        while True:
            with self._changed:
                # (no further step is computed: the next generation is the last)
                self._changed.wait_for(lambda: not isinstance(self._machine.task, Wait | Compute))
                task = self._machine.task
            if isinstance(task, Done):
                raise failure
            self._take_up(task)

    def _take_up(self, task: Task) -> None:
        """Do what leads from one step to the next, or to the end; the machine is asked again afterwards."""
        if isinstance(task, Finish):
            self.finish()
        if isinstance(task, Entering):
            self._enter(task)

    def finish(self) -> None:
        """Loop or job want no further step: what they have led to is saved, unless it is already."""
        saver = self._saver
        with self._changed:
            generation = self._machine.generation
        if saver is not None:
            self._save_last(saver, generation)
        with self._changed:
            if saver is not None:
                # Otherwise the job could end between a checkpoint's writing and its acceptance.
                self._changed.wait_for(lambda: self._left(generation) or saver.idle)
            if not self._left(generation) and isinstance(self._machine.task, Compute | Finish):
                self._carry_out(self._machine.finish())

    def _save_last(self, saver: CheckpointSaver, generation: int) -> None:
        with self._changed:
            machine, resources = self._machine, self._generations.of(generation)
            if self._left(generation) or machine.plan is None or not machine.applied:
                return
            step, rank, origin = machine.applied, machine.generations.rank, (machine.plan.term, generation)
        self.workload.state.watch.check()
        wanted = rank == 0 and saver.newest != step
        if wanted:
            saver.await_free()
        if self._experts is None:
            if wanted:
                saver.save(self.workload.state, step, origin)
        elif resources is not None and resources.communicator is not None:
            self._experts.save(resources.communicator, saver, step=step, origin=origin, wanted=wanted)

    def close(self) -> None:
        """Let go of threads, sockets and groups. The link stays: its end would look like a death."""
        self._exchange.close()
        with self._changed:
            generations = self._generations.all()
            self._generations.close()
        for resources in generations:
            if resources.push is not None:
                resources.push.join(CLOSE_S)
        if self._saver is not None:
            self._saver.close()
        self._graveyard.close(CLOSE_S)

    # ---- entering a generation ----

    def _enter(self, task: Entering) -> None:
        """Do the next part of entering that can be done; the machine is asked again after each."""
        generation = task.plan.generation
        with self._changed:
            self._generations.leave_before(generation)
            resources = self._generations.of(generation)
        if resources is None:
            return
        if isinstance(task, Forward):
            self.faults.at("forward", task.step)
            self.apply(generation, task.step, task.commit)
            return
        if isinstance(task, Move | Enter):
            self._exchange.start_push(resources, task)
        communicator = self._await(generation, lambda: resources.communicator)
        if communicator is None:
            return
        match task:
            case Load():
                self._load(task.plan, task.checkpoint)
            case Move():
                self._move(resources, task.plan, communicator)
            case Receive():
                self._receive(resources)
            case Enter():
                self._entered(resources)

    def _move(self, resources: Resources, plan: msg.GenerationPlan, communicator: Communicator) -> None:
        if self._experts is None:
            raise RuntimeError("experts are to move, but this model has none")
        if not self._experts.move(resources, plan, communicator):
            self._await(resources.generation, lambda: False)

    def _entered(self, resources: Resources) -> None:
        receipt = resources.receipt
        bytes_, seconds = resources.moved_bytes, resources.moving_s
        if receipt is not None:
            bytes_, seconds = bytes_ + receipt.nbytes, seconds + receipt.seconds
        with self._changed:
            if not self._left(resources.generation):
                self._carry_out(self._machine.entered(received_bytes=bytes_, transfer_s=seconds))

    def _load(self, plan: msg.GenerationPlan, name: str) -> None:
        generation, experts = plan.generation, self.workload.experts
        if self._saver is None:
            raise RuntimeError(f"checkpoint {name!r} is to be loaded, but this worker has no checkpoint directory")
        if self.halted(generation) or not self._exchange.quiet():
            return
        try:
            step = self._saver.load(name, self.workload.state, first=plan.rank(self.worker) == 0)
            if experts is not None and plan.experts is not None:
                wanted = experts.wanted_of(plan.experts, plan.rank(self.worker) or 0)
                load_experts(self._saver.directory, name, experts, wanted)
        except DamagedCheckpointError as error:
            self._damaged(generation, name, str(error))
            return
        self._saver.abandon()
        self._saver.newest = step
        with self._changed:
            self.last_applied = None
            self._exchange.settle()
            self._machine.loaded(generation, step)

    def _damaged(self, generation: int, name: str, why: str) -> None:
        logger.warning("checkpoint %s cannot be read: %s", name, why)
        damaged = msg.CheckpointDamaged(worker=self.worker, generation=generation, name=name, why=why[:1024])
        with self._changed:
            if not self._left(generation):
                self._link.send(damaged)
        self._await(generation, lambda: False)

    def _receive(self, resources: Resources) -> None:
        receipt = self._await(
            resources.generation, lambda: resources.receipt if resources.receipt and resources.receipt.ended else None
        )
        if receipt is None:
            return
        try:
            header = receipt.result()
            self.workload.state.adopt(header.manifest, receipt.tensors)
        except (StateMismatchError, ConnectionError) as error:
            self.peer_lost(resources.generation, f"state from {receipt.sender} is refused: {error}")
            self._await(resources.generation, lambda: False)
            return
        with self._changed:
            self.last_applied = None
            if self._machine.received(resources.generation, header.passed, header.step):
                self._exchange.settle()

    def _await_push(self, generation: int) -> None:
        with self._changed:
            resources = self._generations.of(generation)
        if resources is not None and resources.push is not None:
            push = resources.push
            self._await(generation, lambda: push.sent)

    def _await(self, generation: int, ready: Callable[[], T]) -> T | None:
        """Wait until something is there, or the generation is over (None)."""
        with self._changed:
            self._changed.wait_for(lambda: self._left(generation) or ready())
            return None if self._left(generation) else ready()

    def _hold(self) -> None:
        """Stand still until the generation is over: fault injection."""
        with self._changed:
            self._await(self._machine.generation, lambda: False)

    def _left(self, generation: int) -> bool:
        return self._shared.left(generation)

    # ---- orders, in the listener thread ----

    def _on_order(self, order: msg.Order) -> None:
        with self._changed:
            self._carry_out(self._fed(order))
            self._changed.notify_all()

    def _fed(self, order: msg.Order) -> list[WorkerInstruction]:
        match order:
            case msg.Posted():
                resources = self._generations.of(order.generation)
                if resources is not None:
                    resources.board.put(order.key, order.value)
            case msg.AcceptCheckpoint() | msg.PruneCheckpoints():
                if self._saver is not None:
                    self._saver.obey(order)
            case msg.Inject():
                self.faults.order(order)
            case _:
                return self._machine.order(order)
        return []

    def _on_lost(self) -> None:
        with self._changed:
            if self._machine.done:
                return
        # An agent's death is its node's death; the training thread may be anywhere, so nothing is wound up.
        os._exit(1)

    def _carry_out(self, instructions: list[WorkerInstruction]) -> None:
        """Do what the machine asks, in order; the lock is held."""
        for instruction in instructions:
            match instruction:
                case Tell():
                    self._link.send(instruction.message)
                case Halt():
                    stop = self._machine.generations.stop
                    self._generations.interrupt(stop.generation if stop else 0)
                case Drop():
                    self._generations.drop(instruction.generation)
                case Build():
                    self._building.start(instruction.plan)

    def _post(self, generation: int, key: str, value: bytes) -> None:
        self._link.send(msg.Post(worker=self.worker, generation=generation, key=key, value=value))

    def _leave_before(self, generation: int) -> None:
        with self._changed:
            self._generations.leave_before(generation)
