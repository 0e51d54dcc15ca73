"""Tests that failure costs are measured and reported, and that the pool's failure rate affects checkpoint periods."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, applied, w
from test_pool_client import Pooled, pooled

from holdfast.coordination.inputs import PoolSaid
from holdfast.coordination.progress.costs import Cost
from holdfast.coordination.progress.saving_period import PRIOR_S, prior_s
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.sharing import JobCosts, JobShares
from holdfast.protocol.record import Saving

HOUR = 3600.0


def hit(job: Job) -> None:
    """Lose one of three nodes; the others continue."""
    for step in (1, 2):
        job.now += 1.0
        job.step(step)
    job.now += 0.3
    job.lose("n2")
    for name in ("n0", "n1"):
        job.report(name, 2)
    for name in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=2))
    job.now += 4.0
    for name in ("n0", "n1"):
        job.deliver(applied(w(name), 2, 3, world=2))


def test_the_cost_of_a_node_loss_is_measured_relative_to_a_usual_step() -> None:
    job = Job(nodes=3).start()
    hit(job)
    recovered = next(event for event in job.events if isinstance(event, ev.Recovered))
    assert recovered.action == "shrink"
    costs = job.machine.context.progress.costs
    assert costs.is_measured(Cost.HIT)
    assert costs.of(Cost.HIT) == pytest.approx(recovered.down_s - costs.step_s)
    assert not costs.is_measured(Cost.REPLACED)
    assert not costs.is_measured(Cost.ROLLED_BACK)


def test_a_drained_node_measures_no_cost_of_a_failure() -> None:
    job = Job(nodes=2).start()
    costs = job.machine.context.progress.costs
    recovery = job.machine.context.progress
    job.step(1)
    recovery.start_recovery(job.now, asked=True)
    planned = recovery.recovery
    assert planned is not None
    planned.decided = planned.regrouped = job.now
    costs.record_switch(planned, job.now + 2.0)
    assert not costs.is_measured(Cost.HIT)


def told_costs(job: Pooled) -> JobCosts:
    job.tick(3.0)
    job.tick(3.0)
    return job.machine.context.pool_client._pace_reporter.costs  # pyright: ignore[reportPrivateUsage]


def test_costs_are_reported_again_only_if_they_change_much() -> None:
    job = pooled(1).train("n0")
    costs = job.machine.context.progress.costs
    assert told_costs(job) == JobCosts()
    costs.add_measurement(Cost.HIT, 5.0)
    first = told_costs(job)
    assert first == JobCosts(hit_s=5.0)
    assert job.machine.context.pool_client._reported is not None  # pyright: ignore[reportPrivateUsage]
    assert job.machine.context.pool_client._reported.costs == first  # pyright: ignore[reportPrivateUsage]
    costs.add_measurement(Cost.HIT, 5.2)
    assert told_costs(job) is first
    for _ in range(5):
        costs.add_measurement(Cost.HIT, 50.0)
    assert told_costs(job).hit_s == 50.0


def rate(job: Pooled, failure_rate: float) -> None:
    """Send the pool's failure rate of a node."""
    job.version += 1
    grants = {node: grant.number for node, grant in job.held.grants.items()}
    shares = JobShares(term=1, version=job.version, submission=1, grants=grants, failure_rate=failure_rate)
    job.feed(PoolSaid(shares))


def saving(nodes: int) -> Pooled:
    job = pooled(nodes)
    names = [f"n{index}" for index in range(nodes)]
    job.boot()
    job.grants(**{name: number for number, name in enumerate(names, 1)})
    for number, name in enumerate(names, 1):
        job.come(name, number)
        attach = msgspec.structs.replace(_attach(name), saves=True, saves_in_time=True)
        job.deliver(attach)
    for name in names:
        job.deliver(msg.Entered(worker=w(name), generation=1, applied=0))
    job.machine.transaction.change(saving=Saving(saved_at=job.now, cost_s=0.5, saves=4))
    return job


def _attach(name: str) -> msg.Attach:
    from machinery import attach

    return attach(w(name))


def period(job: Pooled) -> float:
    found = job.machine.context.checkpoints.period_s
    assert found is not None
    return found


def test_a_job_on_one_node_saves_more_often_if_the_pools_nodes_fail_often() -> None:
    job = saving(1)
    usual = period(job)
    rate(job, 1 / (30 * 86400.0))
    assert period(job) == usual, "the rate does not exceed the assumed one"
    rate(job, 1 / HOUR)
    often = period(job)
    assert often < usual
    assert often == pytest.approx((2 * 0.5 * HOUR) ** 0.5, rel=0.05)


def test_the_failure_rate_does_not_shorten_the_period_of_a_job_with_copies() -> None:
    job = saving(3)
    usual = period(job)
    rate(job, 1 / HOUR)
    assert period(job) == usual


def test_a_later_coordinator_knows_the_failure_rate() -> None:
    before = saving(1)
    rate(before, 1 / HOUR)
    assert before.held.failure_rate == 1 / HOUR
    job = Pooled(nodes=1, submission=1, spec=JobSpec(), records=before.records, events=before.events, now=before.now)
    job.boot(takeover=True)
    assert job.held.failure_rate == 1 / HOUR
    assert period(job) == pytest.approx(period(before), rel=0.01)


def test_a_save_is_needed_sooner_with_few_copies_of_experts() -> None:
    one = prior_s(2, 1 / HOUR, 60.0, experts=8, slots=4)
    two = prior_s(4, 1 / HOUR, 60.0, experts=8, slots=4)
    dense = prior_s(2, 1 / HOUR, 60.0, experts=0, slots=0)
    assert one == pytest.approx(HOUR / 2, rel=0.05), "each failure takes a last copy"
    assert one < two <= PRIOR_S
    assert one < dense
    assert prior_s(3, 0.0, 60.0, experts=0, slots=0) == PRIOR_S
