"""Tests that the workers of a replica group agree on micro-batches and states, over all interleavings of two.

Crossing, proposing, agreeing, withdrawing, computing, Stop, report, Begin and JobDone come in every possible order.
Both workers compute the same micro-batches and have the same `summed` after each Begin. Neither gives up its state for
a newer one that the other lacks. Each reaches the end of its share or of the job.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.generations.assignment import first_assignment, kept_by_units
from holdfast.coordination.worker import tasks
from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.proposals import Proposal, ProposalKind, adoption
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, Phase, Role
from holdfast.protocol.record import SCHEMA, Record
from holdfast.protocol.state import LiveSource
from holdfast.step_samples import StepSamples

A, B, C, D = ("n0/0/a", "n0/1/a", "n1/0/a", "n1/1/a")
#: the replica group under test has two of them
MICRO_BATCHES = 4
SAMPLES = StepSamples(seed=3, micro_batches=MICRO_BATCHES, micro_batch=6)
START, REDO, ROLLBACK = (
    Decision(kind=DecisionKind.START, applied=0),
    Decision(kind=DecisionKind.REDO, applied=0),
    Decision(kind=DecisionKind.ROLLBACK, applied=0, source=msg.CheckpointSource(name="c")),
)
#: the others have finished a step that this group has not; it keeps its own state until theirs arrives
LATER = Decision(kind=DecisionKind.REDO, applied=1)


def plan_of(generation: int, *workers: str, sent: bool = False) -> msg.GenerationPlan:
    members = tuple(
        msg.Member(worker=worker, host="h", state_port=1, role=Role(place=rank % 2))
        for rank, worker in enumerate(workers or (A, B, C, D))
    )
    sources: dict[str, msg.StateSource] = {}
    if sent:
        sources = {A: LiveSource(members=(C,)), B: LiveSource(members=(D,))}
    return msg.GenerationPlan(term=1, generation=generation, members=members, sources=sources)


@dataclass
class Place:
    """One worker: its state machine, its training thread's activity, and its pending orders."""

    machine: WorkerMachine
    doing: str = ""  # "", crossed, waiting, computing
    about: Proposal | None = None
    attempt: tuple[int, int] = (0, 0)
    sums: frozenset[int] = frozenset()
    orders: list[msg.GenerationOrder] = field(default_factory=list)


@dataclass
class Unit:
    """Two workers, their proposals, and a coordinator that may take any possible action."""

    a: Place
    b: Place
    #: each worker's proposal, and the agreed ones
    page: dict[str, Proposal] = field(default_factory=dict)
    agreed: frozenset[Proposal] = frozenset()
    computed: frozenset[tuple[str, Proposal]] = frozenset()
    #: stops that may still come
    stops: int = 2
    stopped: bool = False
    reports: dict[str, msg.Report] = field(default_factory=dict)
    generation: int = 1
    over: bool = False
    #: the kept sums, by generation and worker
    begun: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    trail: tuple[str, ...] = ()

    def places(self) -> Iterator[tuple[str, Place, Place]]:
        yield A, self.a, self.b
        yield B, self.b, self.a

    def key(self) -> object:
        def of(place: Place) -> object:
            machine, share = place.machine, place.machine._share  # pyright: ignore[reportPrivateUsage]
            stood = (machine.phase, machine.generation, machine.applied, machine.keeps, machine.frozen, machine.done)
            had = (share.assigned, tuple(share.summed), share.proposed, share.unwanted)
            return stood, had, place.doing, place.about, place.attempt, place.sums, repr(place.orders)

        reports = tuple(sorted((who, repr(report)) for who, report in self.reports.items()))
        begun = tuple(sorted(self.begun.items()))
        told = (tuple(sorted(self.page.items())), self.agreed, self.computed, reports, begun)
        return of(self.a), of(self.b), told, self.stops, self.stopped, self.generation, self.over


def fresh() -> Unit:
    def place(worker: str) -> Place:
        machine = WorkerMachine(worker, samples=SAMPLES)
        machine.on_order(msg.Begin(plan=plan_of(1), decision=START))
        return Place(machine)

    return Unit(place(A), place(B))


def actions(unit: Unit) -> list[str]:
    """Return all possible next actions."""
    found: list[str] = []
    for name, place, mate in unit.places():
        who = name[3]
        if place.orders:
            found.append(f"{who} hears")
        machine, about = place.machine, place.about
        match place.doing:
            case "crossed":
                found.append(f"{who} proposes")
            case "waiting" if about in unit.agreed:
                found.append(f"{who} agrees")
            case "waiting" if about is not None and not wanted(machine, about):
                found.append(f"{who} withdraws")
            case "computing" if mate.about == about or (mate_name(name), about) in unit.computed:
                found.append(f"{who} has computed")
            case "" if not isinstance(machine.task, tasks.Wait | tasks.Done):
                found.append(f"{who} goes on")
            case _:
                pass
    if not unit.over:
        if unit.stops and not unit.stopped:
            found.append("stop")
        if unit.stopped and len(unit.reports) == 2:
            found += ["redo", "redo after others", "roll back", "done", "later"]
    return found


