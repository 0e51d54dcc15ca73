"""Each invariant can fail: machines broken on purpose are caught, by the schedules that pass with the real ones."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from holdfast.coordination.coordinator import Coordinator
from holdfast.coordination.decisions import Verdict
from holdfast.coordination.inputs import CoordinatorConfig, Received
from holdfast.coordination.worker import Halt, InvalidTransitionError, Tell, WorkerInstruction, WorkerMachine
from holdfast.protocol import messages as msg
from holdfast.protocol.plan import DecisionKind, Phase
from holdfast.protocol.position import Position
from holdfast.protocol.record import Record
from holdfast.simulation.cluster import Parts, run_plan
from holdfast.simulation.durable import MemoryJournal, MemoryStore
from holdfast.simulation.faults import random_plan
from holdfast.simulation.invariants import InvariantError

SEEDS = range(1000)


class ReportsTooEarly(WorkerMachine):
    """Reports while the commit operation is still open."""

    def stop_order(self, order: msg.Stop) -> list[WorkerInstruction]:
        out = super().stop_order(order)
        return [*out, self._report()] if self._report_owed else out


class BreaksItsPromise(WorkerMachine):
    """Applies after its report."""

    @property
    def frozen(self) -> bool:
        return super().frozen and self.phase is not Phase.PASSED


class RecomputesV(WorkerMachine):
    """Takes another v than the recorded one for FORWARD."""

    def begin(self, order: msg.Begin) -> list[WorkerInstruction]:
        decision = order.decision
        if decision.commit is not None:
            commit = msgspec.structs.replace(decision.commit, grad_square=decision.commit.grad_square + 1.0)
            order = msgspec.structs.replace(order, decision=msgspec.structs.replace(decision, commit=commit))
        return super().begin(order)


class JudgesForItself(WorkerMachine):
    """Does not leave a step out, in FORWARD, because its own gradients are finite."""

    def begin(self, order: msg.Begin) -> list[WorkerInstruction]:
        decision = order.decision
        if decision.commit is not None:
            commit = msgspec.structs.replace(decision.commit, nonfinite=0)
            order = msgspec.structs.replace(order, decision=msgspec.structs.replace(decision, commit=commit))
        return super().begin(order)


class ComputesAll(WorkerMachine):
    """Every rank computes every micro-batch."""

    @property
    def share(self) -> tuple[int, ...]:
        return tuple(range(self.micro_batches))


class ForgetsShare(WorkerMachine):
    """Goes on with another share of the micro-batches than it was given for the first step."""

    @property
    def share(self) -> tuple[int, ...]:
        self._assignment = None
        return super().share


class TakesTornState(WorkerMachine):
    """Holds a state as soon as a transfer begins."""

    def pushed(self, epoch: int) -> bool:
        taken = super().pushed(epoch)
        if taken:
            self.applied = self.decision.applied if self.decision else 1
        return taken


class NeverStops(Coordinator):
    """Lets a broken epoch be."""

    def __init__(self, config: CoordinatorConfig, tail: Position, record: Record | None) -> None:
        super().__init__(config, tail, record)
        self.parts.stopping.begin = lambda failed_at: None


class IgnoresPassed(Coordinator):
    """Never decides FORWARD: a step that some have applied is done again."""

    def __init__(self, config: CoordinatorConfig, tail: Position, record: Record | None) -> None:
        super().__init__(config, tail, record)
        begin = self._deciding._begin

        def redo(workers: list[str], verdict: Verdict, *rest: object) -> None:
            if verdict.decision.kind is DecisionKind.FORWARD:
                decision = msg.Decision(kind=DecisionKind.REDO, applied=verdict.decision.applied - 1)
                verdict = Verdict(decision=decision, holders=verdict.holders)
            begin(workers, verdict, *rest)  # pyright: ignore[reportArgumentType]

        self._deciding._begin = redo  # pyright: ignore[reportAttributeAccessIssue]


class TakesBackAnybody(Coordinator):
    """Does not look at what a node that comes back has been in."""

    def _hello(self, connection: int, hello: msg.Hello) -> None:
        fresh = tuple(kept for kept in hello.kept if isinstance(kept, msg.Attach))
        gone = not self.parts.absences.knows(hello.node)
        super()._hello(connection, msgspec.structs.replace(hello, kept=fresh) if gone else hello)


class HearsTheExpelled(Coordinator):
    """Writes its record for what a node says after it was expelled."""

    def _received(self, event: Received) -> None:
        known = self.__dict__.setdefault("known", set())
        if isinstance(event.message, msg.Hello):
            known.add(event.connection)
        gone = event.connection in known and self.members.on(event.connection) is None
        if gone and isinstance(event.message, msg.FromWorker):
            self.turn.change(epoch=self.record.epoch)
        super()._received(event)


class CommitsEarly(Coordinator):
    """Announces a step when one member has applied it."""

    def _advance(self) -> None:
        plan, ledger = self.record.plan, self.parts.ledger
        if plan is not None and self.parts.stopping.stop is None and ledger._steps:
            for worker in plan.workers:
                ledger.settle(worker, max(ledger._steps))
        super()._advance()


class RemembersTheUndone(Coordinator):
    """Holds what an expelled worker applied against those that do the step again."""

    def __init__(self, config: CoordinatorConfig, tail: Position, record: Record | None) -> None:
        super().__init__(config, tail, record)
        self.parts.ledger.undo_after = lambda step: None


class LosesItsOutbox(Coordinator):
    """Does not say after a crash what its record says it said."""

    def __init__(self, config: CoordinatorConfig, tail: Position, record: Record | None) -> None:
        super().__init__(config, tail, msgspec.structs.replace(record, outbox=()) if record else None)


class NothingFenced(MemoryStore):
    """Writes whatever it is given."""

    def swap(self, record: Record, version: int) -> int:
        return super().swap(record, self.version)


class JournalOfAnybody(MemoryJournal):
    """Appends for whoever asks."""

    def append(self, event: object, length: int) -> int:
        return super().append(event, len(self.events))  # pyright: ignore[reportArgumentType]


class PromisesTooEarly(MemoryStore):
    """Says that a record is written before it is on disk."""

    def sync(self) -> None:
        pass


class StaysInMemory(MemoryJournal):
    """Does not wait for the disk."""

    def sync(self) -> None:
        pass


BROKEN = [
    (Parts(worker=ReportsTooEarly), "after its report|FORWARD|not allowed|another state|lineage|other parts"),
    (Parts(worker=BreaksItsPromise), "applied after its report"),
    (Parts(worker=RecomputesV), "not the recorded|another state"),
    (Parts(worker=JudgesForItself), "not the recorded|another state"),
    (Parts(worker=ComputesAll), "each micro-batch once"),
    (Parts(worker=ForgetsShare), "each micro-batch once"),
    (Parts(worker=TakesTornState), "without a whole state|another state"),
    (Parts(coordinator=NeverStops), "stuck"),
    (Parts(coordinator=IgnoresPassed), "not allowed|another state|undoes"),
    (Parts(coordinator=TakesBackAnybody), "is a member again|not allowed"),
    (Parts(coordinator=HearsTheExpelled), "of an expelled worker had an effect"),
    (Parts(coordinator=CommitsEarly), "was committed, but"),
    (Parts(coordinator=RemembersTheUndone), "replicas diverged"),
    (
        Parts(coordinator=LosesItsOutbox),
        "was committed after step|announced after epoch|lineage|does not follow|journal says|first event",
    ),
    (Parts(store=NothingFenced, journal=JournalOfAnybody), "superseded coordinator|does not follow|after"),
]


@pytest.mark.parametrize(("parts", "caught"), BROKEN, ids=lambda value: _name(value))
def test_a_broken_machine_is_caught(parts: Parts, caught: str) -> None:
    for seed in SEEDS:
        try:
            run_plan(random_plan(seed), parts)
        except (InvariantError, InvalidTransitionError) as error:
            with pytest.raises(type(error), match=caught):
                raise error
            return
    pytest.fail(f"{parts} went unnoticed in {len(SEEDS)} schedules")


@pytest.mark.parametrize(
    ("parts", "caught"),
    [
        (
            Parts(store=PromisesTooEarly),
            "superseded coordinator|went back|not allowed|does not follow|first event",
        ),
        (Parts(journal=StaysInMemory), "not on disk when its record was"),
    ],
    ids=("store", "journal"),
)
def test_a_disk_that_promises_too_early_is_caught(parts: Parts, caught: str) -> None:
    for seed in SEEDS:
        try:
            run_plan(replace(random_plan(seed), crashes=(30 + seed,), power_cuts=True), parts)
        except (InvariantError, InvalidTransitionError) as error:
            with pytest.raises(type(error), match=caught):
                raise error
            return
    pytest.fail(f"{parts} went unnoticed in {len(SEEDS)} schedules")


def _name(value: object) -> str:
    if not isinstance(value, Parts):
        return ""
    real = Parts()
    return next(
        part.__name__
        for part, honest in (
            (value.store, real.store),
            (value.worker, real.worker),
            (value.coordinator, real.coordinator),
        )
        if part is not honest
    )


def test_a_halt_that_is_early_is_no_report() -> None:
    """The early reporter is broken in nothing else."""
    machine = ReportsTooEarly("n0/0/1", micro_batches=1)
    told = machine.stop_order(msg.Stop(term=1, epoch=1))
    assert isinstance(told[0], Halt)
    assert isinstance(told[1], Tell)
