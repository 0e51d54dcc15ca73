"""The phase machine of one worker: what it may do next, what it promises, what it tells (DESIGN.md 3.1).

COMPUTE -> REDUCING -> READY -> VOTED -> PASSED(v) -> applied, and again. The shell (runtime, or the simulation)
calls a method at each boundary and obeys what comes back; `task` says what the training thread is to do now. A Stop
freezes the machine: from then on no boundary can be crossed until the next Begin, and the report says where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.coordination.assignment import round_robin
from holdfast.protocol.commit import Commit, Flag
from holdfast.protocol.orders import Arm, Begin, JobDone, Prepare, Stop, Void
from holdfast.protocol.plan import Decision, DecisionKind, EpochPlan, Passed, Phase
from holdfast.protocol.worker import Applied, Entered, Fault, Finished, Prepared, Report, WorkerMessage

if TYPE_CHECKING:
    from holdfast.coordination.holding import Holding, Rearrangement


class InvalidTransitionError(Exception):
    """The shell called a boundary that the phase does not allow: a bug, with the story that led there."""


# ---- instructions: what the shell must do, in order ----


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to the coordinator."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Halt:
    """Interrupt the training thread: collectives and transfers are abandoned at once."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the group of a plan in the background; `pending` ones are not entered yet."""

    plan: EpochPlan
    pending: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the group of an epoch that will never be entered."""

    epoch: int


WorkerInstruction = Tell | Halt | Build | Drop


# ---- tasks: what the training thread is to do now ----


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing until something changes."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Apply the retained reduced gradients of `step` with this v, between begin_apply and applied_step."""

    plan: EpochPlan
    step: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Load:
    """Load this checkpoint, then call `loaded`."""

    plan: EpochPlan
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Move:
    """Take up the placement of the experts: `moving`, what it says to do, `moved`.

    send_to: meanwhile, and during what follows, push the state to these members.
    """

    plan: EpochPlan
    send_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the state that is on its way since `pushed`, then call `received`."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True)
class Enter:
    """All is here: call `entered` once the group stands.

    send_to: push the state to these members; compute may go on meanwhile, apply may not.
    """

    plan: EpochPlan
    send_to: tuple[str, ...]


#: What leads into an epoch, in this order, each only where it is needed (docs/protocol.md, Entering).
Entering = Forward | Load | Move | Receive | Enter


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradients of these micro-batches of `step`; `held` ones are there already."""

    step: int
    micro_batches: tuple[int, ...]
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job ends before its last step: save what is here, as at the end of the loop, then call `finish`."""


@dataclass(frozen=True, slots=True)
class Done:
    """The job is over: the script may end."""


Task = Wait | Entering | Compute | Finish | Done


