"""The generations that one worker knows: the current one, the pending one, and the last that was stopped."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.generations.assignment import share_of
from holdfast.coordination.worker.boundaries import FLAG_GIVEN, InvalidTransitionError
from holdfast.coordination.worker.tasks import Build, Drop, SendToCoordinator, WorkerInstruction
from holdfast.protocol.commit import Commit, Flag
from holdfast.protocol.layouts.layout import hash_of_role
from holdfast.protocol.messages.orders import Arm, BecomeStandby, Begin, Disarm, PendingOrder, Prepare, Stop, Void
from holdfast.protocol.messages.worker import Disarmed
from holdfast.protocol.plan import Decision, GenerationPlan, Phase


@dataclass(slots=True)
class PendingGroup:
    """The group of a generation that is built in the background and not entered yet."""

    plan: GenerationPlan
    #: whether the group is ready on this worker
    prepared: bool = False
    #: whether the group is ready on all workers
    armed: bool = False
    #: the term of a coordinator that waits for the swap flag to be lowered, or 0
    disarms: int = 0


class KnownGenerations:
    """The current generation of one worker, and the checks that reject orders of an old one.

    `decision` is the decision with which the current generation began, or None after a swap. `stop` is set from a Stop
    to the next Begin.
    """

    def __init__(self, worker: str) -> None:
        """Start without a generation. `worker` is the worker's id."""
        self.term = 0
        self.plan: GenerationPlan | None = None
        self.decision: Decision | None = None
        self.pending: PendingGroup | None = None
        self.stop: Stop | None = None
        #: the last generation in which the state was stashed, or in which that failed
        self.stashed_generation = 0
        self._worker = worker
        #: the newest generation that the coordinator told this worker to leave
        self._left_generation = 0

    @property
    def number(self) -> int:
        """The number of this worker's generation, 0 before the first."""
        return self.plan.generation if self.plan else 0

    @property
    def frozen(self) -> bool:
        """Whether no boundary may be crossed: from a Stop to the next Begin."""
        return self.stop is not None

    def record_stash(self, generation: int) -> None:
        """Record that the state is in the node's memory, or that it cannot be stashed there."""
        self.stashed_generation = max(self.stashed_generation, generation)

    @property
    def rank(self) -> int:
        """This worker's rank in its generation.

        Raises:
            InvalidTransitionError: It is in no generation.
        """
        rank = self.plan.rank(self._worker) if self.plan else None
        if rank is None:
            raise InvalidTransitionError(f"{self._worker}: there is no rank in generation {self.number}")
        return rank

    @property
    def places(self) -> int:
        """The number of workers that hold one copy of the model together."""
        return self.plan.places if self.plan else 1

    def qualify_hash(self, state_hash: str) -> str:
        """Return a state hash in the form that is reported: with several workers per replica, it names the part."""
        return hash_of_role(self.rank % self.places, state_hash) if state_hash and self.places > 1 else state_hash

    @property
    def unit(self) -> int:
        """The number of this worker's replica group in its generation."""
        return self.rank // self.places

    @property
    def world(self) -> int:
        """The number of workers in the generation."""
        return len(self.plan.members) if self.plan else 1

    def default_share(self, micro_batches: int) -> tuple[int, ...]:
        """Return this worker's default share of a step with this many micro-batches."""
        return share_of(self.plan, micro_batches, self.rank) if self.plan else ()

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags that this worker raises in the commit operation."""
        return (Flag.SWAP,) if self.pending and self.pending.prepared and self.pending.armed else ()

    def plan_of(self, generation: int) -> GenerationPlan | None:
        """Return the plan of the current or pending generation, or None for any other number."""
        plans = (self.plan, self.pending.plan if self.pending else None)
        return next((plan for plan in plans if plan is not None and plan.generation == generation), None)

    def pending_of(self, generation: int) -> PendingGroup | None:
        """Return the pending generation if it has this number."""
        return self.pending if self.pending is not None and self.pending.plan.generation == generation else None

    def is_current_or_pending(self, generation: int) -> bool:
        """Return whether a failure of this generation still matters to this worker."""
        return not self.frozen and (self.number == generation or self.pending_of(generation) is not None)

    # ---- orders ----

    def is_next(self, order: Begin) -> bool:
        """Return whether a Begin is of a newer generation that includes this worker."""
        plan = order.plan
        stale = plan.term < self.term or plan.generation <= self._newest
        return not stale and plan.rank(self._worker) is not None

    def enter(self, order: Begin) -> None:
        """Enter the generation of a Begin for which `is_next` is true. The pending generation must have been left."""
        self.term, self.plan, self.decision, self.stop = order.plan.term, order.plan, order.decision, None

    def freeze(self, order: Stop) -> bool:
        """Record a Stop, so that this worker crosses no further boundary; return False if it is of an old term or
        generation, or repeated.
        """
        repeated = self.stop is not None and (order.term, order.generation) <= (self.stop.term, self.stop.generation)
        if order.term < self.term or order.generation < max(self.number, self._left_generation) or repeated:
            return False
        self.term, self.stop = order.term, order
        return True

    def become_standby(self, order: BecomeStandby) -> bool:
        """Leave the stopped generation and become a standby.

        Return False and change nothing if the order is of an old term or generation, or the current generation is not
        stopped.
        """
        if order.term < self.term or (self.plan is not None and not self.frozen) or order.generation < self._newest:
            return False
        self.term, self._left_generation = order.term, order.generation
        self.plan = self.decision = self.stop = None
        return True

    def on_pending_order(self, order: PendingOrder, phase: Phase) -> list[WorkerInstruction]:
        """Handle an order about the pending generation; `phase` is the phase of the step in progress."""
        match order:
            case Prepare():
                return self.on_prepare(order)
            case Arm():
                return self.on_arm(order)
            case Disarm():
                return self.on_disarm(order, flag_given=phase in FLAG_GIVEN)
            case Void():
                return self.on_void(order)

    def on_prepare(self, order: Prepare) -> list[WorkerInstruction]:
        """Build the pending group of a plan next to the one in use, instead of an older pending one.

        Ignored if the order is old, this worker is frozen, or it is no member.
        """
        plan = order.plan
        known = self.pending.plan.generation if self.pending else 0
        stale = plan.generation <= max(self._newest, known)
        if plan.term < self.term or stale or self.frozen or plan.rank(self._worker) is None:
            return []
        out = self.leave_pending()
        self.term, self.pending = plan.term, PendingGroup(plan)
        return [*out, Build(plan, pending=True)]

    def on_arm(self, order: Arm) -> list[WorkerInstruction]:
        """Raise the swap flag from the next commit operation on.

        Ignored if the order is of an old term or of another generation than the pending one. Always returns an empty
        list.
        """
        pending = self.pending_of(order.generation)
        if order.term >= self.term and pending is not None:
            pending.armed, pending.disarms = True, 0
        return []

    def on_disarm(self, order: Disarm, *, flag_given: bool) -> list[WorkerInstruction]:
        """Handle Disarm: lower the swap flag, and report it once no step of this generation can cause the swap.

        Ignored if the order is of an old term or of another generation than the pending one, or if this worker is
        frozen.

        Args:
            flag_given: Whether the commit operation of the step in progress already has this worker's flag. Then the
                report follows after the step.
        """
        pending = self.pending_of(order.generation)
        if order.term < self.term or pending is None or self.plan is None or self.frozen:
            return []
        pending.disarms = order.term
        return [] if flag_given else self.report_disarmed()

    def report_disarmed(self) -> list[WorkerInstruction]:
        """Report that the swap flag is lowered, if requested. Call it only before a step has read its flags."""
        pending = self.pending
        if pending is None or not pending.disarms:
            return []
        disarmed = Disarmed(worker=self._worker, term=pending.disarms, generation=pending.plan.generation)
        pending.armed, pending.disarms = False, 0
        return [SendToCoordinator(disarmed)]

    def on_void(self, order: Void) -> list[WorkerInstruction]:
        """Forget the pending group and drop it. Ignored if the order is of an old term or of another generation."""
        if order.term < self.term or self.pending_of(order.generation) is None:
            return []
        return self.leave_pending()

    def leave_pending(self) -> list[WorkerInstruction]:
        """Forget the pending generation, if there is one, and drop its group."""
        pending, self.pending = self.pending, None
        return [Drop(pending.plan.generation)] if pending is not None else []

    # ---- swaps ----

    def is_swap_due(self, commit: Commit) -> bool:
        """Return whether this step result makes the pending generation the current one."""
        return Flag.SWAP in commit.flags and self.pending is not None and not self.frozen

    def swap(self) -> None:
        """Make the pending generation the current one. It has no decision.

        Raises:
            InvalidTransitionError: There is no pending generation.
        """
        if self.pending is None:
            raise InvalidTransitionError(f"{self._worker}: swap in generation {self.number} without a pending one")
        self.plan, self.pending, self.decision = self.pending.plan, None, None

    @property
    def _newest(self) -> int:
        """The newest generation that this worker was in, or that was stopped."""
        return max(self.number, self._left_generation, self.stop.generation if self.stop else 0)
