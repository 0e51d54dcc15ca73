"""The training thread's way into a generation, from Begin or a passed swap to its first step.

The worker's machine decides which task comes next (`coordination.worker.tasks`). docs/protocol.md, Entering, explains
the order.
"""

from __future__ import annotations

import logging

from holdfast.coordination.worker.tasks import Enter, Forward, Leading, Load, Move, Receive, StashState
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.layouts.proposals import adoption
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import CheckpointDamaged
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import CheckpointSource, SnapshotSource
from holdfast.runtime.checkpoints.saver import CheckpointSaver
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.experts import SessionExperts
from holdfast.runtime.generation.resources import Groups, Resources, SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.session.applying import StepApplier
from holdfast.runtime.session.state_passing import StateExchange
from holdfast.runtime.snapshots.restoring import SnapshotLostError
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.receive import StateReceiver
from holdfast.runtime.state.state import StateMismatchError

logger = logging.getLogger(__name__)


class GenerationEntry:
    """Executes the tasks that lead into a generation. For the training thread."""

    def __init__(
        self,
        shared: SharedContext,
        workload: Workload,
        faults: Faults,
        applier: StepApplier,
        transfers: StateExchange,
        *,
        experts: SessionExperts | None,
        saver: CheckpointSaver | None,
        snapshots: Snapshots | None,
    ) -> None:
        """Create one from a session's parts."""
        self._shared = shared
        self._workload = workload
        self._faults = faults
        self._applier = applier
        self._transfers = transfers
        self._experts = experts
        self._saver = saver
        self._snapshots = snapshots

    def execute(self, task: Leading) -> None:
        """Execute one task: apply a step, stash, load or receive the state, move experts, or report the entry.

        Older generations are closed first. All tasks except FORWARD and stashing wait for the generation's groups. If
        the generation ends meanwhile, the task is left undone; the machine is asked for the next one.
        """
        generation = task.plan.generation
        with self._shared.changed:
            self._shared.resources.retire_before(generation)
            resources = self._shared.resources.of(generation)
        if resources is None:
            return
        if not isinstance(task, Forward):
            self._workload.state.settings.restore()
        if isinstance(task, StashState):
            self._stash_state(task.plan)
            return
        progress = self._shared.progress
        progress.start_activity(Activity.ENTERING)
        if isinstance(task, Forward):
            progress.start_activity(Activity.FORWARD)
            self._faults.strike_at("forward", task.step)
            self._applier.apply_step(generation, task.step, task.commit)
            return
        if isinstance(task, Move | Enter):
            self._transfers.start_sending(resources, task)
        groups = self._shared.wait_for(generation, lambda: resources.groups)
        if groups is None:
            return
        match task:
            case Load():
                progress.start_activity(Activity.LOADING)
                self._load_state(resources, task.plan, task.source)
            case Move():
                progress.start_activity(Activity.MOVING)
                self._move_experts(resources, task.plan, groups)
            case Receive():
                progress.start_activity(Activity.RECEIVING)
                self._receive_state(resources, together=task.together)
            case Enter():
                self._enter(resources)

    def _stash_state(self, plan: GenerationPlan) -> None:
        """Copy the state into this node's memory, before another layout comes into force, and tell the machine.

        Without a state, or if the generation is over, nothing is copied, but the machine is told too. The result of the
        copy is reported to the coordinator by `Snapshots.stash`.

        Raises:
            RuntimeError: this worker has no folder for the copy.
            BadInputError: the script changed an `extra` outside of `apply()`.
        """
        if self._snapshots is None:
            raise RuntimeError("the state must be stashed, but this worker has no folder for it")
        self._shared.progress.start_activity(Activity.SAVING)
        self._workload.state.watch.check_unchanged()
        with self._shared.changed:
            step = self._shared.machine.applied
            over = self._shared.is_over(plan.generation)
        if step is not None and not over:
            self._snapshots.stash(plan, step)
        with self._shared.changed:
            self._shared.machine.generations.record_stash(plan.generation)

    def _load_state(
        self, resources: Resources, plan: GenerationPlan, source: CheckpointSource | SnapshotSource
    ) -> None:
        """Replace the state by a checkpoint or a snapshot, and tell the machine the step.

        Waits first until no transfer or snapshot uses the tensors. A damaged checkpoint is reported. If the source
        cannot be read, waits for the Stop of the generation.
        """
        generation = plan.generation
        with self._shared.changed:
            over = self._shared.is_over(generation)
        if over or not self._transfers.await_quiet():
            return
        if self._snapshots is not None:
            self._snapshots.wait_copied()
        try:
            step = self._read_state(plan, source)
        except DamagedCheckpointError as error:
            self._report_damaged_checkpoint(
                generation, source.name if isinstance(source, CheckpointSource) else "", str(error)
            )
            return
        except SnapshotLostError:
            self._await_generation_end(generation)  # The reason was reported.
            return
        if self._snapshots is not None and isinstance(source, SnapshotSource):
            resources.moved_bytes += self._snapshots.moved_bytes
        if self._saver is not None:
            self._saver.on_loaded(source.name if isinstance(source, CheckpointSource) else "")
        with self._shared.changed:
            self._applier.on_state_replaced()
            self._shared.machine.finish_load(generation, step)

    def _read_state(self, plan: GenerationPlan, source: CheckpointSource | SnapshotSource) -> int:
        """Read the state from a checkpoint or a snapshot, with the experts of this worker in the plan; return its step.

        Raises:
            DamagedCheckpointError, SnapshotLostError: the source cannot be read.
            RuntimeError: this worker has no folder for such a source.
        """
        rank = plan.rank(self._shared.machine.worker) or 0
        if isinstance(source, SnapshotSource):
            if self._snapshots is None:
                raise RuntimeError("a snapshot must be loaded, but this worker has no folder for snapshots")
            return self._snapshots.restore(source, plan, rank)
        if self._saver is None:
            raise RuntimeError(
                f"checkpoint {source.name!r} must be loaded, but this worker has no checkpoint directory"
            )
        state, experts = self._workload.state, self._workload.experts
        first = rank == 0 and self._applier.last_applied is None
        if experts is None or plan.expert_plan is None:
            return self._saver.load(source.name, state, first=first)
        return self._saver.load(
            source.name, state, experts, experts.planned_experts(plan.expert_plan, rank), first=first
        )

    def _report_damaged_checkpoint(self, generation: int, name: str, why: str) -> None:
        """Log and report a checkpoint that cannot be read, and wait for the Stop of the generation.

        Args:
            name: of the checkpoint.
            why: the error; the first 1024 characters are sent.
        """
        logger.warning("checkpoint %s cannot be read: %s", name, why)
        worker = self._shared.machine.worker
        damaged = CheckpointDamaged(worker=worker, generation=generation, name=name, why=why[:1024])
        with self._shared.changed:
            if not self._shared.is_over(generation):
                self._shared.send(damaged)
        self._await_generation_end(generation)

    def _move_experts(self, resources: Resources, plan: GenerationPlan, groups: Groups) -> None:
        """Move the experts of the plan to this worker now, or start to move them in the background of the first step.

        If the move failed, waits for the Stop of the generation.

        Raises:
            RuntimeError: the model has no experts.
        """
        if self._experts is None:
            raise RuntimeError("experts must move, but this model has none")
        beside = plan.expert_plan is not None and plan.expert_plan.beside
        if self._snapshots is not None and not beside:  # A background transfer changes nothing yet.
            self._snapshots.wait_copied()
        if not self._experts.move_experts(resources, plan, groups):
            self._await_generation_end(resources.generation)
            return
        experts = self._workload.experts
        if experts is not None and experts.migration is not None:
            self._transfers.start_parcels(resources, plan, experts.migration)

    def _receive_state(self, resources: Resources, *, together: bool) -> None:
        """Wait until the state has arrived, and adopt it, unless the generation ends before.

        A state that was refused or does not fit is reported as a failure.

        Args:
            together: whether all ranks of the replica group receive. A rank that keeps its old state adopts the new one
                only after all have received theirs, and else drops it; other ranks adopt it first, and wait afterwards.
        """
        generation = resources.generation
        receipt = self._shared.wait_for(
            generation, lambda: resources.receipt if resources.receipt and resources.receipt.has_ended else None
        )
        if receipt is None:
            return
        try:
            header = receipt.result()
        except ConnectionError as error:
            self._report_refused_state(receipt, error)
            return
        machine = self._shared.machine
        with self._shared.changed:
            # From here on the adoption is finished in any case: a Stop is answered at its end.
            if not machine.begin_adoption(generation):
                return
            keeps = machine.keeps
        if together and keeps and not self._await_all_received(generation):
            receipt.release_tensors()  # Release before the report: the next generation's transfer needs the memory.
            with self._shared.changed:
                self._shared.execute(machine.cancel_adoption())
            return
        self._shared.progress.start_activity(
            Activity.RECEIVING
        )  # Waiting for the other ranks reported another activity.
        if self._snapshots is not None:
            self._snapshots.wait_copied()
        try:
            self._workload.state.adopt(header.manifest, receipt.tensors)
        except StateMismatchError as error:
            with self._shared.changed:
                self._shared.execute(machine.void_received_state())
            self._report_refused_state(receipt, error)
            return
        receipt.release_tensors()
        with self._shared.changed:
            self._applier.on_state_replaced()
            self._shared.execute(machine.finish_receive(header.passed, header.step))
        if together and not keeps:
            self._await_all_received(generation)

    def _await_all_received(self, generation: int) -> bool:
        """Wait until all ranks of the replica group received their state. Return False if the generation ends first."""
        return self._shared.agree(adoption(generation), lambda: self._shared.machine.is_adoption_wanted(generation))

    def _report_refused_state(self, receipt: StateReceiver, error: Exception) -> None:
        """Report a received state that was refused, and the failed senders; wait for the Stop of the generation."""
        generation = receipt.ticket.plan.generation
        self._shared.report_failure(
            generation, f"the state from {receipt.sender} was refused: {error}", receipt.failed_senders
        )
        self._await_generation_end(generation)

    def _enter(self, resources: Resources) -> None:
        """Tell the machine that this worker has entered, and how many bytes it received in how many seconds.

        Does nothing if the generation is over.
        """
        receipt = resources.receipt
        bytes_, seconds = resources.moved_bytes, resources.moving_s
        if receipt is not None:
            bytes_, seconds = bytes_ + receipt.nbytes, seconds + receipt.seconds
        with self._shared.changed:
            if not self._shared.is_over(resources.generation):
                self._shared.execute(self._shared.machine.finish_entering(received_bytes=bytes_, transfer_s=seconds))

    def _await_generation_end(self, generation: int) -> None:
        """Wait for the Stop of a generation that cannot continue. The coordinator knows the reason."""
        self._shared.progress.start_activity(Activity.AWAITING)
        self._shared.wait_for(generation, lambda: None)
