"""The phase machine of one worker: what it may do next, what it promises, what it tells (DESIGN.md 3.1).

COMPUTE -> REDUCING -> READY(v) -> VOTED -> PASSED -> APPLYING -> COMPUTE of the next step: `boundaries` says which
leads where. A v that is not made of the step's samples leads to REFUSED, for all that have it. The shell (runtime, or
the simulation) passes on what the coordinator orders, calls a method at each boundary and obeys what comes back; `task`
says what the training thread is to do now. A Stop freezes the machine: from then on no boundary can be crossed until
the next Begin, but those that end what is under way, and the report says where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from holdfast.coordination.worker import tasks
from holdfast.coordination.worker.boundaries import KEEPING, NEXT, UNDER_WAY, InvalidTransitionError, Place, due
from holdfast.coordination.worker.complaints import Complaints
from holdfast.coordination.worker.reporting import report_of, tell_entered, what_was_sent
from holdfast.coordination.worker.tasks import Build, Entering, Halt, Task, Tell, WorkerInstruction
from holdfast.coordination.worker.unit.adopting import Adopting
from holdfast.coordination.worker.unit.share import Share
from holdfast.coordination.worker.warming import Warming
from holdfast.coordination.worker.wishes import Wishes
from holdfast.protocol.commit import Commit
from holdfast.protocol.fingerprint import Fingerprint
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.orders import Begin, GenerationOrder, JobDone, PendingOrder, StandBy, Stop, Warm
from holdfast.protocol.messages.worker import Applied, Finished, Prepared, VoteRefused
from holdfast.protocol.plan import DecisionKind, GenerationPlan, Passed, Phase
from holdfast.protocol.state import LiveSource
from holdfast.step_samples import StepSamples

if TYPE_CHECKING:
    from holdfast.coordination.experts.holding import HeldExperts, Rearrangement


class WorkerMachine(Adopting):
    """The protocol state of one worker process. Not thread-safe: the shell holds a lock around every call."""

    def __init__(self, worker: str, *, samples: StepSamples, holding: HeldExperts | None = None) -> None:
        """Begin in no generation, with a fresh state.

        Args:
            samples: what each step is made of.
            holding: this worker's experts, None for a dense model. With experts, gradients of finished micro-batches
                are of no use after a failure: the experts' lie on other ranks.
        """
        super().__init__(worker)
        self.holding = holding
        self.worker = worker
        self.samples = samples
        self.phase = Phase.IDLE
        #: the generation whose placement of the experts was taken up last
        self._moved_in = 0
        self._complaints = Complaints(worker, self.generations)
        self.warming = Warming(worker, self.generations, self._copy, holding)
        self.wishes = Wishes()

    # ---- what the shell may ask ----

    @property
    def frozen(self) -> bool:
        """True from Stop to the next Begin: no boundary may be crossed."""
        return self.generations.frozen

    @property
    def generation(self) -> int:
        """The generation this worker is in, 0 before the first."""
        return self.generations.number

    @property
    def plan(self) -> GenerationPlan | None:
        """The plan of that generation."""
        return self.generations.plan

    @property
    def applied(self) -> int | None:
        """The step whose state is here; None: no state of the job (fresh or void)."""
        return self._copy.applied

    @property
    def passed(self) -> Passed | None:
        """The newest step that is known here to have passed."""
        return self._copy.passed

    @property
    def leaves_good_state(self) -> bool:
        """Whether the step that has passed will be skipped, and the state that is here is the last good one."""
        passed = self.passed
        return passed is not None and passed.step == self.step and passed.commit.failed and not self._copy.skipped

    @property
    def is_saved_before_skips(self) -> bool:
        """Whether the job ends after skipped steps: the checkpoint before them stays the newest."""
        return self.plan is not None and self.plan.last and self._copy.skipped

    @property
    def keeps(self) -> bool:
        """True while the state that is here stays until the newer one has come whole that a member is to send."""
        return self._copy.keeps

    @property
    def history(self) -> tuple[Passed, ...]:
        """The newest steps up to the state that is here, as far as v is known: what goes with it."""
        return tuple(self._copy.history)

    @property
    def step(self) -> int:
        """The step in progress."""
        return self._copy.step

    @property
    def task(self) -> Task:
        """What the training thread is to do now; ask again after every change."""
        if self.done:
            return tasks.Done()
        if self.frozen or self.plan is None:
            return tasks.WarmUp() if self.warming.due else tasks.Wait()
        if self.phase is Phase.ENTERING:
            return self._due(self.plan)
        if self.phase is Phase.COMPUTE and (self.plan.last or self._copy.stops):
            return tasks.Finish(asked=not self.plan.last)
        if self.phase is Phase.COMPUTE and self.plan.puts_away:
            return tasks.Wait() if self.generations.put_away == self.generation else tasks.PutAway(self.plan)
        if self.phase is Phase.COMPUTE and not self._kept:
            return tasks.Compute(self.step, self.share, tuple(self._share.summed))
        return tasks.Wait()

    @property
    def share(self) -> tuple[int, ...]:
        """This worker's micro-batches of the step in progress."""
        if self._share.assigned is not None:
            return self._share.assigned
        return self.generations.share(self.samples.micro_batches)

    # ---- orders from the coordinator ----

    def order(self, order: GenerationOrder) -> list[WorkerInstruction]:
        """Take an order; one that is stale, or that this worker has promised away, changes nothing."""
        if isinstance(order, PendingOrder):
            return self.generations.of_pending(order, self.phase)
        if isinstance(order, Warm):
            return self.warming.order(order)
        return self._ORDERS[type(order)](self, order)

    def _begin(self, order: Begin) -> list[WorkerInstruction]:
        """Enter a new generation."""
        if not self.generations.is_next(order):
            return []
        if self.phase in UNDER_WAY:
            raise self._invalid("begin before the promised report")
        plan, decision = order.plan, order.decision
        out = self.generations.leave_pending()
        receives = isinstance(plan.source_of(self.worker, decision), LiveSource)
        here = decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD) and self.applied == decision.applied
        try:
            self._copy.settle(decision, receives=receives, apart=self.holding is not None)
        except ValueError as error:
            raise self._invalid(f"begin: {error}") from error
        if self.holding is not None and decision.kind is DecisionKind.ROLLBACK:
            self.holding.overwrite()
        self.generations.begin(order)
        self._comparison.enter(decision.applied + 1)
        self._take_up(order, self.generations.unit, same_step=here, keeps=self._copy.keeps)
        self._complaints.forget()
        self.phase = Phase.ENTERING
        return [*out, Build(plan, pending=False)]

    def _stop(self, order: Stop) -> list[WorkerInstruction]:
        """Freeze, and report: at once, or where the commit operation or apply is under way, at its end."""
        if not self.generations.freeze(order):
            return []
        return [Halt(), *self._report()]

    def _job_done(self, order: JobDone) -> list[WorkerInstruction]:
        """Let the script end, whatever it is in."""
        self.done = True
        return [] if self.phase is Phase.FINISHED else [Halt()]

    def _stand_by(self, order: StandBy) -> list[WorkerInstruction]:
        """Have no rank any more, in good order: what is here is of no use to anybody."""
        if self.phase in UNDER_WAY or self._kept or not self.generations.stand_by(order):
            return []
        self._copy.spoil()
        if self.holding is not None:
            self.holding.overwrite()
        self._share.leave()
        self.phase = Phase.IDLE
        return self.generations.leave_pending()

    #: what the coordinator orders -> what it leads to
    _ORDERS: ClassVar[Mapping[type, Callable[..., list[WorkerInstruction]]]] = {
        Begin: _begin,
        Stop: _stop,
        StandBy: _stand_by,
        JobDone: _job_done,
    }

    # ---- boundaries, called by the training thread ----

    def prepared(self, generation: int) -> list[WorkerInstruction]:
        """The pending group stands."""
        pending = self.generations.pending_of(generation)
        if pending is None or self.frozen:
            return []
        pending.prepared = True
        return [Tell(Prepared(worker=self.worker, generation=generation))]

    def moving(self) -> Rearrangement | None:
        """The placement of the experts is about to be taken up; None: frozen.

        Raises:
            JobFailedError: the initial experts are wanted, and are not here any more.
        """
        if not self._cross("moving"):
            return None
        plan, decision = self.plan, self.generations.decision
        if self.holding is None or plan is None or plan.expert_plan is None:
            raise self._invalid("moving")
        try:
            return self.holding.take_up(plan.expert_plan, self.generations.rank, decision.kind if decision else None)
        except ValueError as error:
            raise self._invalid(f"moving ({error})") from error

    def moved(self, generation: int) -> bool:
        """The experts are here. False: they came too late, and do not count."""
        if not self._enters(generation) or self.holding is None:
            return False
        self._follow("moved")
        self._moved_in = generation
        if not self.holding.beside:
            self.holding.brought()
        return True

    def loaded(self, generation: int, step: int) -> bool:
        """The checkpoint of `step` is loaded. False: it came too late."""
        if self.plan is None or not self._enters(generation):
            return False
        self._follow("loaded")
        if self.holding is not None and self.plan.expert_plan is not None:
            self.holding.loaded(self.plan.expert_plan, self.generations.rank)
        self._copy.load(step, self.generations.decision)
        self._comparison.receive(step)
        return True

    def entered(self, *, received_bytes: int = 0, transfer_s: float = 0.0) -> list[WorkerInstruction]:
        """The group stands and the decision is carried out; it is told once all that belongs to this worker is here."""
        if not self._cross("entered") or (self.holding is not None and not self.holding.whole):
            return []
        return tell_entered(self.worker, self.generation, self._copy, received_bytes, transfer_s)

    def computing(self, micro_batch: int) -> bool:
        """A micro-batch is about to be computed; False: not any more. From here on it is this worker's to finish.

        A place of a unit has it only as a `proposal` then: `agreed` or `withdrawn` follows.
        """
        if not self._cross("computing"):
            return False
        if self.generations.places > 1:
            self._propose(Proposal(self.generation, self.step, micro_batch))
        if self.holding is None and micro_batch not in self._share.summed:
            self._share.summed.append(micro_batch)
        return True

    def computed(self) -> bool:
        """COMPUTE -> REDUCING. False: frozen."""
        if self._share.proposed is not None:
            raise self._invalid(f"computed: {self._share.proposed} is open")
        return self._cross("computed")

    @property
    def compares_state(self) -> bool:
        """Whether the fingerprint of the step in progress includes a slice of the state: the same for all members."""
        plan = self.plan
        return plan is not None and plan.units > 1 and self._comparison.includes_state(self.step)

    @property
    def compared(self) -> Fingerprint | None:
        """What this worker has compared with others at the attempt at hand; None if it has not come that far."""
        return self._comparison.fingerprint

    def comparing(self, fingerprint: Fingerprint, describe: Callable[[], tuple[str, ...]] = tuple) -> None:
        """The reduction is about to begin, in which this is compared.

        Args:
            describe: returns the settings in words; called if they are reported.
        """
        self._comparison.begin(fingerprint, describe)

    def brought(self, *, received_bytes: int, transfer_s: float) -> list[WorkerInstruction]:
        """What was to come beside the step is here, all of it. Not where frozen."""
        if self.holding is None or not self._cross("brought"):
            return []
        self.holding.brought()
        return tell_entered(self.worker, self.generation, self._copy, received_bytes, transfer_s)

    def reduced(self, v: Commit) -> list[WorkerInstruction]:
        """REDUCING -> READY: every local reduction has returned, and with them v, but for its flags. Not where frozen.

        Or -> REFUSED, if not every micro-batch of the step is in v once, or if workers of one role differ in settings
        or state: no worker votes, for all have the same v.
        """
        if self.frozen:
            return []
        if self.holding is not None and not self.holding.whole:
            raise self._invalid("reduced without all experts")
        if v.unequal_roles:
            self._comparison.differs = True
            self._follow("refused")
            why = "workers differ in settings or state"
            return [Tell(VoteRefused(worker=self.worker, generation=self.generation, step=self.step, why=why))]
        self._comparison.agree()
        hashes = {"hashes": v.sample_hashes, "place_hashes": v.place_hashes}
        if wrong := self.samples.find_error(self.step, samples=v.samples, places=self.generations.places, **hashes):
            self._follow("refused")
            return [Tell(VoteRefused(worker=self.worker, generation=self.generation, step=self.step, why=wrong))]
        self._follow("reduced")
        self._copy.reduced = v
        return []

    def voting(self) -> bool:
        """READY -> VOTED: the commit operation is about to be issued. False: frozen."""
        return self._cross("voting")

    def vote_passed(self, commit: Commit) -> list[WorkerInstruction]:
        """VOTED -> PASSED: the commit operation returned v with its flags, maybe just before it would be abandoned."""
        self._follow("vote_passed")
        self._copy.passed = Passed(step=self.step, commit=commit)
        return self._report()

    def vote_abandoned(self) -> list[WorkerInstruction]:
        """VOTED -> ABANDONED: the commit operation was left, or failed; perhaps it passed elsewhere."""
        self._follow("vote_abandoned")
        return self._report()

    def begin_apply(self) -> bool:
        """The optimizer is about to change the state. False: frozen, the decision will say."""
        return self._cross("begin_apply")

    def applied_step(
        self, state_hash: str = "", paused_s: float = 0.0, *, last_step: int = 0
    ) -> list[WorkerInstruction]:
        """The state is that of the step now. A passed swap takes effect here, unless a Stop came first.

        Args:
            last_step: where the script's loop ends, 0 if it has not said.
        """
        world, generation, forward = self.generations.world, self.generation, self.phase is Phase.FORWARD
        self._follow("applied_step")
        passed = self.passed
        if passed is None:
            raise self._invalid("applied_step without v")
        step, commit = passed.step, passed.commit
        witness = self.plan is not None and self.plan.is_witness(self.worker)
        self._copy.hold(step, [Passed(step=step, commit=commit, generation=generation, world=world)])
        if not forward:  # (else it is of the next step already)
            self._share = Share()
        self.wishes.passed(commit, unsaved=forward and self.holding is not None)
        if self.holding is not None:
            self.holding.passed()
        if not forward and self.generations.swap_due(commit):
            self._swap()
        applied = Applied(
            worker=self.worker,
            generation=generation,
            step=step,
            commit=commit,
            world=world,
            state_hash=self.generations.told(state_hash),
            witness=witness,
            paused_s=paused_s,
            last_step=last_step,
        )
        return [Tell(applied), *self.generations.disarmed(), *self._report()]

    def waited_in_vain(self, generation: int) -> bool:
        """Something of `generation` has taken too long: True where it is of use to look who cannot be reached.

        Then `complain` is to say what came out; until it does no report is given, lest what was seen be lost.
        """
        return self._complaints.look(generation)

    def complain(
        self,
        generation: int,
        detail: str,
        *,
        timed_out: bool = False,
        unreachable: Sequence[str] = (),
        transfer_peers: Sequence[str] = (),
    ) -> list[WorkerInstruction]:
        """A collective or a build of `generation` failed: leave the step and wait for the coordinator's word.

        Args:
            timed_out: it was waited for until its time was up.
            unreachable: members that no connection can be made to.
            transfer_peers: members at the other end of state transfers that failed.
        """
        complaint, looked = self._complaints.make(
            generation, detail, timed_out=timed_out, unreachable=unreachable, transfer_peers=transfer_peers
        )
        told = [Tell(complaint)] if complaint is not None else []
        return [*told, *(self._report() if looked else ())]

    def finish(self) -> list[WorkerInstruction]:
        """The training loop asks for no further step, or the generation is the last."""
        stopped, why, step = self._copy.stops, self.wishes.why, self.applied or 0
        told = Finished(worker=self.worker, generation=self.generation, step=step, stopped=stopped, why=why)
        return [Tell(told)] if self._cross("finish") else []

    def keep(self) -> bool:
        """The script has ended: only keep the state from here on. False: none is whole, or it is being changed."""
        if self.applied is None or self.phase not in KEEPING:
            return False
        self._kept, self._share.summed = True, []  # (of the micro-batch at hand, half may have been added up)
        return True

    # ---- inside ----

    @property
    def _place(self) -> Place:
        return type(self._due(self.plan)) if self.phase is Phase.ENTERING and self.plan else self.phase

    def _due(self, plan: GenerationPlan) -> Entering:
        placed = self.holding is None or self._moved_in == self.generation
        return due(self.worker, plan, self.generations.decision, self._copy, placed=placed)

    def _enters(self, generation: int) -> bool:
        """True while this worker is about to enter this generation: what is for another came too late."""
        return not self.frozen and self.generation == generation and self.phase is Phase.ENTERING

    def _swap(self) -> None:
        """The pending generation is the current one from here on."""
        self.generations.swap()
        self._comparison.enter(self.step)
        self.phase = Phase.ENTERING

    def _cross(self, boundary: str) -> bool:
        """Cross a boundary; False: frozen."""
        if self.frozen:
            return False
        self._follow(boundary)
        return True

    def _follow(self, boundary: str) -> None:
        """Be where the table says that this boundary leads, frozen or not."""
        following = NEXT.get((self._place, boundary))
        if following is None:
            raise self._invalid(boundary)
        self.phase = following

    def _report(self) -> list[WorkerInstruction]:
        """Answer the Stop, where there is one and nothing is under way."""
        stop = self.generations.stop
        if stop is None or self._complaints.looking or self.phase in UNDER_WAY:
            return []
        report = report_of(
            self.worker,
            stop,
            self._copy,
            self.holding,
            self.phase,
            self._share.summed,
            self.generation,
            self._comparison,
        )
        return [*what_was_sent(self.worker, self._copy), Tell(report)]

    def _invalid(self, name: str) -> InvalidTransitionError:
        place = f"generation {self.generation}, phase {self.phase}"
        story = f"{place}, applied {self.applied}, passed {self.passed}, stop {self.generations.stop}"
        return InvalidTransitionError(f"{self.worker}: {name} is not allowed in {story}")