class WorkerMachine:
    """The protocol state of one worker process. Not thread-safe: the shell holds a lock around every call."""

    def __init__(self, worker: str, *, micro_batches: int, holding: Holding | None = None) -> None:
        """Be in no epoch.

        Args:
            holding: this worker's experts, None for a dense model. With experts, gradients of finished micro-batches
                are of no use after a failure: the experts' lie on other ranks.
        """
        self.holding = holding
        self.worker = worker
        self.micro_batches = micro_batches
        self.term = 0
        self.plan: EpochPlan | None = None
        self.decision: Decision | None = None
        self.phase = Phase.IDLE
        #: the step whose state is here; None: no state of the job (fresh or void)
        self.applied: int | None = None
        self.passed: Passed | None = None
        self.pending: EpochPlan | None = None
        self.stop: Stop | None = None
        self.done = False
        self._armed = False
        self._prepared = False
        self._ready = False
        self._vote_open = False
        self._applying = False
        self._report_owed = False
        #: the experts of this epoch are here
        self._moved = False
        #: the state is the initial one of this process: nothing was applied, loaded or received, not even in part
        self._fresh = True
        self._assignment: tuple[int, ...] | None = None
        self._held: list[int] = []

    # ---- what the shell may ask ----

    @property
    def frozen(self) -> bool:
        """True from Stop to the next Begin: no boundary may be crossed."""
        return self.stop is not None

    @property
    def epoch(self) -> int:
        """The epoch this worker is in, 0 before the first."""
        return self.plan.epoch if self.plan else 0

    @property
    def rank(self) -> int:
        """This worker's rank in its epoch."""
        rank = self.plan.rank(self.worker) if self.plan else None
        if rank is None:
            raise self._invalid("rank")
        return rank

    @property
    def world(self) -> int:
        """How many workers the epoch has."""
        return len(self.plan.members) if self.plan else 1

    @property
    def step(self) -> int:
        """The step in progress."""
        return 1 if self.applied is None else self.applied + 1

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What this worker raises in the commit operation."""
        return (Flag.SWAP,) if self._armed and self._prepared and self.pending is not None else ()

    @property
    def task(self) -> Task:
        """What the training thread is to do now; ask again after every change."""
        if self.done:
            return Done()
        if self.frozen or self.plan is None:
            return Wait()
        if self.phase is Phase.ENTERING:
            return self._entering(self.plan)
        if self.phase is Phase.COMPUTE and self.plan.last:
            return Finish()
        if self.phase is Phase.COMPUTE:
            return Compute(self.step, self.share, tuple(self._held))
        return Wait()

    @property
    def share(self) -> tuple[int, ...]:
        """This worker's micro-batches of the step in progress."""
        if self._assignment is not None:
            return self._assignment
        return round_robin(self.micro_batches, self.world)[self.rank]

    # ---- orders from the coordinator ----

    def begin(self, order: Begin) -> list[WorkerInstruction]:
        """Enter a new epoch, unless it is stale or promised away."""
        plan, decision = order.plan, order.decision
        rank = plan.rank(self.worker)
        if plan.term < self.term or plan.epoch <= max(self.epoch, self._stopped_epoch) or rank is None:
            return []
        if self._report_owed:
            raise self._invalid("begin before the promised report")
        out = self._leave_pending()
        redone = decision.kind is DecisionKind.REDO and self.applied == decision.applied
        share = order.assignment[rank] if order.assignment else ()
        keep = redone and bool(share) and set(self._held) <= set(share)
        if not keep:
            self._held = []
        self.term, self.plan, self.decision, self.stop = plan.term, plan, decision, None
        self._assignment = share if order.assignment else None
        self._settle(plan, decision)
        self.phase, self._moved = Phase.ENTERING, False
        return [*out, Build(plan, pending=False)]

    def stop_order(self, order: Stop) -> list[WorkerInstruction]:
        """Freeze, and report as soon as that is safe: never with the commit operation or apply under way."""
        repeated = self.stop is not None and (order.term, order.epoch) <= (self.stop.term, self.stop.epoch)
        if order.term < self.term or order.epoch < self.epoch or repeated:
            return []
        self.term = order.term
        self.stop = order
        if self._vote_open or self._applying:
            self._report_owed = True
            return [Halt()]
        return [Halt(), self._report()]

    def prepare(self, order: Prepare) -> list[WorkerInstruction]:
        """Build the pending group beside the one in use."""
        plan = order.plan
        known = self.pending.epoch if self.pending else 0
        stale = plan.epoch <= max(self.epoch, self._stopped_epoch, known)
        if plan.term < self.term or stale or self.frozen or plan.rank(self.worker) is None:
            return []
        out = self._leave_pending()
        self.term, self.pending = plan.term, plan
        return [*out, Build(plan, pending=True)]

    def arm(self, order: Arm) -> list[WorkerInstruction]:
        """Raise the swap flag from the next commit operation on."""
        if order.term >= self.term and self.pending is not None and self.pending.epoch == order.epoch:
            self._armed = True
        return []

    def void(self, order: Void) -> list[WorkerInstruction]:
        """Forget the pending group."""
        if order.term < self.term or self.pending is None or self.pending.epoch != order.epoch:
            return []
        return self._leave_pending()

    def job_done(self, order: JobDone) -> list[WorkerInstruction]:
        """Let the script end, whatever it is in."""
        self.done = True
        return [] if self.phase is Phase.FINISHED else [Halt()]

    # ---- boundaries, called by the training thread ----

    def prepared(self, epoch: int) -> list[WorkerInstruction]:
        """The pending group stands."""
        if self.pending is None or self.pending.epoch != epoch or self.frozen:
            return []
        self._prepared = True
        return [Tell(Prepared(worker=self.worker, epoch=epoch))]

    def pushed(self, epoch: int) -> bool:
        """A peer offers the state of `epoch`: True if this worker now takes it (and, where pending, has entered it)."""
        if self.frozen or self.applied is not None:
            return False
        if self.pending is not None and self.pending.epoch == epoch and self.plan is None:
            self._swap()
        if self.epoch != epoch or self.phase is not Phase.ENTERING:
            return False
        self._fresh = False
        return True

    def moving(self) -> Rearrangement | None:
        """The placement of the experts is about to be taken up; None: frozen.

        Raises:
            JobFailedError: the initial experts are wanted, and are not here any more.
        """
        if self.frozen:
            return None
        task, decision = self.task, self.decision
        if not isinstance(task, Move) or self.holding is None or task.plan.experts is None:
            raise self._invalid("moving")
        try:
            return self.holding.take_up(task.plan.experts, self.rank, decision.kind if decision else None)
        except ValueError as error:
            raise self._invalid(f"moving ({error})") from error

    def moved(self, epoch: int) -> bool:
        """The experts are here. False: they came too late, and do not count."""
        if self.frozen or self.epoch != epoch or self.phase is not Phase.ENTERING or self.holding is None:
            return False
        self.holding.brought()
        self._moved = True
        return True

    def received(self, epoch: int, state: Passed | None, step: int) -> bool:
        """The whole state of `step` is here, checked. False: it came too late, and is void."""
        if self.frozen or self.epoch != epoch or self.phase is not Phase.ENTERING:
            return False
        if not isinstance(self.task, Receive):
            raise self._invalid("received")
        self.applied, self.passed = step, state
        return True

    def loaded(self, epoch: int, step: int) -> bool:
        """The checkpoint of `step` is loaded. False: it came too late."""
        if self.plan is None or self.frozen or self.epoch != epoch or self.phase is not Phase.ENTERING:
            return False
        if self.holding is not None and self.plan.experts is not None:
            self.holding.loaded(self.plan.experts, self.rank)
        self.applied, self.passed = step, None
        return True

    def entered(self, *, received_bytes: int = 0, transfer_s: float = 0.0) -> list[WorkerInstruction]:
        """The group stands and the decision is carried out."""
        if self.frozen:
            return []
        self._expect("entered", Phase.ENTERING)
        if self.applied is None or not isinstance(self.task, Enter):
            raise self._invalid("entered without the decided state")
        self.phase = Phase.COMPUTE
        message = Entered(
            worker=self.worker,
            epoch=self.epoch,
            applied=self.applied,
            received_bytes=received_bytes,
            transfer_s=transfer_s,
        )
        return [Tell(message)]

    def computing(self, micro_batch: int) -> bool:
        """A micro-batch is about to be computed; False: not any more. From here on it is this worker's to finish."""
        if self.frozen:
            return False
        self._expect("computing", Phase.COMPUTE)
        if self.holding is None and micro_batch not in self._held:
            self._held.append(micro_batch)
        return True

    def computed(self) -> bool:
        """COMPUTE -> REDUCING. False: frozen."""
        return self._advance("computed", Phase.COMPUTE, Phase.REDUCING)

    def reduced(self) -> bool:
        """REDUCING -> READY: every local reduction has returned. False: frozen."""
        if not self._advance("reduced", Phase.REDUCING, Phase.READY):
            return False
        self._ready = True
        return True

    def voting(self) -> bool:
        """READY -> VOTED: the commit operation is about to be issued. False: frozen."""
        if not self._advance("voting", Phase.READY, Phase.VOTED):
            return False
        self._vote_open = True
        return True

    def vote_passed(self, commit: Commit) -> list[WorkerInstruction]:
        """VOTED -> PASSED(v): the commit operation returned, in time or just before it would have been abandoned."""
        self._expect("vote_passed", Phase.VOTED)
        self._vote_open = False
        self.phase = Phase.PASSED
        self.passed = Passed(step=self.step, commit=commit)
        return self._pay_report()

    def vote_abandoned(self) -> list[WorkerInstruction]:
        """The commit operation was abandoned or failed; whether it passed elsewhere is not known here."""
        self._expect("vote_abandoned", Phase.VOTED)
        self._vote_open = False
        return self._pay_report()

    def begin_apply(self) -> bool:
        """The optimizer is about to change the state. False: frozen, the decision will say."""
        if self.frozen:
            return False
        forward = self.phase is Phase.ENTERING and self._forward_due
        if self.phase is not Phase.PASSED and not forward:
            raise self._invalid("begin_apply")
        self._applying = True
        return True

    def applied_step(self, time: float, state_hash: str = "") -> list[WorkerInstruction]:
        """The state is that of the step now. A passed swap takes effect here, unless a Stop came first."""
        if not self._applying or self.passed is None:
            raise self._invalid("applied_step")
        commit, world, epoch = self.passed.commit, self.world, self.epoch
        self.applied = self.passed.step
        self._applying = self._ready = False
        self._held, self._assignment = [], None
        if self.holding is not None:
            self.holding.passed()
        told = Tell(
            Applied(
                worker=self.worker,
                epoch=epoch,
                step=self.applied,
                commit=commit,
                world=world,
                time=time,
                state_hash=state_hash,
            )
        )
        if self.phase is Phase.PASSED:
            self.phase = Phase.COMPUTE
            if Flag.SWAP in commit.flags and self.pending is not None and not self.frozen:
                self._swap()
        return [told, *self._pay_report()]

    def fault(
        self, epoch: int, detail: str, *, timed_out: bool = False, unreachable: Sequence[str] = ()
    ) -> list[WorkerInstruction]:
        """A collective or a build of `epoch` failed: leave the step and wait for the coordinator's word.

        Args:
            timed_out: it was waited for until its time was up.
            unreachable: members that no connection can be made to.
        """
        pending = self.pending is not None and self.pending.epoch == epoch
        if self.frozen or not (self.epoch == epoch or pending):
            return []
        fault = Fault(
            worker=self.worker,
            epoch=epoch,
            detail=detail[:1024],
            timed_out=timed_out,
            unreachable=tuple(unreachable),
        )
        return [Tell(fault)]

    def finish(self) -> list[WorkerInstruction]:
        """The training loop asks for no further step, or the epoch is the last."""
        if self.frozen:
            return []
        self._expect("finish", Phase.COMPUTE)
        self.phase = Phase.FINISHED
        return [Tell(Finished(worker=self.worker, step=self.applied or 0))]

    # ---- inside ----

    @property
    def _stopped_epoch(self) -> int:
        return self.stop.epoch if self.stop else 0

    @property
    def _forward_due(self) -> bool:
        decision = self.decision
        if decision is None or decision.kind is not DecisionKind.FORWARD:
            return False
        return self.applied is not None and self.applied == decision.applied - 1

    def _settle(self, plan: EpochPlan, decision: Decision) -> None:
        """Take over what the decision says about the state."""
        if self.worker in plan.sources or decision.kind is DecisionKind.ROLLBACK:
            # A checkpoint is read into the live parameters: they are nobody's initial state any more.
            self._fresh = self._fresh and self.applied is None and decision.kind is not DecisionKind.ROLLBACK
            self.applied, self.passed, self._ready = None, None, False
            if self.holding is not None and decision.kind is DecisionKind.ROLLBACK:
                self.holding.overwrite()
            return
        if decision.kind is DecisionKind.START and self.applied is None:
            if not self._fresh:
                raise self._invalid("begin: START from a state that is half overwritten")
            self.applied = decision.applied
        if self.applied is None:
            raise self._invalid("begin: no state, and no source for it")
        if self._forward_due:
            if not self._ready or decision.commit is None:
                raise self._invalid("begin: FORWARD without reduced gradients")
            self.passed = Passed(step=decision.applied, commit=decision.commit)
            return
        self._ready = False
        if self.applied != decision.applied:
            raise self._invalid(f"begin: state {self.applied} where {decision.applied} is decided")

    def _entering(self, plan: EpochPlan) -> Entering:
        decision, lacking = self.decision, self.applied is None
        if self._forward_due and self.passed is not None:
            return Forward(plan, self.passed.step, self.passed.commit)
        if lacking and decision is not None and decision.kind is DecisionKind.ROLLBACK:
            return Load(plan, decision.checkpoint)
        send_to = tuple(w for w, sources in plan.sources.items() if self.worker in sources)
        if self.holding is not None and not self._moved:
            return Move(plan, send_to)
        return Receive(plan) if lacking else Enter(plan, send_to)

    def _swap(self) -> None:
        """The pending epoch is the current one from here on."""
        assert self.pending is not None
        self.plan, self.pending, self.decision = self.pending, None, None
        self._armed = self._prepared = False
        self._assignment = None
        self.phase, self._moved = Phase.ENTERING, False

    def _leave_pending(self) -> list[WorkerInstruction]:
        if self.pending is None:
            return []
        epoch, self.pending = self.pending.epoch, None
        self._armed = self._prepared = False
        return [Drop(epoch)]

    def _advance(self, name: str, source: Phase, target: Phase) -> bool:
        if self.frozen:
            return False
        self._expect(name, source)
        self.phase = target
        return True

    def _report(self) -> Tell:
        assert self.stop is not None
        self._report_owed = False
        report = Report(
            worker=self.worker,
            term=self.stop.term,
            epoch=self.stop.epoch,
            applied=self.applied,
            step=self.step,
            phase=self.phase,
            fresh=self.applied is None and self._fresh,
            ready=self._ready,
            passed=self.passed,
            held=tuple(sorted(self._held)),
            # Without the rest of the state they are of no use to anybody.
            experts=self.holding.blob if self.holding is not None and self.applied is not None else b"",
            experts_next=self.holding.next_blob if self.holding is not None and self._ready else b"",
        )
        return Tell(report)

    def _pay_report(self) -> list[WorkerInstruction]:
        return [self._report()] if self._report_owed else []

    def _expect(self, name: str, phase: Phase) -> None:
        if self.phase is not phase:
            raise self._invalid(name)

    def _invalid(self, name: str) -> InvalidTransitionError:
        story = (
            f"epoch {self.epoch}, phase {self.phase}, applied {self.applied}, passed {self.passed}, stop {self.stop}"
        )
        return InvalidTransitionError(f"{self.worker}: {name} is not allowed in {story}")
