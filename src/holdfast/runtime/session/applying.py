"""Applies steps that have passed: changes the state, reports the step, and saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from holdfast.coordination.worker.boundaries import KEEPING
from holdfast.coordination.worker.tasks import Compute, Finish
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.plan import GenerationPlan, PassedStep, Phase
from holdfast.runtime.checkpoints.saver import CheckpointSaver, PartShare
from holdfast.runtime.evaluation.evaluating import Evaluator
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.experts import SessionExperts
from holdfast.runtime.generation.resources import Groups, SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.state import state_hash

logger = logging.getLogger(__name__)

#: Handles an exception of `after_apply`; called with the step, the generation, this worker's rank in it, and the
#: exception.
OnAfterApplyError = Callable[[int, int, int, BaseException], NoReturn]


class StepApplier:
    """Applies steps that have passed. For the training thread."""

    def __init__(
        self,
        shared: SharedContext,
        workload: Workload,
        faults: Faults,
        *,
        experts: SessionExperts | None,
        saver: CheckpointSaver | None,
        snapshots: Snapshots | None,
        after_apply: Callable[[int, Commit], None] | None,
        on_after_apply_error: OnAfterApplyError,
        verify_state: int,
        evaluator: Evaluator,
    ) -> None:
        """Create one; for the other arguments see `Session`.

        Args:
            on_after_apply_error: called if `after_apply` raised. The step is applied, and not saved yet.
        """
        #: the step that was applied here last; None if the state was replaced since
        self.last_applied: PassedStep | None = None
        #: seconds that the script has paused since the previous step
        self.paused_s = 0.0
        self._shared = shared
        self._workload = workload
        self._faults = faults
        self._experts = experts
        self._saver = saver
        self._snapshots = snapshots
        self._after_apply = after_apply
        self._on_after_apply_error = on_after_apply_error
        self._verify_state = verify_state
        self._evaluator = evaluator

    def apply_step(self, generation: int, step: int, commit: Commit) -> bool:
        """Apply a passed step: change the state, call `after_apply`, report the step, and save if that is due.

        Waits first until nothing reads the state any longer. Before a step that will be skipped, the last good state is
        saved. In FORWARD, in which only some workers apply a step that others already have, nothing is saved.

        Returns:
            False, with an unchanged state, if a Stop came first: then the coordinator decides about the step.

        Raises:
            Exception: an exception of the optimizer: the state is void, and the process must end. Or an exception of
                `after_apply`: the step is applied and saved, and the job ends.
        """
        machine = self._shared.machine
        self._await_sent_state(generation)
        if self._snapshots is not None:
            self._snapshots.wait_copied()
        with self._shared.changed:
            # A Begin may have come since. Continue only in the generation of this call.
            if machine.generation != generation or not machine.begin_apply():
                return False
            plan = machine.plan
            assert plan is not None
            resources = self._shared.resources.of(generation)
            forward, last_good = machine.phase is Phase.FORWARD, machine.leaves_good_state
        if last_good and not forward:
            self._save_good_state(step - 1, plan)
        self._shared.progress.start_activity(Activity.APPLYING)
        self._workload.apply(commit)
        self._faults.strike_at("applying", step)
        failure = self._run_after_apply(step, commit)
        self._shared.progress.start_activity(Activity.APPLYING)
        self._workload.state.watch.record()
        digest = state_hash(self._workload.state.capture()) if self._is_verified_step(step) else ""
        with self._shared.changed:
            rank = machine.generations.rank
            self._shared.execute(
                machine.finish_apply(digest, self.paused_s, last_step=self._workload.loader.last_step or 0)
            )
            self.paused_s = 0.0
            self.last_applied = PassedStep(step=step, commit=commit)
        if failure is not None:
            self._on_after_apply_error(step, generation, rank, failure)
        groups = resources.groups if resources is not None and not forward else None
        self._shared.progress.start_activity(Activity.SAVING)
        if self._snapshots is not None and not forward:
            self._snapshots.on_step_applied(plan, step)  # FORWARD is only for workers that had not applied the step.
        self._report_and_save(step, plan, rank, groups, commit)
        return True

    def on_state_replaced(self) -> None:
        """Forget the last applied step and evaluation results, which belong to the previous state."""
        self.last_applied = None
        self._evaluator.on_state_replaced()

    def _is_verified_step(self, step: int) -> bool:
        """Whether a hash of the state is reported after the step, and copies of experts are compared."""
        return self._verify_state > 0 and step % self._verify_state == 0

    def _run_after_apply(self, step: int, commit: Commit) -> BaseException | None:
        """Run the script's `after_apply`, if there is one, and check that it left the schedulers alone.

        Returns:
            The exception that was raised, for the caller to handle once the step is reported, or None.
        """
        if self._after_apply is None:
            return None
        self._shared.progress.start_activity(Activity.SCRIPT)
        try:
            self._after_apply(step, commit)
            self._workload.updates.check_schedules()
        except BaseException as error:  # noqa: BLE001 - raised again once the step is saved
            return error
        return None

    def _report_and_save(
        self, step: int, plan: GenerationPlan, rank: int, groups: Groups | None, commit: Commit
    ) -> None:
        """Send the expert loads (rank 0), compare copies of experts if that is due, and save if a checkpoint is due.

        All ranks save after the same step, each its part. If the comparison was interrupted, nothing is saved.

        Args:
            groups: None in FORWARD: not all ranks take part, each applies the step alone and saves nothing.
            commit: the step result. A skipped step is saved only on request: the checkpoint before it stays the newest.
        """
        experts = self._experts
        if experts is not None and rank == 0:
            experts.send_loads(step=step, generation=plan.generation)
        if groups is None:
            return
        if experts is not None and self._is_verified_step(step) and not experts.verify_copies(groups, plan.generation):
            return
        if self._saver is not None and (not commit.failed or Wish.SAVE in commit.wishes):
            share = PartShare.of_member(plan, self._shared.machine.worker)
            self._saver.save_if_due(
                self._workload.state, step, share, commit.wishes, experts.rows_to_save if experts else None
            )

    def _save_good_state(self, step: int, plan: GenerationPlan) -> None:
        """Save the state of `step` before a step that will be skipped, because more skipped steps may follow.

        Does nothing without a checkpoint directory, for step 0, or if that step is saved.
        """
        share = PartShare.of_member(plan, self._shared.machine.worker)
        if self._saver is None or not step or self._saver.has_saved(step, share):
            return
        self._shared.progress.start_activity(Activity.SAVING)
        self._saver.save(self._workload.state, step, share, self._experts.rows_to_save if self._experts else None)

    def finish_loop(self) -> None:
        """Save the last state if it is not saved, and report the end of the loop to the machine once it is written.

        If the generation ended meanwhile, nothing is reported: the loop gets its next task.
        """
        shared, machine = self._shared, self._shared.machine
        generation = self.save_final_state()
        with shared.changed:
            if not shared.is_over(generation) and isinstance(machine.task, Compute | Finish):
                shared.execute(machine.finish())

    def save_after_left_loop(self, unchanged: bool) -> None:
        """Save the state of a script that left its loop early and ended well, if it is not saved.

        If the script left in the middle of a step, its changes for that step to optimizer groups, options and
        requires_grad are undone first. A changed state is not saved, and the coordinator is told. Rank 0 logs a warning
        if the state is not saved in the end. Does nothing if the state is incomplete, for step 0, or if there is no
        checkpoint directory.

        Args:
            unchanged: whether the state is as it was when the script left the loop.
        """
        machine, saver = self._shared.machine, self._saver
        with self._shared.changed:
            step, plan, rank = machine.applied, machine.plan, machine.generations.rank
            is_complete = not machine.keeps and machine.phase in KEEPING
        if saver is None or plan is None or not step or not is_complete or saver.saved_step == step:
            return
        self._workload.state.settings.restore()  # The loop may have been left in the middle of a step.
        why = "another worker has ended, or changed it"
        if unchanged:
            self.save_final_state()
        else:
            why = "it was changed after the loop was left"
            saver.report_unwritten(step, PartShare.of_member(plan, machine.worker), why)
        if rank == 0 and saver.saved_step != step:
            logger.warning(
                "the state of step %s is not saved: %s; call job.stop(reason), which saves, instead of `break`",
                step,
                why,
            )

    def save_final_state(self) -> int:
        """Save the last state if it is not saved, and wait until all writes have ended or the generation is over.

        A save of a best state goes first, unless the job was asked to end. Without a checkpoint directory, nothing is
        saved.

        Returns:
            The generation in which this began; it may be over by now.
        """
        shared, saver = self._shared, self._saver
        with shared.changed:
            generation = shared.machine.generation
        shared.progress.start_activity(Activity.FINISHED)
        if saver is not None:
            if not self._is_last_generation:
                # The save of the last state could overtake the save of a best state, which would be lost.
                shared.wait_for(generation, lambda: not saver.is_saving_best or None)
            self._save_last_state(saver, generation)
            # Otherwise the job could end between a checkpoint's writing and its acceptance.
            shared.wait_for(generation, lambda: saver.is_idle or None)
        return generation

    def await_saved(self) -> None:
        """Wait until all checkpoints being written are complete, or the generation is over."""
        saver = self._saver
        if saver is not None:
            self._shared.wait_for(self._shared.machine.generation, lambda: saver.is_idle or None)

    @property
    def _is_last_generation(self) -> bool:
        """Whether the job was asked to end, so that the newest state must be saved first."""
        with self._shared.changed:
            plan = self._shared.machine.plan
            return plan is not None and plan.last

    def _save_last_state(self, saver: CheckpointSaver, generation: int) -> None:
        """Save the applied step, unless it is saved, the generation is over, or this worker lacks a complete state.

        If the job ends after skipped steps, the checkpoint before them stays the newest.

        Raises:
            BadInputError: the script changed an `extra` outside of `apply()`.
        """
        machine = self._shared.machine
        with self._shared.changed:
            if self._shared.is_over(generation) or machine.plan is None or not machine.applied or machine.keeps:
                return
            if machine.is_saved_before_skips:
                return
            step, share = machine.applied, PartShare.of_member(machine.plan, machine.worker)
        self._workload.state.watch.check_unchanged()
        if not saver.has_saved(step, share):
            saver.save(self._workload.state, step, share, self._experts.rows_to_save if self._experts else None)

    def _await_sent_state(self, generation: int) -> None:
        """Wait until the other members have all state that this worker sends, or the generation is over.

        The state must not change while it is sent.
        """
        with self._shared.changed:
            resources = self._shared.resources.of(generation)
        if resources is not None and not resources.has_sent:
            self._shared.progress.start_activity(Activity.AWAITING)
            self._shared.wait_for(generation, lambda: resources.has_sent)
