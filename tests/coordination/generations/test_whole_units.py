"""Tests of replica groups of several workers: plans, shares, and the effect of one lost process."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, applied, attach, commit, hello

from holdfast.coordination.generations.assignment import kept_by_units, share_of, summed_by
from holdfast.coordination.generations.decisions import NothingLeft, Verdict, decide
from holdfast.coordination.generations.plan_delta import change_of, rebuilt, rebuilt_shares, shares_of
from holdfast.coordination.roles import assign_roles, every_role, only_whole, whole_units
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, Phase
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.state import LiveSource

SHARD_2, FOUR = Layout(shard=2), Layout(shard=2, tensor=2)


def w(node: str, index: int, nonce: str = "a") -> str:
    return msg.worker_id(node, index, nonce)


def units_of(*nodes: str, places: int = 2) -> tuple[str, ...]:
    return tuple(w(node, index) for node in nodes for index in range(places))


def plan_of(generation: int, workers: tuple[str, ...], layout: Layout = SHARD_2) -> msg.GenerationPlan:
    roles = assign_roles(workers, layout)
    members = tuple(msg.Member(worker=one, host="h", state_port=1, role=role) for one, role in roles.items())
    return msg.GenerationPlan(term=1, generation=generation, members=members)


# ---- plans ----


def test_a_plan_derives_its_replica_groups_from_roles() -> None:
    plan = plan_of(1, units_of("n0", "n1", places=4), FOUR)
    assert (plan.places, plan.units, plan.unit_of(5)) == (4, 2, 1)
    assert plan.unit_heads == (w("n0", 0), w("n1", 0))
    assert plan.domain_of(w("n1", 3)) == (3, 7)
    whole = plan_of(1, (w("n0", 0), w("n0", 1)), WHOLE)
    assert (whole.places, whole.units, whole.unit_of(1)) == (1, 2, 1)
    assert b"role" not in msgspec.msgpack.encode(whole)


def test_a_node_may_have_several_replica_groups() -> None:
    workers = [w("n0", index) for index in (3, 0, 1, 2, 5)]
    assert whole_units(workers, 2) == [(w("n0", 2), w("n0", 3)), (w("n0", 0), w("n0", 1))]
    assert only_whole(workers, 2) == workers[:-1]
    assert every_role([w("n0", 4), w("n1", 1)], 2)
    assert not every_role([w("n0", 4), w("n1", 2)], 2)


@given(units=st.integers(1, 7), places=st.sampled_from([1, 2, 4]), micro_batches=st.integers(0, 30))
def test_all_workers_of_a_replica_group_have_the_same_share(units: int, places: int, micro_batches: int) -> None:
    layout = {1: WHOLE, 2: SHARD_2, 4: FOUR}[places]
    plan = plan_of(1, units_of(*(f"n{unit}" for unit in range(units)), places=places), layout)
    shares = [share_of(plan, micro_batches, rank) for rank in range(len(plan.members))]
    assert sorted(one for share in shares[::places] for one in share) == list(range(micro_batches))
    assert all(share == shares[rank - rank % places] for rank, share in enumerate(shares))


@given(data=st.data(), before=st.integers(1, 6), after=st.integers(1, 6), places=st.sampled_from([1, 2]))
def test_plans_and_shares_of_replica_groups_are_rebuilt_from_deltas(
    data: st.DataObject, before: int, after: int, places: int
) -> None:
    layout = SHARD_2 if places == 2 else WHOLE
    base = plan_of(1, units_of(*(f"n{unit}" for unit in range(before)), places=places), layout)
    names = data.draw(st.permutations([f"n{unit}" for unit in range(after)]))
    plan = plan_of(2, units_of(*names, places=places), layout)
    assignment = tuple(tuple(range(unit, 9, after)) for unit in reversed(range(after)))
    for known in (base, None):
        change = change_of(plan, known)
        assert rebuilt(change, known) == plan
        assert rebuilt_shares(shares_of(assignment, 9, plan, known), change, plan, known) == assignment


# ---- gradients that are kept ----


def stand(worker: str, at: int | None, *summed: int, **fields: object) -> msg.Report:
    told = {"term": 1, "generation": 1, "phase": Phase.COMPUTE, **fields}
    return msg.Report(worker=worker, applied=at, step=(at or 0) + 1, summed=summed, **told)  # pyright: ignore[reportArgumentType]


def test_a_replica_group_holds_the_gradients_that_all_its_workers_report() -> None:
    unit = units_of("n0")
    assert summed_by(unit, {unit[0]: stand(unit[0], 3, 0, 4), unit[1]: stand(unit[1], 3, 4)}) == (3, (4,))
    assert summed_by(unit, {unit[0]: stand(unit[0], 3, 0), unit[1]: stand(unit[1], 2, 0)}) == (None, ())
    assert summed_by(unit, {unit[0]: stand(unit[0], 3, 0)}) == (None, ())


def test_begin_contains_the_gradients_each_replica_group_keeps() -> None:
    plan = plan_of(2, units_of("n0", "n1", "n2"))
    reports = {
        one.worker: one
        for one in (
            stand(w("n0", 0), 3, 0, 3),
            stand(w("n0", 1), 3, 0),
            stand(w("n1", 0), 3, 1),
            stand(w("n1", 1), 3, 1),
            stand(w("n2", 0), 2, 5),
            stand(w("n2", 1), 2, 5),
        )
    }
    redo = Decision(kind=DecisionKind.REDO, applied=3)
    assert kept_by_units(plan, redo, reports, ((0, 3), (2, 4), (1, 5))) == ((0,), (), ()), (
        "n1's micro-batch belongs to another group now"
    )
    sources: dict[str, msg.StateSource] = {w("n2", place): LiveSource(members=(w("n0", place),)) for place in (0, 1)}
    plan = msgspec.structs.replace(plan, sources=sources)
    kept = kept_by_units(plan, redo, reports, ((0, 3), (1, 4), (2, 5)))
    assert kept == ((0,), (1,), (5,)), "n2 keeps its gradients of the previous step until the state arrives"
    assert kept_by_units(plan, Decision(kind=DecisionKind.START, applied=0), reports, ()) == ()
    assert kept_by_units(plan_of(2, (w("n0", 0),), WHOLE), redo, reports, ((0, 3),)) == (), "the field is omitted"


# ---- decisions by role ----


def ready(worker: str, at: int) -> msg.Report:
    return stand(worker, at, phase=Phase.READY, result=msg.Holding(), reduced=commit())


def decided(*reports: msg.Report, committed: int = 3) -> Verdict | NothingLeft:
    known = [KnownCheckpoint(step=2, name="step-2")]
    return decide(None, committed, reports, known, places=2)


def test_a_step_goes_forward_if_a_complete_replica_group_is_ready() -> None:
    a, b = units_of("n0"), units_of("n1")
    verdict = decided(ready(a[0], 3), ready(a[1], 3), ready(b[0], 3), stand(b[1], 3))
    assert isinstance(verdict, Verdict)
    assert (verdict.decision.kind, verdict.decision.applied, verdict.holders) == (DecisionKind.FORWARD, 4, a)


def test_a_step_is_repeated_if_no_complete_replica_group_can_finish_it() -> None:
    a, b = units_of("n0"), units_of("n1")
    one_role = decided(ready(a[0], 3), stand(a[1], 3), ready(b[0], 3), stand(b[1], 3))
    assert isinstance(one_role, Verdict)
    assert (one_role.decision.kind, one_role.holders) == (DecisionKind.REDO, (*a, *b))
    mixed = decided(ready(a[0], 3), stand(a[1], 3), stand(b[0], 3), ready(b[1], 3))
    assert isinstance(mixed, Verdict)
    assert mixed.decision.kind is DecisionKind.REDO, "a group that goes forward alone has neither state if others fail"


def test_a_passed_step_goes_forward_by_one_worker_of_each_role() -> None:
    a, b = units_of("n0"), units_of("n1")
    passed = msg.PassedStep(step=4, commit=commit())
    verdict = decided(stand(a[0], 4, passed=passed), stand(a[1], 3), stand(b[0], 3), ready(b[1], 3))
    assert isinstance(verdict, Verdict)
    assert (verdict.decision.kind, verdict.holders) == (DecisionKind.FORWARD, (a[0], b[1]))


def test_a_role_without_a_live_copy_causes_a_rollback() -> None:
    a, b = units_of("n0"), units_of("n1")
    verdict = decided(stand(a[0], 3), stand(a[1], None), stand(b[0], 3), stand(b[1], None))
    assert isinstance(verdict, Verdict)
    assert (verdict.decision.kind, verdict.decision.applied) == (DecisionKind.ROLLBACK, 2)


def test_the_initial_state_is_that_of_one_replica_group() -> None:
    arrivals = [w("n0", 0), w("n1", 1), w("n1", 0)]
    verdict = decide(None, 0, [], [], arrivals, places=2)
    assert isinstance(verdict, Verdict)
    assert verdict.holders == (w("n1", 0), w("n1", 1))


# ---- a job ----


@dataclass
class Units(Job):
    """Drives a job of nodes with two workers each, which form one replica group."""

    workers: int = 2

    def come(self, name: str, nonce: str = "a", *, saves: bool = False) -> None:
        self.connect(msgspec.structs.replace(hello(name), workers=self.workers))
        for index in range(self.workers):
            self.up(w(name, index, nonce), saves=saves)

    def up(self, worker: str, *, saves: bool = False) -> None:
        self.deliver(msgspec.structs.replace(attach(worker), layout=SHARD_2, saves=saves))

    def begin(self, *, saves: bool = False) -> Units:
        self.boot()
        for index in range(self.nodes):
            self.come(f"n{index}", saves=saves)
        self.enter()
        return self

    def enter(self, applied: int = 0) -> None:
        plan = self.machine.record.plan
        assert plan is not None
        for worker in plan.workers:
            self.deliver(msg.Entered(worker=worker, generation=plan.generation, applied=applied))

    def down(self, worker: str) -> None:
        kind = FailureKind.PROCESS_EXIT
        self.deliver_from(msg.node_of(worker), msg.WorkerDown(worker=worker, kind=kind, detail="gone", exit_code=-9))

    def stands(self, worker: str, at: int, *summed: int) -> None:
        stop = self.machine.context.interruption.stop
        assert stop is not None
        report = stand(worker, at, *summed)
        self.deliver(msgspec.structs.replace(report, term=stop.term, generation=stop.generation))

    @property
    def plan(self) -> msg.GenerationPlan:
        assert self.machine.record.plan is not None
        return self.machine.record.plan


def test_the_replica_group_with_the_initial_state_sends_each_role_its_part() -> None:
    plan = Units(nodes=3).begin().plan
    assert plan.workers == units_of("n0", "n1", "n2")
    senders = {worker: plan.senders(worker) for worker in plan.sources}
    assert senders == {
        w("n1", 0): (w("n0", 0),),
        w("n2", 0): (w("n0", 0),),
        w("n1", 1): (w("n0", 1),),
        w("n2", 1): (w("n0", 1),),
    }


def test_a_lost_process_removes_its_replica_group_and_is_reported_once() -> None:
    job = Units(nodes=2).begin()
    job.down(w("n0", 1))
    (failed,) = job.emitted(ev.FailureDetected)
    assert failed.detail == "gone; worker 0 of its replica group is replaced with it"
    assert job.machine.context.interruption.awaited(set()) == [w("n1", 0), w("n1", 1)], (
        "no worker waits for the other local rank"
    )
    job.down(w("n0", 0))
    assert job.emitted(ev.FailureDetected) == []
    job.stands(w("n0", 0), 0)
    job.stands(w("n1", 0), 0, 1)
    job.stands(w("n1", 1), 0)
    assert job.plan.workers == units_of("n1")
    begins = job.orders(msg.Begin)
    assert {worker: begin.kept for worker, begin in begins.items()} == {w("n1", 0): (), w("n1", 1): ()}


def test_other_replica_groups_of_the_node_stay() -> None:
    job = Units(nodes=2, workers=4).begin()
    job.down(w("n0", 3))
    for worker in (*units_of("n0"), *units_of("n1", places=4)):
        job.stands(worker, 0)
    assert job.plan.workers == (*units_of("n0"), *units_of("n1", places=4))
    job.up(w("n0", 3, "b"))
    here = [info.id for info in job.machine.members.workers()]
    assert here == [*units_of("n0"), *units_of("n1", places=4)], "a plan contains only complete replica groups"


def test_a_replica_group_rejoins_once_it_is_complete() -> None:
    job = Units(nodes=2).begin()
    job.down(w("n0", 1))
    job.stands(w("n1", 0), 0)
    job.stands(w("n1", 1), 0)
    job.enter()
    job.up(w("n0", 1, "b"))
    assert job.machine.record.pending is None
    job.up(w("n0", 0))
    assert job.machine.record.pending is None, "that process has ended"
    job.up(w("n0", 0, "b"))
    job.tick(1.0)
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (*units_of("n1"), w("n0", 0, "b"), w("n0", 1, "b"))


def test_a_process_lost_during_a_takeover_removes_its_replica_group() -> None:
    job = Units(nodes=2).begin()
    job.boot(takeover=True)
    kept = (
        msg.WorkerDown(worker=w("n0", 1), kind=FailureKind.PROCESS_EXIT, detail="gone", exit_code=-9),
        msgspec.structs.replace(attach(w("n0", 0)), layout=SHARD_2),
        msgspec.structs.replace(attach(w("n0", 1, "b")), layout=SHARD_2),
    )
    job.connect(msgspec.structs.replace(hello("n0", kept), workers=2))
    assert list(job.machine.members.nodes["n0"].workers) == [w("n0", 1, "b")]
    assert len(job.emitted(ev.FailureDetected)) == 1


def test_a_replica_group_restarted_during_a_takeover_is_admitted() -> None:
    """The old replica group is only missing, so its loss must not remove workers of the new one."""
    job = Units(nodes=2).begin()
    job.boot(takeover=True)
    anew = (w("n0", 0, "b"), w("n0", 1, "b"))
    kept = tuple(msgspec.structs.replace(attach(one), layout=SHARD_2) for one in anew)
    job.connect(msgspec.structs.replace(hello("n0", kept), workers=2))
    assert tuple(job.machine.members.nodes["n0"].workers) == anew
    assert len(job.emitted(ev.FailureDetected)) == 1
    kept = tuple(msgspec.structs.replace(attach(one), layout=SHARD_2) for one in units_of("n1"))
    job.connect(msgspec.structs.replace(hello("n1", kept), workers=2))
    for worker in units_of("n1"):
        job.stands(worker, 0)
    job.enter()
    job.tick(1.0)
    pending = job.machine.record.pending or job.plan
    assert sorted(pending.workers) == sorted((*anew, *units_of("n1")))


def test_a_script_error_replaces_its_replica_group() -> None:
    job = Units(nodes=2).begin()
    error = msg.ScriptError(place="ValueError a.py:1", step=1, micro_batch=0)
    raised = msg.Raised(worker=w("n0", 0), generation=1, detail="ValueError: no", error=error, exit_code=1)
    job.deliver(raised)
    for worker in units_of("n0", "n1"):
        job.stands(worker, 0)
    assert job.plan.workers == units_of("n1")
    assert job.sent(msg.Replace) == [msg.Replace(worker=w("n0", 0))]


def raise_in(job: Units, worker: str) -> None:
    error = msg.ScriptError(place="ValueError a.py:1", step=2, micro_batch=0)
    generation = job.plan.generation
    job.deliver(msg.Raised(worker=worker, generation=generation, detail="ValueError: no", error=error, exit_code=1))


@pytest.mark.parametrize("late", ["raises", "reports"])
def test_a_replica_group_that_raised_is_ignored_after_the_last_plan(late: str) -> None:
    """The other worker of n1 raised too. Its message came after the plan that saves, and was recorded by mistake."""
    job = Units(nodes=3).begin(saves=True)
    for worker in job.plan.workers:
        job.deliver(applied(worker, 1, 1, world=6))
    raise_in(job, w("n0", 0))
    raise_in(job, w("n1", 1))
    assert job.machine.context.closing.under_way
    for worker in job.plan.workers:
        job.stands(worker, 1)
    assert (job.plan.workers, job.plan.last) == (units_of("n2"), True)
    assert job.sent(msg.Replace) == [msg.Replace(worker=w("n0", 0)), msg.Replace(worker=w("n1", 1))]
    assert [info.id for info in job.machine.members.workers()] == [*units_of("n2")]
    written = len(job.records)
    if late == "raises":
        raise_in(job, w("n1", 0))
    else:
        job.deliver(stand(w("n1", 0), 1))
    assert (job.last, len(job.records)) == ([], written)


@pytest.mark.parametrize(("nodes", "saves", "told"), [(1, False, 1), (1, True, 0), (2, False, 0)])
def test_a_single_replica_without_checkpoints_is_reported_once(nodes: int, saves: bool, told: int) -> None:
    job = Units(nodes=nodes).begin(saves=saves)
    assert len([event for event in job.events if isinstance(event, ev.JobAtRisk)]) == told
    if nodes == 2:
        job.lose("n0")
        for worker in units_of("n1"):
            job.stands(worker, 0)
        (warned,) = job.emitted(ev.JobAtRisk)
        assert "one replica of the model (shard 2)" in warned.why
