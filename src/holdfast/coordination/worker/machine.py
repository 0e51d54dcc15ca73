"""The phase machine of one worker: its next task, its promises, its messages (DESIGN.md 3.1).

The phases are COMPUTE -> REDUCING -> READY(v) -> VOTED -> PASSED -> APPLYING -> COMPUTE of the next step. `boundaries`
has the table of transitions. If v does not consist of exactly the step's samples, all workers that have it go to
REFUSED.

The shell (runtime, or the simulation) passes on the coordinator's orders, calls a method at each boundary, and executes
the instructions that it returns. `task` is the next task of the training thread. A Stop freezes the machine until the
next Begin. Meanwhile only boundaries that end work in progress can be crossed, and the report contains the worker's
position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from holdfast.coordination.worker import tasks
from holdfast.coordination.worker.boundaries import (
    KEEPING,
    NEXT_PHASE,
    UNREPORTED,
    InvalidTransitionError,
    Position,
    next_entering_task,
)
from holdfast.coordination.worker.complaints import Complaints
from holdfast.coordination.worker.replica_group.adopting import StateAdoption
from holdfast.coordination.worker.replica_group.share import Share
from holdfast.coordination.worker.reporting import entered_messages, known_steps_messages, make_report
from holdfast.coordination.worker.requests import Wishes
from holdfast.coordination.worker.tasks import Build, Entering, Halt, SendToCoordinator, Task, WorkerInstruction
from holdfast.coordination.worker.warming import Warming
from holdfast.protocol.commit import Commit
from holdfast.protocol.fingerprint import Fingerprint
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.orders import BecomeStandby, Begin, GenerationOrder, JobDone, PendingOrder, Stop, Warm
from holdfast.protocol.messages.worker import Applied, Finished, Prepared, VoteRefused
from holdfast.protocol.plan import DecisionKind, GenerationPlan, PassedStep, Phase
from holdfast.protocol.state import LiveSource
from holdfast.step_samples import StepSamples

if TYPE_CHECKING:
    from holdfast.coordination.experts.worker_experts import HeldExperts, Rearrangement


class WorkerMachine(StateAdoption):
    """The protocol state of one worker process. Not thread-safe: the shell holds a lock around every call."""

    def __init__(self, worker: str, *, samples: StepSamples, holding: HeldExperts | None = None) -> None:
        """Start without a generation, with a fresh state.

        Args:
            samples: The samples of each step.
            holding: This worker's experts, or None for a dense model. With experts, gradients of finished micro-batches
                are useless after a failure, because other ranks hold the experts' gradients.
        """
        super().__init__(worker)
        self.holding = holding
        self.worker = worker
        self.samples = samples
        self.phase = Phase.IDLE
        #: the last generation for which the experts were moved
        self._placed_generation = 0
        self._complaints = Complaints(worker, self.generations)
        self.warming = Warming(worker, self.generations, self._copy, holding)
        self.wishes = Wishes()

    # ---- queries of the shell ----

    @property
    def frozen(self) -> bool:
        """Whether no boundary may be crossed: from a Stop to the next Begin."""
        return self.generations.frozen

    @property
    def generation(self) -> int:
        """The number of this worker's generation, 0 before the first."""
        return self.generations.number

    @property
    def plan(self) -> GenerationPlan | None:
        """The plan of the current generation."""
        return self.generations.plan

    @property
    def applied(self) -> int | None:
        """The step of the local state, or None for a fresh or void state."""
        return self._copy.applied

    @property
    def passed(self) -> PassedStep | None:
        """The newest step that this worker knows to have passed."""
        return self._copy.passed

    @property
    def leaves_good_state(self) -> bool:
        """Whether the step that has passed will be skipped, and the local state is the last good one."""
        passed = self.passed
        return passed is not None and passed.step == self.step and passed.commit.failed and not self._copy.skipped

    @property
    def is_saved_before_skips(self) -> bool:
        """Whether the job ends after skipped steps: the checkpoint before them stays the newest."""
        return self.plan is not None and self.plan.last and self._copy.skipped

    @property
    def keeps(self) -> bool:
        """Whether the local state stays until a newer one has arrived completely from a member."""
        return self._copy.keeps

    @property
    def history(self) -> tuple[PassedStep, ...]:
        """The newest steps up to the local state, with their results. They are sent together with the state."""
        return tuple(self._copy.history)

    @property
    def step(self) -> int:
        """The number of the step in progress."""
        return self._copy.step

    @property
    def task(self) -> Task:
        """The next task of the training thread: enter a generation, compute, finish, stash the state, warm up, wait, or
        end.

        Read it again after every change.
        """
        if self.done:
            return tasks.Done()
        if self.frozen or self.plan is None:
            return tasks.WarmUp() if self.warming.is_due else tasks.Wait()
        if self.phase is Phase.ENTERING:
            return self._next_entering_task(self.plan)
        if self.phase is Phase.COMPUTE and (self.plan.last or self._copy.stops):
            return tasks.Finish(asked=not self.plan.last)
        if self.phase is Phase.COMPUTE and self.plan.puts_away:
            return (
                tasks.Wait() if self.generations.stashed_generation == self.generation else tasks.StashState(self.plan)
            )
        if self.phase is Phase.COMPUTE and not self._keeps_state_only:
            return tasks.Compute(self.step, self.share, tuple(self._share.summed))
        return tasks.Wait()

    @property
    def share(self) -> tuple[int, ...]:
        """This worker's micro-batches of the step in progress: those that the coordinator assigned, or its default
        share.
        """
        if self._share.assigned is not None:
            return self._share.assigned
        return self.generations.default_share(self.samples.micro_batches)

    # ---- orders from the coordinator ----

    def on_order(self, order: GenerationOrder) -> list[WorkerInstruction]:
        """Handle an order of the coordinator. A stale order, or one that contradicts a promise, changes nothing."""
        if isinstance(order, PendingOrder):
            return self.generations.on_pending_order(order, self.phase)
        if isinstance(order, Warm):
            return self.warming.on_warm(order)
        return self._ORDERS[type(order)](self, order)

    def _on_begin(self, order: Begin) -> list[WorkerInstruction]:
        """Enter a new generation: apply the decision to the local state, take the assigned micro-batches, and build the
        group of the plan.

        Ignored if it is old or excludes this worker.

        Raises:
            InvalidTransitionError: A report is due first, or the decision does not match the local state.
        """
        if not self.generations.is_next(order):
            return []
        if self.phase in UNREPORTED:
            raise self._transition_error("begin before the promised report")
        plan, decision = order.plan, order.decision
        out = self.generations.leave_pending()
        receives = isinstance(plan.source_of(self.worker, decision), LiveSource)
        here = decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD) and self.applied == decision.applied
        try:
            self._copy.apply_decision(decision, receives=receives, apart=self.holding is not None)
        except ValueError as error:
            raise self._transition_error(f"begin: {error}") from error
        if self.holding is not None and decision.kind is DecisionKind.ROLLBACK:
            self.holding.mark_overwritten()
        self.generations.enter(order)
        self._comparison.enter_generation(decision.applied + 1)
        self._assign_share(order, self.generations.unit, same_step=here, keeps=self._copy.keeps)
        self._complaints.clear_checks()
        self.phase = Phase.ENTERING
        return [*out, Build(plan, pending=False)]

    def _on_stop(self, order: Stop) -> list[WorkerInstruction]:
        """Freeze and interrupt the training thread.

        Report at once, or when the commit operation or apply in progress has ended. A stale Stop is ignored.
        """
        if not self.generations.freeze(order):
            return []
        return [Halt(), *self._report_if_due()]

    def _on_job_done(self, order: JobDone) -> list[WorkerInstruction]:
        """Handle JobDone: let the script end, in any phase."""
        self.done = True
        return [] if self.phase is Phase.FINISHED else [Halt()]

    def _on_stand_by(self, order: BecomeStandby) -> list[WorkerInstruction]:
        """Give up the rank and become a standby: the local state and the experts become void, the pending group is
        dropped.

        Ignored if the order is stale, a report is due first, or the script has ended.
        """
        if self.phase in UNREPORTED or self._keeps_state_only or not self.generations.become_standby(order):
            return []
        self._copy.mark_void()
        if self.holding is not None:
            self.holding.mark_overwritten()
        self._share.clear()
        self.phase = Phase.IDLE
        return self.generations.leave_pending()

    #: type of order -> handler
    _ORDERS: ClassVar[Mapping[type, Callable[..., list[WorkerInstruction]]]] = {
        Begin: _on_begin,
        Stop: _on_stop,
        BecomeStandby: _on_stand_by,
        JobDone: _on_job_done,
    }

    # ---- boundaries, called by the training thread ----

    def on_group_ready(self, generation: int) -> list[WorkerInstruction]:
        """Record that the pending group is ready, and tell the coordinator.

        Ignored if frozen or if another generation is pending.
        """
        pending = self.generations.pending_of(generation)
        if pending is None or self.frozen:
            return []
        pending.prepared = True
        return [SendToCoordinator(Prepared(worker=self.worker, generation=generation))]

    def begin_move(self) -> Rearrangement | None:
        """Begin to move the experts; return the rearrangement, or None if frozen.

        Raises:
            JobFailedError: The initial experts are needed, and are no longer here.
            InvalidTransitionError: There are no experts, the plan does not place any, or they do not match it.
        """
        if not self._cross_boundary("begin_move"):
            return None
        plan, decision = self.plan, self.generations.decision
        if self.holding is None or plan is None or plan.expert_plan is None:
            raise self._transition_error("begin_move")
        try:
            return self.holding.apply_placement(
                plan.expert_plan, self.generations.rank, decision.kind if decision else None
            )
        except ValueError as error:
            raise self._transition_error(f"begin_move ({error})") from error

    def end_move(self, generation: int) -> bool:
        """Record that the experts have been moved, or that transfers which overlap the step were started; return False
        if that came too late and does not count.
        """
        if not self._is_entering(generation) or self.holding is None:
            return False
        self._change_phase("end_move")
        self._placed_generation = generation
        if not self.holding.during_step:
            self.holding.on_received()
        return True

    def finish_load(self, generation: int, step: int) -> bool:
        """Record that the checkpoint or snapshot of `step` is loaded, with its experts; return False if that came too
        late.
        """
        if self.plan is None or not self._is_entering(generation):
            return False
        self._change_phase("finish_load")
        if self.holding is not None and self.plan.expert_plan is not None:
            self.holding.on_loaded(self.plan.expert_plan, self.generations.rank)
        self._copy.set_loaded(step, self.generations.decision)
        self._comparison.record_received_state(step)
        return True

    def finish_entering(self, *, received_bytes: int = 0, transfer_s: float = 0.0) -> list[WorkerInstruction]:
        """Record that the group is ready and the decision is executed.

        Return the messages that report it, or an empty list if frozen or while experts are still being received.
        """
        if not self._cross_boundary("finish_entering") or (self.holding is not None and not self.holding.is_complete):
            return []
        return entered_messages(self.worker, self.generation, self._copy, received_bytes, transfer_s)

    def begin_micro_batch(self, micro_batch: int) -> bool:
        """Begin to compute a micro-batch, which this worker must then finish; return False if frozen.

        In a replica group of several local ranks it is only a `proposal`: `accept_proposal` or `withdraw_proposal`
        follows.
        """
        if not self._cross_boundary("begin_micro_batch"):
            return False
        if self.generations.places > 1:
            self._propose(Proposal(self.generation, self.step, micro_batch))
        if self.holding is None and micro_batch not in self._share.summed:
            self._share.summed.append(micro_batch)
        return True

    def begin_reduction(self) -> bool:
        """Go from COMPUTE to REDUCING; return False if frozen.

        Raises `InvalidTransitionError` if a proposal is open to the group.
        """
        if self._share.proposed is not None:
            raise self._transition_error(f"begin_reduction: {self._share.proposed} is open")
        return self._cross_boundary("begin_reduction")

    @property
    def compares_state(self) -> bool:
        """Whether the fingerprint of the step in progress includes a slice of the state.

        It is the same for all members.
        """
        plan = self.plan
        return plan is not None and plan.units > 1 and self._comparison.includes_state(self.step)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint that this worker has compared in the current attempt, or None if it has not reached that."""
        return self._comparison.fingerprint

    def set_fingerprint(self, fingerprint: Fingerprint, describe: Callable[[], tuple[str, ...]] = tuple) -> None:
        """Store the fingerprint that is compared in the reduction that begins now.

        Args:
            describe: Returns the settings in words. It is called only if they are reported.
        """
        self._comparison.set_fingerprint(fingerprint, describe)

    def finish_background_transfer(self, *, received_bytes: int, transfer_s: float) -> list[WorkerInstruction]:
        """Record that the experts whose transfers overlap the step have arrived, and report that the generation is
        entered.

        Empty without experts or if frozen.
        """
        if self.holding is None or not self._cross_boundary("finish_background_transfer"):
            return []
        self.holding.on_received()
        return entered_messages(self.worker, self.generation, self._copy, received_bytes, transfer_s)

    def finish_reduction(self, v: Commit) -> list[WorkerInstruction]:
        """Go from REDUCING to READY: all local reductions have returned, and with them the step result `v` without its
        flags.

        The phase becomes REFUSED, with a message to the coordinator, if the result does not contain every micro-batch
        of the step once, or if workers of one role differ in settings or state. Does nothing if frozen.

        Raises `InvalidTransitionError` in another phase, or if this worker lacks experts.
        """
        if self.frozen:
            return []
        if self.holding is not None and not self.holding.is_complete:
            raise self._transition_error("finish_reduction without all experts")
        if v.unequal_roles:
            self._comparison.differs = True
            self._change_phase("refused")
            why = "workers differ in settings or state"
            return [
                SendToCoordinator(VoteRefused(worker=self.worker, generation=self.generation, step=self.step, why=why))
            ]
        self._comparison.record_agreement()
        hashes = {"hashes": v.sample_hashes, "place_hashes": v.place_hashes}
        if wrong := self.samples.find_error(self.step, samples=v.samples, places=self.generations.places, **hashes):
            self._change_phase("refused")
            return [
                SendToCoordinator(
                    VoteRefused(worker=self.worker, generation=self.generation, step=self.step, why=wrong)
                )
            ]
        self._change_phase("finish_reduction")
        self._copy.reduced = v
        return []

    def begin_vote(self) -> bool:
        """Go from READY to VOTED before the commit operation is issued; return False if frozen."""
        return self._cross_boundary("begin_vote")

    def pass_vote(self, commit: Commit) -> list[WorkerInstruction]:
        """Go from VOTED to PASSED: the commit operation has returned the step result with its flags.

        Return the report if a Stop waits for it.
        """
        self._change_phase("pass_vote")
        self._copy.passed = PassedStep(step=self.step, commit=commit)
        return self._report_if_due()

    def abandon_vote(self) -> list[WorkerInstruction]:
        """Go from VOTED to ABANDONED: the commit operation was left or failed, but may have passed on other workers."""
        self._change_phase("abandon_vote")
        return self._report_if_due()

    def begin_apply(self) -> bool:
        """Go from PASSED to APPLYING before the optimizer changes the state; return False if frozen."""
        return self._cross_boundary("begin_apply")

    def finish_apply(
        self, state_hash: str = "", paused_s: float = 0.0, *, last_step: int = 0
    ) -> list[WorkerInstruction]:
        """Record that the local state is that of the step, and return the messages that report it.

        A swap that has passed takes effect, unless a Stop came first. Granted wishes are dropped, and the share ends
        with the step.

        Args:
            state_hash: The hash of the state, or "" if it was not computed.
            paused_s: How long training paused for this step, in seconds.
            last_step: The step at which the script's loop ends, or 0 if unknown.

        Raises:
            InvalidTransitionError: The boundary is not allowed in this phase, or no step has passed.
        """
        world, generation = self.generations.world, self.generation
        forward = self.phase is Phase.FORWARD
        self._change_phase("finish_apply")
        passed = self.passed
        if passed is None:
            raise self._transition_error("finish_apply without v")
        step, commit = passed.step, passed.commit
        witness = self.plan is not None and self.plan.is_witness(self.worker)
        self._copy.set_step(step, [PassedStep(step=step, commit=commit, generation=generation, world=world)])
        # After a FORWARD, the share already belongs to the next step.
        if not forward:
            self._share = Share()
        self.wishes.drop_granted(commit, unsaved=forward and self.holding is not None)
        if self.holding is not None:
            self.holding.on_committed()
        if not forward and self.generations.is_swap_due(commit):
            self._enter_pending()
        applied = Applied(
            worker=self.worker,
            generation=generation,
            step=step,
            commit=commit,
            world=world,
            state_hash=self.generations.qualify_hash(state_hash),
            witness=witness,
            paused_s=paused_s,
            last_step=last_step,
        )
        return [SendToCoordinator(applied), *self.generations.report_disarmed(), *self._report_if_due()]

    def on_wait_timeout(self, generation: int) -> bool:
        """Record that a wait in `generation` timed out; return whether to check which members are unreachable.

        If True, call `complain` with the result. Until then no report is sent, so that it does not lack the result.
        """
        return self._complaints.start_check(generation)

    def complain(
        self,
        generation: int,
        detail: str,
        *,
        timed_out: bool = False,
        unreachable: Sequence[str] = (),
        transfer_peers: Sequence[str] = (),
    ) -> list[WorkerInstruction]:
        """Report that a collective or a build of `generation` failed; the worker then waits for the coordinator's
        decision.

        Empty if it has left that generation. A report that waited for the check of reachability follows.

        Args:
            timed_out: Whether a wait for it timed out.
            unreachable: The members to which no connection is possible.
            transfer_peers: The members at the other end of failed state transfers.
        """
        complaint, looked = self._complaints.make_complaint(
            generation, detail, timed_out=timed_out, unreachable=unreachable, transfer_peers=transfer_peers
        )
        instructions = [SendToCoordinator(complaint)] if complaint is not None else []
        return [*instructions, *(self._report_if_due() if looked else ())]

    def finish(self) -> list[WorkerInstruction]:
        """Report the end: the training loop asks for no further step, or the generation is the last.

        Return an empty list if frozen.
        """
        finished = Finished(
            worker=self.worker,
            generation=self.generation,
            step=self.applied or 0,
            stopped=self._copy.stops,
            why=self.wishes.why,
        )
        return [SendToCoordinator(finished)] if self._cross_boundary("finish") else []

    def keep_state_only(self) -> bool:
        """Keep the state for others, as the script has ended; the sums of the current micro-batches are forgotten.

        Return False and change nothing if the state is missing or being changed.
        """
        if self.applied is None or self.phase not in KEEPING:
            return False
        # The gradients of the current micro-batch may be only partly summed.
        self._keeps_state_only = True
        self._share.summed = []
        return True

    # ---- inside ----

    @property
    def _position(self) -> Position:
        return type(self._next_entering_task(self.plan)) if self.phase is Phase.ENTERING and self.plan else self.phase

    def _next_entering_task(self, plan: GenerationPlan) -> Entering:
        placed = self.holding is None or self._placed_generation == self.generation
        return next_entering_task(self.worker, plan, self.generations.decision, self._copy, placed=placed)

    def _is_entering(self, generation: int) -> bool:
        """Return whether this worker is about to enter this generation."""
        return not self.frozen and self.generation == generation and self.phase is Phase.ENTERING

    def _enter_pending(self) -> None:
        """Make the pending generation the current one and start to enter it."""
        self.generations.swap()
        self._comparison.enter_generation(self.step)
        self.phase = Phase.ENTERING

    def _cross_boundary(self, boundary: str) -> bool:
        """Change to the phase to which this boundary leads; return False and change nothing if frozen.

        Raises `InvalidTransitionError` if the boundary is not allowed in this phase.
        """
        if self.frozen:
            return False
        self._change_phase(boundary)
        return True

    def _change_phase(self, boundary: str) -> None:
        """Change to the phase to which this boundary leads, frozen or not.

        Raises `InvalidTransitionError` if the boundary is not allowed in this phase.
        """
        following = NEXT_PHASE.get((self._position, boundary))
        if following is None:
            raise self._transition_error(boundary)
        self.phase = following

    def _report_if_due(self) -> list[WorkerInstruction]:
        """Return the report that a Stop requires, after the steps that came with the state.

        Empty without a Stop, or while a commit operation, an apply or a check of reachability is in progress.
        """
        stop = self.generations.stop
        if stop is None or self._complaints.is_checking or self.phase in UNREPORTED:
            return []
        report = make_report(
            self.worker,
            stop,
            self._copy,
            self.holding,
            self.phase,
            self._share.summed,
            self.generation,
            self._comparison,
        )
        return [*known_steps_messages(self.worker, self._copy), SendToCoordinator(report)]

    def _transition_error(self, name: str) -> InvalidTransitionError:
        """Return the exception for a boundary that is not allowed, with the worker's present state in its text."""
        place = f"generation {self.generation}, phase {self.phase}"
        story = f"{place}, applied {self.applied}, passed {self.passed}, stop {self.generations.stop}"
        return InvalidTransitionError(f"{self.worker}: the boundary {name} is not allowed in {story}")
