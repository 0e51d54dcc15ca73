"""Tests of measured costs of starts, warm-ups, moves and losses, which later coordinators know."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.progress.costs import FIRST_LOSS_S, PRIORS, Cost, MeasuredCosts
from holdfast.protocol.messages import any_side as msg


def costs_of(job: Job) -> MeasuredCosts:
    return job.machine.context.progress.costs


def with_a_standby() -> Job:
    job = Job().start()
    job.step(1)
    job.connect(msgspec.structs.replace(hello("s0"), standby=True))
    job.tick(0.7)
    job.deliver(attach(w("s0")))
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.25))
    return job


def test_costs_are_estimates_before_any_measurement() -> None:
    costs = costs_of(Job().start())
    assert {cost: costs.of(cost) for cost in Cost} == PRIORS
    assert not any(costs.is_measured(cost) for cost in Cost)


def test_a_standbys_measured_start_and_warm_up_survive_a_takeover() -> None:
    job = with_a_standby()
    assert costs_of(job).of(Cost.START) == pytest.approx(0.7, abs=0.05)
    assert costs_of(job).of(Cost.WARM_UP) == 0.25
    job.boot(takeover=True)
    assert costs_of(job).of(Cost.WARM_UP) == 0.25
    assert costs_of(job).is_measured(Cost.START)


def test_a_replacement_measures_decision_group_build_and_transfer() -> None:
    job = with_a_standby()
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    for name, received in (("n0", 0), ("n2", 0), ("s0", 5_000_000)):
        job.deliver(
            msg.Entered(worker=w(name), generation=2, applied=1, received_bytes=received, transfer_s=received / 1e8)
        )
    job.step(2, "n0", "s0", "n2", generation=2)
    costs = costs_of(job)
    assert costs.of(Cost.STATE) == 5_000_000
    assert costs.of(Cost.TRANSFER) == 0.05
    assert all(costs.is_measured(cost) for cost in (Cost.DECISION, Cost.BUILD))


def test_a_cost_is_the_median_of_the_newest_measurements() -> None:
    job = Job().start()
    costs = costs_of(job)
    for seconds in (100.0, 100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        costs.add_measurement(Cost.WARM_UP, seconds)
    assert costs.of(Cost.WARM_UP) == 3.0


def test_the_expected_time_between_losses_falls_with_each_loss() -> None:
    job = Job(nodes=4).start()
    job.step(1, "n0", "n1", "n2", "n3")
    costs, start = costs_of(job), job.machine.record.run_since
    assert costs.between_losses_s(start) == FIRST_LOSS_S
    assert costs.between_losses_s(start + FIRST_LOSS_S) == 2 * FIRST_LOSS_S
    job.lose("n1")
    job.lose("n2")
    costs.add_measurement(Cost.WARM_UP, 1.0)
    assert len(job.machine.record.costs["lost_at"]) == 1
    assert costs.between_losses_s(start) == pytest.approx(FIRST_LOSS_S / 2, rel=0.01)
    for count in range(1, 9):
        costs.record_loss(start + 100.0 * count)
    assert costs.between_losses_s(start + 800.0) == pytest.approx((FIRST_LOSS_S + 400.0) / 5)
