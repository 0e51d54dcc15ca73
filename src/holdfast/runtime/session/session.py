"""The threads around a worker's state machine: the listener of orders, and the training thread.

The machine (`coordination.worker`) decides, the session executes. One condition guards the machine. The listener thread
feeds orders to the machine and executes its instructions. The training thread asks for its task and crosses boundaries;
each crossing holds the lock and checks that its generation is still in force. Nothing slow happens under the lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.control.link.framing import Crashed, FromWorkerProcess
from holdfast.control.link.progress_page import NoProgress, ProgressSlot
from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import (
    Build,
    Compute,
    Done,
    Drop,
    Finish,
    Halt,
    Leading,
    SendToCoordinator,
    Task,
    Wait,
    WarmUp,
    WorkerInstruction,
)
from holdfast.protocol.batch_summary import BatchSummary
from holdfast.protocol.commit import Wish
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import ScriptError
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Phase
from holdfast.runtime.checkpoints.left_loop import LeftLoopSaver
from holdfast.runtime.checkpoints.saver import CheckpointSaver
from holdfast.runtime.evaluation.evaluating import Evaluator
from holdfast.runtime.evaluation.shards import ModelEvaluation
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.experts import SessionExperts
from holdfast.runtime.generation.resources import Generations, ProposalPage, SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.session.applying import StepApplier
from holdfast.runtime.session.attempt import Attempt, AwaitExperts
from holdfast.runtime.session.building import BackgroundBuilds, GroupBuilder
from holdfast.runtime.session.entering import GenerationEntry
from holdfast.runtime.session.injected_faults import register_fault_handlers
from holdfast.runtime.session.state_passing import StateExchange
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.tensors import is_readable
from holdfast.runtime.warm_up.rehearsal import ShadowSteps
from holdfast.runtime.warm_up.shadow import ShadowAttempt

#: Seconds that `Session.close` waits for threads that still send state or destroy groups.
CLOSE_S = 2.0


class Link(Protocol):
    """The connection to the coordinator."""

    def send(self, message: FromWorkerProcess) -> None: ...

    def start(self, on_order: Callable[[msg.Order], None], on_lost: Callable[[], None]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which worker this is, and where it runs."""

    worker: str
    #: the address of its node
    host: str
    #: how many experts the node can hold, per layer
    slots: int = 1
    #: whether this is the only worker, so that no peer can send it state
    alone: bool = False
    #: where the ranks of its replica group agree on their work; None if this worker holds the whole model
    proposals: ProposalPage | None = None


