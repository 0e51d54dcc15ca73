"""The generations that one worker knows of: the one it is in, the one prepared beside it, the one that was stopped."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.generations.assignment import share_of
from holdfast.coordination.worker.boundaries import FLAG_GIVEN, InvalidTransitionError
from holdfast.coordination.worker.tasks import Build, Drop, Tell, WorkerInstruction
from holdfast.protocol.commit import Commit, Flag
from holdfast.protocol.layouts.layout import hash_of_role
from holdfast.protocol.messages.orders import Arm, Begin, Disarm, PendingOrder, Prepare, StandBy, Stop, Void
from holdfast.protocol.messages.worker import Disarmed
from holdfast.protocol.plan import Decision, GenerationPlan, Phase


@dataclass(slots=True)
class PendingGroup:
    """The group of a generation that is not entered yet, beside the one in use."""

    plan: GenerationPlan
    prepared: bool = False  # it stands here
    armed: bool = False  # it stands everywhere
    disarms: int = 0  # the term of a coordinator that wants the flag down again, and was not told yet that it is


class KnownGenerations:
    """Which generation is in force for one worker, and which orders are of an old one.

    `decision` is what the generation in force began with, None after a swap. `stop` is there from Stop to the next
    Begin.
    """

    def __init__(self, worker: str) -> None:
        """Begin in no generation. `worker`: whose generations these are, by its id."""
        self.term = 0
        self.plan: GenerationPlan | None = None
        self.decision: Decision | None = None
        self.pending: PendingGroup | None = None
        self.stop: Stop | None = None
        #: the generation in which the state was put away last, or could not be
        self.put_away = 0
        self._worker = worker
        #: the newest generation that this worker has left for good, as far as it was told
        self._over = 0

    @property
    def number(self) -> int:
        """The generation this worker is in, 0 before the first."""
        return self.plan.generation if self.plan else 0

    @property
    def frozen(self) -> bool:
        """True from Stop to the next Begin: no boundary may be crossed."""
        return self.stop is not None

    def has_put_away(self, generation: int) -> None:
        """What this worker is to put away in a generation is in its node's memory, or it was told that it cannot be."""
        self.put_away = max(self.put_away, generation)

    @property
    def rank(self) -> int:
        """This worker's rank in its generation."""
        rank = self.plan.rank(self._worker) if self.plan else None
        if rank is None:
            raise InvalidTransitionError(f"{self._worker}: there is no rank in generation {self.number}")
        return rank

    @property
    def places(self) -> int:
        """How many workers have a replica of the model between them in this generation."""
        return self.plan.places if self.plan else 1

    def told(self, state_hash: str) -> str:
        """Return how the hash of the state that is here is told: that of a part of it names the part."""
        return hash_of_role(self.rank % self.places, state_hash) if state_hash and self.places > 1 else state_hash

    @property
    def unit(self) -> int:
        """The number of this worker's unit in its generation."""
        return self.rank // self.places

    @property
    def world(self) -> int:
        """How many workers the generation has."""
        return len(self.plan.members) if self.plan else 1

    def share(self, micro_batches: int) -> tuple[int, ...]:
        """Return this worker's micro-batches of a step of so many, where nobody says otherwise of that step."""
        return share_of(self.plan, micro_batches, self.rank) if self.plan else ()

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What this worker raises in the commit operation."""
        return (Flag.SWAP,) if self.pending and self.pending.prepared and self.pending.armed else ()

    def plan_of(self, generation: int) -> GenerationPlan | None:
        """Return the plan of the generation in force, or of the pending one; None of any other."""
        plans = (self.plan, self.pending.plan if self.pending else None)
        return next((plan for plan in plans if plan is not None and plan.generation == generation), None)

    def pending_of(self, generation: int) -> PendingGroup | None:
        """Return the pending generation if it has this number."""
        return self.pending if self.pending is not None and self.pending.plan.generation == generation else None

    def concerns(self, generation: int) -> bool:
        """Tell whether a failure of this generation is news."""
        return not self.frozen and (self.number == generation or self.pending_of(generation) is not None)

    # ---- orders ----

    def is_next(self, order: Begin) -> bool:
        """Tell whether a Begin is of a generation that was neither in force nor stopped, with this worker in it."""
        plan = order.plan
        stale = plan.term < self.term or plan.generation <= self._newest
        return not stale and plan.rank(self._worker) is not None

    def begin(self, order: Begin) -> None:
        """Be in the generation of a Begin that `is_next`; what was pending must have been left."""
        self.term, self.plan, self.decision, self.stop = order.plan.term, order.plan, order.decision, None

    def freeze(self, order: Stop) -> bool:
        """Take a Stop; False where it is of an old generation, or was taken already."""
        repeated = self.stop is not None and (order.term, order.generation) <= (self.stop.term, self.stop.generation)
        if order.term < self.term or order.generation < max(self.number, self._over) or repeated:
            return False
        self.term, self.stop = order.term, order
        return True

    def stand_by(self, order: StandBy) -> bool:
        """Be in no generation any more; False: the order is of an old time, or this worker is in one."""
        if order.term < self.term or (self.plan is not None and not self.frozen) or order.generation < self._newest:
            return False
        self.term, self._over = order.term, order.generation
        self.plan = self.decision = self.stop = None
        return True

    def of_pending(self, order: PendingOrder, phase: Phase) -> list[WorkerInstruction]:
        """Take an order that concerns the pending generation; `phase`: of the step in progress."""
        match order:
            case Prepare():
                return self.prepare(order)
            case Arm():
                return self.arm(order)
            case Disarm():
                return self.disarm(order, flag_given=phase in FLAG_GIVEN)
            case Void():
                return self.void(order)

    def prepare(self, order: Prepare) -> list[WorkerInstruction]:
        """Build the pending group beside the one in use."""
        plan = order.plan
        known = self.pending.plan.generation if self.pending else 0
        stale = plan.generation <= max(self._newest, known)
        if plan.term < self.term or stale or self.frozen or plan.rank(self._worker) is None:
            return []
        out = self.leave_pending()
        self.term, self.pending = plan.term, PendingGroup(plan)
        return [*out, Build(plan, pending=True)]

    def arm(self, order: Arm) -> list[WorkerInstruction]:
        """Raise the swap flag from the next commit operation on."""
        pending = self.pending_of(order.generation)
        if order.term >= self.term and pending is not None:
            pending.armed, pending.disarms = True, 0
        return []

    def disarm(self, order: Disarm, *, flag_given: bool) -> list[WorkerInstruction]:
        """Lower the swap flag, and say so once it is clear that no step of this generation brings about the swap.

        Args:
            flag_given: the commit operation of the step in progress has this worker's flag already.
        """
        pending = self.pending_of(order.generation)
        if order.term < self.term or pending is None or self.plan is None or self.frozen:
            return []
        pending.disarms = order.term
        return [] if flag_given else self.disarmed()

    def disarmed(self) -> list[WorkerInstruction]:
        """A step begins, or has not come to its flags yet: where they are to be down, they are from here on."""
        pending = self.pending
        if pending is None or not pending.disarms:
            return []
        told = Disarmed(worker=self._worker, term=pending.disarms, generation=pending.plan.generation)
        pending.armed, pending.disarms = False, 0
        return [Tell(told)]

    def void(self, order: Void) -> list[WorkerInstruction]:
        """Forget the pending group."""
        if order.term < self.term or self.pending_of(order.generation) is None:
            return []
        return self.leave_pending()

    def leave_pending(self) -> list[WorkerInstruction]:
        """Let go of the pending generation, where there is one."""
        pending, self.pending = self.pending, None
        return [Drop(pending.plan.generation)] if pending is not None else []

    # ---- swaps ----

    def swap_due(self, commit: Commit) -> bool:
        """Tell whether a step that passed with this v brings the pending generation into force."""
        return Flag.SWAP in commit.flags and self.pending is not None and not self.frozen

    def swap(self) -> None:
        """Be in the pending generation from here on."""
        if self.pending is None:
            raise InvalidTransitionError(f"{self._worker}: a swap in generation {self.number}, where none is pending")
        self.plan, self.pending, self.decision = self.pending.plan, None, None

    @property
    def _newest(self) -> int:
        """The newest generation that this worker was in, or that was stopped."""
        return max(self.number, self._over, self.stop.generation if self.stop else 0)