def wanted(machine: WorkerMachine, about: Proposal) -> bool:
    if about.kind is ProposalKind.STATE:
        return machine.is_adoption_wanted(about.generation)
    return machine.is_proposal_wanted(about.number)


def mate_name(name: str) -> str:
    return B if name == A else A


def after(unit: Unit, action: str) -> Unit:
    """Return the state after an action."""
    known = {id(plan): plan for plans in (PLANS, SENT, FIRST) for plan in plans.values()}
    unit = copy.deepcopy(unit, dict(known))
    unit.trail += (action,)
    who, _, what = action.partition(" ")
    if who not in ("0", "1"):
        coordinate(unit, action)
        return unit
    name, place = (A, unit.a) if who == "0" else (B, unit.b)
    step(unit, name, place, what)
    return unit


def step(unit: Unit, name: str, place: Place, what: str) -> None:
    machine, about = place.machine, place.about
    match what:
        case "hears":
            order = place.orders.pop(0)
            record_reports(unit, name, machine.on_order(order))
            if isinstance(order, msg.Begin):
                unit.begun[machine.generation, name] = tuple(sorted(machine._share.summed))  # pyright: ignore[reportPrivateUsage]
        case "proposes":
            assert about is not None
            unit.page[name], place.doing = about, "waiting"
            if unit.page.get(mate_name(name)) == about:
                unit.agreed |= {about}
                unit.page.clear()
        case "agrees" | "withdraws" if about is not None and about.kind is ProposalKind.STATE:
            if what == "withdraws":
                del unit.page[name]
            settle_state(unit, name, place, adopts=what == "agrees")
        case "agrees":
            assert about is not None
            machine.accept_proposal(about.number)
            place.doing = "computing"
        case "withdraws":
            assert about is not None
            del unit.page[name]
            machine.withdraw_proposal(about.number)
            place.doing, place.about = "", None
        case "has computed":
            assert about is not None
            place.sums |= {about.number}
            unit.computed |= {(name, about)}
            place.doing, place.about = "", None
        case _:
            go_on(unit, name, place)


def record_reports(unit: Unit, name: str, said: list[tasks.WorkerInstruction]) -> None:
    for report in (i.message for i in said if isinstance(i, tasks.SendToCoordinator)):
        if isinstance(report, msg.Report):
            unit.reports[name] = report


def settle_state(unit: Unit, name: str, place: Place, *, adopts: bool) -> None:
    """Settle a proposal about a state: adopt it now if the worker has kept its own until now."""
    if place.machine.phase is Phase.ADOPTING:
        record_reports(unit, name, place.machine.finish_receive([], 1) if adopts else place.machine.cancel_adoption())
        place.sums = frozenset() if adopts else place.sums
    place.doing, place.about = "", None


def go_on(unit: Unit, name: str, place: Place) -> None:
    """Make the training thread execute the next task of its state machine."""
    machine, task = place.machine, place.machine.task
    match task:
        case tasks.Load():
            assert machine.finish_load(machine.generation, 0)
            place.sums = frozenset()
        case tasks.Receive(together=together):
            assert together
            assert machine.accept_push(machine.generation)
            assert machine.begin_adoption(machine.generation)
            if not machine.keeps:
                record_reports(unit, name, machine.finish_receive([], 1))
                place.sums = frozenset()
            place.doing, place.about = "crossed", adoption(machine.generation)
        case tasks.Enter():
            machine.finish_entering()
        case tasks.Compute():
            if place.attempt != (machine.generation, task.step):
                place.attempt = machine.generation, task.step
                place.sums = place.sums if task.summed else frozenset()
                assert place.sums == set(task.summed), "the sums match the task exactly"
            todo = next((m for m in task.micro_batches if m not in place.sums), None)
            if todo is None:
                assert place.sums == set(task.micro_batches)
                assert machine.begin_reduction()
            elif machine.begin_micro_batch(todo):
                place.doing, place.about = "crossed", machine.proposal
        case _:
            raise AssertionError(task)


