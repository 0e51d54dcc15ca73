"""Tests of rebalancing during training: when a new placement is requested, evaluated and adopted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from loaded_job import loads, moe_job, replicas
from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.inputs import Planned
from holdfast.coordination.instructions import PlanExperts
from holdfast.coordination.progress.costs import DEFAULT_BANDWIDTH, LEAST_PAUSE_S, LEAST_REBALANCE_S, MeasuredCosts
from holdfast.coordination.progress.recovery_cost import RecoveryCost
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExpertSpec, JobSpec
from holdfast.protocol.messages import any_side as msg

EVERY = 10
SHAPE = msg.ExpertShape(layers=2, experts=6, slots=4)
#: Expert 0 has two replicas while loads are unknown, and needs six.
SKEWED = np.array([[90.0, 2, 2, 2, 2, 2], [90.0, 3, 3, 3, 3, 3]])


def train(job: Job, first: int, last: int, *, generation: int = 1) -> None:
    """Make all members apply steps, one per second."""
    plan = job.records[-1].plan
    assert plan is not None
    for step in range(first, last + 1):
        for worker in plan.workers:
            job.deliver(
                msg.Applied(worker=worker, generation=generation, step=step, commit=commit(), world=len(plan.members))
            )


def asked(job: Job) -> list[PlanExperts]:
    return [order for order in job.last if isinstance(order, PlanExperts)]


def rebalancing_job(tokens: np.ndarray = SKEWED) -> tuple[Job, PlanExperts]:
    """Return a job that first had even loads and requests a placement after step 10 because of skewed loads."""
    job = moe_job(4, SHAPE, rebalance_every=EVERY)
    job.deliver(loads(np.ones((2, 6)), step=1))
    train(job, 1, 1)
    (first,) = asked(job)
    job.feed(Planned(first.search.generation, first.search.solve()))
    job.deliver(loads(tokens))
    train(job, 2, 9)
    assert not asked(job)
    train(job, 10, 10)
    (order,) = asked(job)
    return job, order


def adopt(job: Job, order: PlanExperts) -> msg.GenerationPlan:
    job.feed(Planned(order.search.generation, order.search.solve()))
    pending = job.records[-1].pending
    assert pending is not None
    return pending


def swap(job: Job, pending: msg.GenerationPlan, step: int) -> None:
    """Make all members build the group, raise the flag and pass `step` with it."""
    for worker in pending.workers:
        job.deliver(msg.Prepared(worker=worker, generation=pending.generation))
    assert set(job.orders(msg.Arm)) == set(pending.workers)
    for worker in pending.workers:
        job.deliver(applied(worker, 1, step, commit(1.0, msg.Flag.SWAP), world=4))


def test_replicas_follow_the_loads_at_a_step_boundary() -> None:
    job, order = rebalancing_job()
    pending = adopt(job, order)
    (decided,) = job.emitted(ev.RebalanceDecided)
    assert decided.adopted
    assert decided.step == 10
    assert decided.gain_s > decided.cost_s > 0
    assert decided.moves > 0
    assert "saved over 10 steps" in decided.why
    assert set(job.orders(msg.Prepare)) == set(pending.workers)
    assert replicas(pending, SHAPE) == [[6, 2, 2, 2, 2, 2]] * 2
    assert (pending.sources, pending.expert_plan.given if pending.expert_plan else 0) == ({}, 2)
    swap(job, pending, 11)
    (started,) = [event for event in job.events if isinstance(event, ev.GenerationStarted) and event.generation == 2]
    assert (started.reason, started.world_size, started.expert_moves) == ("rebalance", 4, decided.moves)
    for worker in pending.workers:
        job.deliver(msg.Entered(worker=worker, generation=2, applied=11, received_bytes=100, transfer_s=0.01))
    train(job, 12, 12, generation=2)
    (rebalanced,) = job.emitted(ev.Rebalanced)
    assert (rebalanced.step, rebalanced.moved_bytes, rebalanced.experts_moved) == (12, 400, decided.moves)
    assert not [event for event in job.events if isinstance(event, ev.Recovered)]


def test_the_first_evaluation_starts_with_the_first_loads() -> None:
    job = moe_job(4, SHAPE, rebalance_every=EVERY)
    for step in (1, 2, 3):
        train(job, step, step)
        assert not asked(job), "no worker has reported loads"
    job.deliver(loads(SKEWED, step=3))
    (order,) = asked(job)
    for node in ("n0", "n1", "n2", "n3"):
        job.deliver(applied(w(node), 1, 4, commit(), world=4))
        assert not asked(job), "the evaluation at step 3 is not over"
    pending = adopt(job, order)
    (decided,) = job.emitted(ev.RebalanceDecided)
    assert (decided.step, decided.adopted) == (3, True)
    assert "saved over 7 steps" in decided.why
    assert replicas(pending, SHAPE) == [[6, 2, 2, 2, 2, 2]] * 2
    swap(job, pending, 5)
    for worker in pending.workers:
        job.deliver(msg.Entered(worker=worker, generation=2, applied=5))
    for step in (6, 7, 8, 9):
        train(job, step, step, generation=2)
        assert not asked(job), "the next evaluation is at the next multiple"
    train(job, 10, 10, generation=2)
    assert asked(job)


def test_even_loads_cause_no_rebalance() -> None:
    job, order = rebalancing_job(tokens=np.ones((2, 6)))
    job.feed(Planned(order.search.generation, order.search.solve()))
    assert [decided.adopted for decided in job.emitted(ev.RebalanceDecided)] == [False]
    assert job.records[-1].pending is None
    train(job, 11, 20)
    assert asked(job), "the next evaluation comes ten steps later"


def test_a_gain_below_the_cost_is_refused_with_both_numbers() -> None:
    job = moe_job(4, SHAPE, rebalance_every=EVERY)
    job.deliver(loads(SKEWED, token_s=1e-6))
    train(job, 1, 1)
    (order,) = asked(job)
    job.feed(Planned(order.search.generation, order.search.solve()))
    (decided,) = job.emitted(ev.RebalanceDecided)
    assert not decided.adopted
    assert 0 < decided.gain_s < decided.cost_s
    assert "to move" in decided.why


def test_workers_of_a_node_share_its_tokens() -> None:
    gains = []
    for workers in (1, 2):
        job = Job(nodes=4, spec=JobSpec(experts=ExpertSpec(rebalance_every=EVERY))).boot()
        names = [msg.worker_id(f"n{node}", worker, "a") for node in range(4) for worker in range(workers)]
        for node in range(4):
            job.connect(msgspec.structs.replace(hello(f"n{node}"), workers=workers))
        for name in names:
            job.deliver(attach(name, experts=SHAPE))
        for name in names:
            job.deliver(msg.Entered(worker=name, generation=1, applied=0))
        job.deliver(loads(SKEWED))
        train(job, 1, 1)
        (order,) = asked(job)
        job.feed(Planned(order.search.generation, order.search.solve()))
        (decided,) = job.emitted(ev.RebalanceDecided)
        gains.append(decided.gain_s)
    assert gains[1] == pytest.approx(gains[0] / 2)


@pytest.mark.parametrize(("every", "window"), [(EVERY, EVERY), (0, msg.LOADS_WINDOW)])
def test_the_plan_contains_the_load_window(every: int, window: int) -> None:
    plan = moe_job(4, SHAPE, rebalance_every=every).records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    assert plan.expert_plan.window == window


def test_a_job_without_rebalancing_requests_no_placement() -> None:
    job = moe_job(4, SHAPE, rebalance_every=0)
    job.deliver(loads(SKEWED))
    for step in range(1, 30):
        train(job, step, step)
        assert not asked(job)


def test_without_loads_the_evaluation_waits_for_the_first_report() -> None:
    job = moe_job(4, SHAPE, rebalance_every=EVERY)
    for step in range(1, 22):
        train(job, step, step)
        assert not asked(job)
    job.deliver(loads(SKEWED))
    assert asked(job)


def test_a_placement_for_an_earlier_generation_is_discarded() -> None:
    job, order = rebalancing_job()
    experts = order.search.solve()
    job.lose("n3")
    job.feed(Planned(order.search.generation, experts))
    assert job.kinds == []
    plan = job.records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    for worker, held in zip(plan.workers[:3], plan.expert_plan.placement, strict=False):
        job.report(msg.node_of(worker), 10, state=msg.Holding(experts=held))
    job.feed(Planned(order.search.generation, experts))
    assert job.kinds == []
    assert job.records[-1].pending is None


def test_a_search_without_a_result_changes_nothing() -> None:
    job, order = rebalancing_job()
    job.feed(Planned(order.search.generation, None))
    assert job.kinds == []
    train(job, 11, 20)
    assert asked(job)


def test_a_failure_voids_a_pending_rebalance() -> None:
    job, order = rebalancing_job()
    pending = adopt(job, order)
    plan = job.records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    job.lose("n2")
    assert set(job.orders(msg.Stop)) == {w("n0"), w("n1"), w("n3")}
    for worker, held in zip(plan.workers, plan.expert_plan.placement, strict=True):
        if worker != w("n2"):
            job.report(msg.node_of(worker), 10, state=msg.Holding(experts=held))
    (started,) = job.emitted(ev.GenerationStarted)
    assert (started.reason, started.generation) == ("failure", pending.generation + 1)
    assert job.records[-1].pending is None


@pytest.mark.parametrize("blob", [b"odd", b"\xff" * 16])
@pytest.mark.parametrize("name", ["state", "result"])
def test_a_malformed_report_expels_its_node(name: str, blob: bytes) -> None:
    """Otherwise every new coordinator would receive the report again, and end."""
    job = moe_job(4, SHAPE, rebalance_every=EVERY)
    plan = job.records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    job.lose("n3")
    job.report("n2", 0, **{name: msg.Holding(experts=blob)})
    (failure,) = job.emitted(ev.FailureDetected)
    assert (failure.node, failure.kind) == ("n2", "exception")
    assert "the report of n2/0/a cannot be read" in failure.detail
    for worker, held in zip(plan.workers[:2], plan.expert_plan.placement, strict=False):
        job.report(msg.node_of(worker), 0, state=msg.Holding(experts=held))
    (started,) = job.emitted(ev.GenerationStarted)
    assert started.members == ("n0", "n1")


def test_a_joining_worker_is_admitted_after_a_pending_rebalance() -> None:
    job, order = rebalancing_job()
    pending = adopt(job, order)
    job.connect(hello("n4"))
    job.deliver(attach(w("n4"), experts=SHAPE))
    assert job.records[-1].pending == pending
    swap(job, pending, 11)
    for worker in pending.workers:
        job.deliver(msg.Entered(worker=worker, generation=2, applied=11))
    joined = job.records[-1].pending
    assert joined is not None
    assert w("n4") in joined.workers


def test_a_new_coordinator_requests_no_placement_before_it_has_loads() -> None:
    job, _ = rebalancing_job()
    job.boot(takeover=True)
    assert not asked(job)


def test_costs_are_estimated_from_the_latest_measurements() -> None:
    costs = MeasuredCosts()
    assert costs.step_s == 0
    assert (costs.bandwidth, costs.pause_s) == (DEFAULT_BANDWIDTH, LEAST_PAUSE_S)
    for seconds in (0.0, 1.0, 1.0, 9.0):
        costs.add_step(seconds, 0.0, 2)
    assert costs.step_s == 1.0
    moved = RecoveryCost(failed=10.0, detected=10.0, action="rebalance", swap=True)
    moved.add_transfer(1 << 24, 0.5)
    moved.add_transfer(1 << 23, 0.25)
    costs.record_switch(moved, 11.75)
    assert costs.bandwidth == (1 << 25)
    assert costs.pause_s == pytest.approx(0.75), "the pause excludes a step that overlaps the whole transfer"
    moved.add_transfer(0, 1.5)
    costs.record_switch(moved, 12.75)
    assert costs.pause_s == pytest.approx(1.25), "the rest of the transfer after that step counts as a pause"
    assert costs.bandwidth == pytest.approx((1 << 24) / 1.5)
    costs.record_switch(RecoveryCost(failed=10.0, detected=10.0, action="rebalance", swap=True), 10.5)
    assert costs.pause_s == LEAST_REBALANCE_S, "a switch has a minimum cost, whatever the measurement"
    join = RecoveryCost(failed=10.0, detected=10.0, action="grow", swap=True)
    join.add_transfer(1 << 24, 5.0)
    costs.record_switch(join, 20.0)
    assert costs.bandwidth == pytest.approx((1 << 24) / 1.5), "its transfers wait for the joiner's dense state"