class Session:
    """One worker's part in a job, from Attach to JobDone."""

    #: the newest attempt
    _attempt: Attempt | None = None
    #: whether the script has ended
    _ending = False
    #: the reason for the script's pause, and since when its time counts; None outside of a pause
    _paused: tuple[str, float] | None = None

    def __init__(
        self,
        identity: Identity,
        *,
        link: Link,
        workload: Workload,
        groups: GroupBuilder,
        faults: Faults,
        clock: Clock,
        saver: CheckpointSaver | None = None,
        snapshots: Snapshots | None = None,
        verify_state: int = 0,
        after_apply: Callable[[int, msg.Commit], None] | None = None,
        progress: ProgressSlot | None = None,
    ) -> None:
        """Create a session; `attach` announces it.

        Args:
            groups: builds the groups of each generation.
            saver: writes checkpoints, if the job has any.
            snapshots: copies the state into the agent's memory, if the job wants that.
            verify_state: report a hash of the whole state every this many applied steps; 0: never.
            after_apply: the script's part of a step. It gets the step and its result, before anything is saved or sent.
            progress: where the training thread reports its activity; None: nowhere.
        """
        self.workload = workload
        self._identity = identity
        self._link = link
        self._groups = groups
        self._faults = faults
        self._clock = clock
        self._saver = saver
        self._snapshots = snapshots
        self._changed = threading.Condition(threading.RLock())
        holding = HeldExperts(workload.experts.shape(1)) if workload.experts is not None else None
        self._machine = WorkerMachine(identity.worker, samples=workload.samples, holding=holding)
        self._shared = shared = SharedContext(
            changed=self._changed,
            machine=self._machine,
            resources=Generations(self._send_post),
            execute=self._execute_instructions,
            progress=progress or NoProgress(),
            proposals=identity.proposals,
        )
        self._builds = BackgroundBuilds(shared, groups)
        self._shadow_steps = ShadowSteps(shared, workload, clock)
        self._transfers = StateExchange(
            shared, workload.state, faults, "" if identity.alone else identity.host, snapshots
        )
        held = SessionExperts(shared, workload.experts, workload.state, faults, clock) if workload.experts else None
        self._await_experts: AwaitExperts = held.await_arrivals if held is not None else lambda _: True
        self._evaluator = Evaluator(shared, workload, saver, held)
        self._applier = StepApplier(
            *(parts := (shared, workload, faults)),
            experts=held,
            saver=saver,
            snapshots=snapshots,
            after_apply=after_apply,
            on_after_apply_error=self._on_after_apply_error,
            verify_state=verify_state,
            evaluator=self._evaluator,
        )
        self.finish, self.await_saved = self._applier.finish_loop, self._applier.await_saved
        self.left_loop = LeftLoopSaver(workload.state, self._applier.save_after_left_loop)
        self._entry = GenerationEntry(
            *parts, self._applier, self._transfers, experts=held, saver=saver, snapshots=snapshots
        )
        if saver is not None:
            saver.set_on_idle(shared.notify)
        register_fault_handlers(faults, shared, workload.state)

    # ---- for the training thread ----

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation, 0 before the first one."""
        with self._changed:
            return self._machine.generations.rank if self._machine.plan else 0

    @property
    def world(self) -> int:
        """The number of workers in the current generation."""
        with self._changed:
            return self._machine.generations.world

    @property
    def has_final_state(self) -> bool:
        """Whether this worker finished the loop itself, as a member of the last generation."""
        with self._changed:
            return self._machine.phase is Phase.FINISHED

    def attach(self, config: dict[str, str], data: BatchSummary = ()) -> None:
        """Listen for orders and state from now on, announce this worker to the coordinator, and start to load data.

        Args:
            config: software, model and settings as text; the same for all workers of a job.
            data: a summary of the data; also the same for all workers.
        """
        experts, order = self.workload.experts, self.workload.loader.order
        self._link.start(self._on_order, self._on_lost)
        port = self._transfers.start()
        message = msg.Attach(
            worker=self._identity.worker,
            pid=os.getpid(),
            host=self._identity.host,
            state_port=port,
            config=config,
            global_batch=order.global_batch,
            micro_batches=order.micro_batches,
            seed=self.workload.samples.seed,
            layout=self.workload.position.layout,
            layouts=self.workload.position.layouts,
            data=data,
            expert_shape=experts.shape(self._identity.slots) if experts is not None else None,
            saves=self._saver is not None,
            saves_in_time=self._saver is not None and self._saver.is_timed,
        )
        self._link.send(message)
        self.workload.loader.start()

    def next_compute(self) -> tuple[Compute, int] | ShadowAttempt | None:
        """Execute tasks until gradients are due, and return them with their generation; None if the job is done.

        A worker that must warm up before its first generation gets shadow steps, which are ended early if it is needed.
        Blocks while the coordinator decides.
        """
        progress = self._shared.progress
        while True:
            with self._changed:
                task, generation, step = self._machine.task, self._machine.generation, self._machine.step
                progress.set_position(generation, step, self._machine.generations.world)
                cut_short = self._shadow_steps.is_under_way and not isinstance(task, WarmUp)
                if isinstance(task, Wait) and not cut_short:
                    progress.start_activity(Activity.AWAITING)
                    self._changed.wait()
            if cut_short:
                self._shadow_steps.cut_short()
                continue
            self._faults.strike_at("", step)
            if isinstance(task, WarmUp) and (shadow := self._shadow_steps.next_step()) is not None:
                return shadow
            if isinstance(task, Done):
                return None
            if isinstance(task, Compute):
                with self._changed:
                    self._shared.resources.retire_before(generation)
                progress.start_activity(Activity.SCRIPT)
                return task, generation
            self._execute_task(task)

    def add_evaluation(self, evaluation: ModelEvaluation) -> None:
        """Add an evaluation, from the next step on.

        Raises:
            BadInputError: the evaluation is not valid.
        """
        self._evaluator.add(evaluation)

    def run_due_evaluations(self, step: int, generation: int) -> bool:
        """Evaluate the state of `step` on all workers together if that is due. The time counts as a pause of the
        script.

        Returns:
            True, also if no evaluation is due; False if the generation ended meanwhile.

        Raises:
            Exception: an exception of the script's function.
        """
        started = self._clock.monotonic()
        done = self._evaluator.run_due(step, generation)
        self._applier.paused_s += self._clock.monotonic() - started if self._evaluator.due_at(step) else 0.0
        return done

    def start_attempt(self, compute: Compute, generation: int) -> Attempt:
        """Start an attempt at the step that `next_compute` returned, and keep it to locate errors of the script."""
        parts = self._shared, self.workload, self._faults, self._applier.apply_step
        self._attempt = Attempt(*parts, compute, generation, self._await_experts, self._saver)
        return self._attempt

    def conclude_attempt(self, attempt: Attempt) -> msg.Commit | None:
        """Commit an attempt, or wait for the coordinator's decision about its step.

        All tasks that come before the next gradients are executed too, because the decision may be FORWARD.

        Returns:
            The step result, if the step is applied on this worker by now; else None: the attempt is undone.

        Raises:
            Exception: as `Attempt.commit`.
        """
        with self._suspend_pause():
            if not (attempt.complete and attempt.commit()):
                self.next_compute()  # The loop asks again, because another generation may be in force by then.
        last = self._applier.last_applied
        return last.commit if last is not None and last.step == attempt.step else None

    def raise_wish(self, wish: Wish, why: str = "") -> None:
        """Send a wish, such as to save or stop, to all workers with the next step that passes.

        Wishes of shadow steps are ignored.

        Args:
            why: the script's reason to stop.
        """
        with self._changed:
            if not self._shadow_steps.is_under_way:
                self._machine.wishes.raise_wish(wish, why)

    @contextlib.contextmanager
    def pause(self, reason: str) -> Generator[None, None, None]:
        """Report a pause while the block runs, so that this worker is not removed as hung; count its time as paused.

        The activity before the block is reported again afterwards. A pause within a pause changes nothing.
        """
        if self._paused is not None:
            yield  # A pause within a pause belongs to the outer one.
            return
        progress = self._shared.progress
        activity, micro_batch = progress.current_activity
        progress.start_pause(reason)
        self._paused = reason, self._clock.monotonic()
        try:
            yield
        finally:
            self._count_pause()
            self._paused = None
            progress.start_activity(activity, micro_batch)

    @contextlib.contextmanager
    def _suspend_pause(self) -> Generator[None, None, None]:
        """Suspend the script's pause during the block, in which all workers act together, such as in a commit.

        Afterwards the pause continues, or the activity is that of the script if there is no pause.
        """
        self._count_pause()
        try:
            yield
        finally:
            if self._paused is None:
                self._shared.progress.start_activity(Activity.SCRIPT)
            else:
                reason = self._paused[0]
                self._paused = reason, self._clock.monotonic()
                self._shared.progress.start_pause(reason)

    def _count_pause(self) -> None:
        """If there is a pause, add the time since it started or last continued to the paused seconds."""
        if self._paused is not None:
            self._applier.paused_s += self._clock.monotonic() - self._paused[1]

    def on_script_end(self) -> None:
        """Report the activity ENDING; later reports of this worker say that its script has ended, well or not."""
        self._ending = True
        self.workload.flop.stop_round()
        self._shared.progress.start_activity(Activity.ENDING)

    def locate_error(self, error: ScriptError) -> ScriptError:
        """Return the error with the step, micro-batch and phase at which it was raised; None for those not known."""
        attempt = self._attempt
        with self._changed:
            phase = self._machine.phase
        step, micro_batch = (attempt.step, attempt.current_micro_batch) if attempt is not None else (None, None)
        return msgspec.structs.replace(error, step=step, micro_batch=micro_batch, phase=phase)

    def hold_state(self, crashed: Crashed) -> bool:
        """Report an exception of the script, and keep the state for other workers until the job ends.

        Meanwhile it executes tasks, such as sending its state. The coordinator may replace the process earlier.

        Returns:
            True once the job is done. False, at once, if nothing can be kept: the crash has no error of the script, the
            device is unusable, or the state is missing or was being changed.
        """
        machine, worker = self._machine, self._identity.worker
        with self._changed:
            if crashed.error is None or not is_readable(self.workload.loader.device) or not machine.keep_state_only():
                return False
            raised = msg.Raised(
                worker=worker,
                generation=machine.generation,
                detail=crashed.detail,
                error=crashed.error,
                exit_code=crashed.exit_code,
                final=crashed.final,
            )
            self._link.send(raised)
        while True:
            with self._changed:
                self._shared.progress.start_activity(Activity.AWAITING)
                self._changed.wait_for(lambda: not isinstance(machine.task, Wait))
                task = machine.task
            if isinstance(task, Done):
                return True
            self._execute_task(task)

    def close(self) -> None:
        """Release threads, sockets, groups, files and the data loader.

        Waits up to `CLOSE_S` for each transfer that still sends. The link stays open: its end would look like the
        worker's death.
        """
        self._transfers.close()
        with self._changed:
            left = self._shared.resources.all()
            self._shared.resources.close()
        for resources in left:
            if resources.push is not None:
                resources.push.join(CLOSE_S)
        for tier in (self._saver, self._snapshots):
            if tier is not None:
                tier.close()
        self._groups.close(CLOSE_S)
        self.workload.loader.close()

    def _execute_task(self, task: Task) -> None:
        """Execute one task of the training thread between two steps: finish early (`Finish`), or lead into or out of a
        generation (`Leading`).

        Other tasks, such as `Wait` and `Compute`, are ignored: the caller asks the machine for its next task.
        """
        if isinstance(task, Finish):
            self._finish_early(task)
        if isinstance(task, Leading):
            self._entry.execute(task)

    def _finish_early(self, task: Finish) -> None:
        """Save and report the end of the loop before its last step.

        If a script asked for the end, the last state is evaluated first. If the generation ends meanwhile, nothing is
        reported.
        """
        if not task.asked or self.run_due_evaluations(self._machine.applied or 0, self._machine.generation):
            self.finish()

    def _on_after_apply_error(self, step: int, generation: int, rank: int, failure: BaseException) -> NoReturn:
        """Report an exception of `after_apply`, which ends the job, and raise it again once all workers saved the step.

        Until then, execute all tasks except computing.

        Args:
            step: the step that is applied.
            rank: this worker's, for the message.
        """
        worker = self._identity.worker
        place = traceback.extract_tb(failure.__traceback__)[-1]
        cause = f"{type(failure).__name__}: {failure} ({place.filename}:{place.lineno})"
        why = f"after_apply raised at step {step} on {node_of(worker)}, rank {rank}: {cause}"
        traceback.print_exception(failure)
        self._link.send(msg.ScriptFailed(worker=worker, generation=generation, step=step, why=why[:8000]))
        while True:
            with self._changed:
                # No further step is computed: the next generation is the last one.
                self._changed.wait_for(lambda: not isinstance(self._machine.task, Wait | Compute))
                task = self._machine.task
            if isinstance(task, Done):
                raise failure
            self._execute_task(task)

    # ---- orders, in the listener thread ----

    def _on_order(self, order: msg.Order) -> None:
        """Handle an order of the coordinator, execute the machine's instructions, and wake the waiting threads."""
        with self._changed:
            self._execute_instructions(self._handle_order(order))
            self._changed.notify_all()

    def _handle_order(self, order: msg.Order) -> list[WorkerInstruction]:
        """Handle an order, and return the machine's instructions.

        Orders that do not concern the machine are executed here: rendezvous keys, checks for unreachable members (in
        another thread), checkpoints, and faults to inject. They give no instructions.
        """
        match order:
            case msg.Posted():
                resources = self._shared.resources.of(order.generation)
                if resources is not None:
                    resources.board.put(order.keys)
            case msg.LookAround(generation=generation):
                # It takes a second if a member is unreachable, and this thread must receive a Stop at once.
                look = threading.Thread(
                    target=self._shared.report_unreachable_members, args=(generation,), name="holdfast-look"
                )
                look.daemon = True
                look.start()
            case msg.AcceptCheckpoint() | msg.PruneCheckpoints():
                if self._saver is not None:
                    self._saver.on_order(order)
            case msg.AskCheckpoint(if_free=if_free):
                self._machine.wishes.raise_wish(Wish.SAVE_IF_FREE if if_free else Wish.SAVE)
            case msg.Inject():
                self._faults.on_inject(order)
            case _:
                return self._machine.on_order(order)
        return []

    def _on_lost(self) -> None:
        """End the process with code 1, because the agent is gone; do nothing if the job is done."""
        with self._changed:
            if self._machine.done:
                return
        # If the agent died, its node counts as dead. The training thread may be anywhere, so nothing is cleaned up.
        os._exit(1)

    def _execute_instructions(self, instructions: list[WorkerInstruction]) -> None:
        """Execute the machine's instructions, in order: send messages, and interrupt, drop or build groups.

        Reports after the script's end are marked. The caller holds the lock.
        """
        for instruction in instructions:
            match instruction:
                case SendToCoordinator(msg.Report() as report) if self._ending:
                    self._link.send(msgspec.structs.replace(report, ending=True))
                case SendToCoordinator():
                    self._link.send(instruction.message)
                case Halt():
                    stop = self._machine.generations.stop
                    self._shared.resources.interrupt(stop.generation if stop else 0)
                case Drop():
                    self._shared.resources.drop(instruction.generation)
                case Build():
                    self._builds.start(instruction.plan)

    def _send_post(self, generation: int, keys: dict[str, bytes]) -> None:
        self._link.send(msg.Post(worker=self._identity.worker, generation=generation, keys=keys))