def coordinate(unit: Unit, action: str) -> None:
    if action == "stop":
        unit.stops -= 1
        unit.stopped, unit.reports = True, {}
        send_order(unit, msg.Stop(term=1, generation=unit.generation))
        return
    unit.stopped = False
    if action == "done":
        unit.over = True
        send_order(unit, msg.JobDone())
        return
    record = Record(
        schema=SCHEMA, job="j", term=1, micro_batches=MICRO_BATCHES, plan=PLANS[unit.generation], layout=LAYOUT
    )
    unit.generation += 1
    states = {report.applied for report in unit.reports.values() if report.applied is not None}
    assert len(states) <= 1, "one worker gave up the state of the other for a newer one"
    lags = any(report.applied == 0 for report in unit.reports.values())
    step = max(report.applied or 0 for report in unit.reports.values())
    reports, plan = dict(unit.reports), PLANS[unit.generation]
    decision = msg.Decision(kind=DecisionKind.REDO, applied=step)
    if action == "roll back" or any(report.applied is None for report in unit.reports.values()):
        decision = ROLLBACK  # also if a worker has not loaded the checkpoint yet
    elif action == "later" and lags:
        decision, plan = LATER, SENT[unit.generation]
    if action == "redo after others":
        # An earlier replica group has one of this group's micro-batches too, and keeps it.
        plan = FIRST[unit.generation] if plan is PLANS[unit.generation] else plan
        others = {"generation": 1, "term": 1, "applied": step, "step": step + 1, "phase": Phase.COMPUTE}
        reports |= {who: msg.Report(worker=who, summed=(0, 1), **others) for who in (C, D)}
    assignment = first_assignment(record, plan, decision, reports)
    send_order(
        unit,
        msg.Begin(
            plan=plan,
            decision=decision,
            assignment=assignment,
            kept=kept_by_units(plan, decision, reports, assignment),
        ),
    )


def send_order(unit: Unit, order: msg.GenerationOrder) -> None:
    unit.a.orders.append(order)
    unit.b.orders.append(order)


LAYOUT = Layout(shard=2)
PLANS = {generation: plan_of(generation) for generation in range(1, 8)}
SENT = {generation: plan_of(generation, sent=True) for generation in range(1, 8)}
FIRST = {generation: plan_of(generation, C, D, A, B) for generation in range(1, 8)}


def check(unit: Unit, *, ended: bool) -> None:
    story = " | ".join(unit.trail)
    for generation, name in unit.begun:
        mate = unit.begun.get((generation, mate_name(name)))
        assert mate is None or mate == unit.begun[generation, name], f"they have different sums: {story}"
    if not ended:
        return
    for name, proposal in unit.computed:
        assert (mate_name(name), proposal) in unit.computed, f"one alone computes {proposal}: {story}"
    for _, place, _ in unit.places():
        assert place.doing == "", f"{place.doing} {place.about} forever: {story}"
        assert place.machine.done or place.machine.phase is Phase.REDUCING, f"stays in {place.machine.phase}: {story}"


def explored(stops: int) -> int:
    first = fresh()
    first.stops = stops
    seen, todo, ends = {hash(first.key())}, [first], 0
    while todo:
        unit = todo.pop()
        following = actions(unit)
        check(unit, ended=not following)
        ends += not following
        for action in following:
            try:
                found = after(unit, action)
            except (AssertionError, InvalidTransitionError) as error:
                raise AssertionError(f"{error} after {' | '.join((*unit.trail, action))}") from error
            key = hash(found.key())
            if key not in seen:
                seen.add(key)
                todo.append(found)
    assert ends
    return len(seen)


@pytest.mark.parametrize(("sent", "together"), [((A, B), True), ((B,), False)])
def test_a_receiver_waits_only_for_ranks_that_also_receive_a_state(sent: tuple[str, ...], together: bool) -> None:
    machine, source = WorkerMachine(B, samples=SAMPLES), LiveSource(members=(D,))
    plan = msgspec.structs.replace(PLANS[1], sources=dict.fromkeys(sent, source))
    machine.on_order(msg.Begin(plan=plan, decision=LATER))
    assert machine.task == tasks.Receive(plan, together=together)


@pytest.mark.parametrize(("stops", "states"), [(0, 50), (1, 5000)])
def test_workers_of_a_replica_group_agree_in_every_event_order(stops: int, states: int) -> None:
    """The test with two stops takes minutes: `python test_agreeing.py 2`."""
    assert explored(stops) > states


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_workers_of_a_replica_group_agree_in_random_event_orders(seed: int) -> None:
    random, unit = Random(seed), fresh()
    unit.stops = 5
    while following := actions(unit):
        check(unit, ended=False)
        unit = after(unit, random.choice(following))
    check(unit, ended=True)


if __name__ == "__main__":
    print(explored(int(sys.argv[1])), "states")
