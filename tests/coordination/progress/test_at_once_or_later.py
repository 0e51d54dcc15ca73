"""Tests of whether a standby replaces a lost node at once or joins later, and of the reason in the event."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.progress.costs import FIRST_LOSS_S, Cost, MeasuredCosts
from holdfast.coordination.progress.replacement_timing import NodesLost, choose_replacement
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def measured(
    job: Job, *, transfer_s: float, step_s: float = 1.0, swap_s: float = 0.1, build_s: float = 0.1
) -> MeasuredCosts:
    costs = job.machine.context.progress.costs
    for cost, value in ((Cost.TRANSFER, transfer_s), (Cost.SWAP, swap_s), (Cost.BUILD, build_s)):
        for _ in range(5):
            costs.add_measurement(cost, value)
    for _ in range(64):
        costs.add_step(step_s, 0.0, 2)
    return costs


def lost(*, nodes: int = 4, copies: int = 3, back_s: float = 0.0) -> NodesLost:
    return NodesLost(nodes=nodes, lost=1, copies=copies, back_s=back_s)


def test_without_measurements_a_standby_takes_over_at_once() -> None:
    choice = choose_replacement(MeasuredCosts(), lost(), 0.0)
    assert choice.at_once
    assert choice.why.endswith("(estimates)")


def test_a_transfer_shorter_than_the_redone_step_costs_nothing() -> None:
    choice = choose_replacement(measured(Job().start(), transfer_s=0.9), lost(), 0.0)
    assert choice.at_once
    assert "at once costs 0.00 s of training" in choice.why


def test_with_experts_the_whole_transfer_is_counted() -> None:
    loss = replace(lost(), experts=True)
    assert (
        "at once costs 0.90 s of training" in choose_replacement(measured(Job().start(), transfer_s=0.9), loss, 0.0).why
    )


@pytest.mark.parametrize(("nodes", "at_once"), [(2, True), (64, False)])
def test_few_nodes_wait_for_a_long_transfer_and_many_train_on_meanwhile(nodes: int, *, at_once: bool) -> None:
    """With a 20 s transfer, all nodes wait 19 s; or one of 2 (of 64) is missing that long, then a swap follows."""
    costs = measured(Job().start(), transfer_s=4.0 if nodes == 2 else 20.0)
    assert choose_replacement(costs, lost(nodes=nodes), 0.0).at_once is at_once


def test_a_small_gain_does_not_postpone_the_replacement() -> None:
    costs = measured(Job().start(), transfer_s=1.9)
    assert choose_replacement(costs, lost(nodes=64), 0.0).at_once


def test_a_costly_last_copy_of_the_state_is_copied_at_once() -> None:
    costs = measured(Job().start(), transfer_s=20.0, build_s=1.0)
    days_s = 40 * FIRST_LOSS_S
    assert not choose_replacement(costs, lost(nodes=64, copies=2, back_s=days_s), 0.0).at_once
    choice = choose_replacement(costs, lost(nodes=64, copies=1, back_s=days_s), 0.0)
    assert choice.at_once
    assert f"would cost {days_s:.0f} s" in choice.why


def beside(*, warm: bool = True) -> Job:
    job = Job(nodes=4).start()
    job.step(1, "n0", "n1", "n2", "n3")
    job.connect(msgspec.structs.replace(hello("s0"), standby=True))
    job.deliver(attach(w("s0")))
    if warm:
        job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    return job


def recovered(job: Job, *members: str) -> ev.Recovered:
    job.lose("n1")
    for name in ("n0", "n2", "n3"):
        job.report(name, 1)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.workers == tuple(map(w, members))
    for name in members:
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    job.step(2, *members, generation=2)
    (event,) = job.emitted(ev.Recovered)
    return event


def test_recovered_explains_why_a_standby_took_over_at_once() -> None:
    event = recovered(beside(), "n0", "s0", "n2", "n3")
    assert (event.action, event.why.startswith("a standby that takes over at once costs")) == ("replace", True)


def test_recovered_explains_why_the_standby_joins_later() -> None:
    job = beside()
    measured(job, transfer_s=60.0)
    event = recovered(job, "n0", "n2", "n3")
    assert event.action == "shrink"
    assert "3 of 4 nodes go on" in event.why
    pending = job.machine.record.pending
    assert pending is not None
    assert w("s0") in pending.workers


def test_recovered_reports_that_no_standby_is_warm() -> None:
    assert recovered(beside(warm=False), "n0", "n2", "n3").why == "no standby is warm: 3 of 4 nodes go on"
