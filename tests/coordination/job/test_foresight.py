"""Tests of forecasts of moves and drains, which change nothing."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.job.foresight import forecast_moves
from holdfast.coordination.progress.costs import Cost
from holdfast.errors import RefusedError
from holdfast.protocol.messages import any_side as msg


def beside(*, warm: bool | None = None) -> Job:
    """Return a job of three nodes that have committed step 1, with standby s0 warm, cold or, if None, absent."""
    job = Job().start()
    job.step(1)
    if warm is not None:
        job.connect(msgspec.structs.replace(hello("s0"), standby=True))
        job.deliver(attach(w("s0")))
        if warm:
            job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    return job


def test_a_move_to_a_warm_standby_is_forecast_with_and_without_measurements() -> None:
    job = beside(warm=True)
    before, costs = job.machine.record, job.machine.context.progress.costs
    (one,) = forecast_moves(job.machine.context, ["n1"], stays=True)
    assert (one.node, one.to, one.ranks, one.expert_replicas, one.moved_bytes) == ("n1", "s0", (1,), 0, None)
    assert one.why.startswith("s0 is warm; ")
    assert one.why.count("(a guess)") == 3
    assert job.machine.record is before, "nothing is changed"
    for cost, value in ((Cost.DECISION, 0.01), (Cost.BUILD, 0.02), (Cost.SWAP, 0.03), (Cost.STATE, 5e6)):
        costs.add_measurement(cost, value)
    (one,) = forecast_moves(job.machine.context, ["n1"], stays=True)
    assert one.moved_bytes == 5_000_000
    assert one.down_s == pytest.approx(0.06 + costs.step_s)
    for _ in range(64):
        costs.add_step(2.0, 0.0, 2)
    assert forecast_moves(job.machine.context, ["n1"], stays=True)[0].down_s == pytest.approx(2.06), (
        "the step itself is included"
    )
    assert "a guess" not in one.why


def test_the_forecast_for_a_cold_standby_includes_its_warm_up() -> None:
    job = beside(warm=False)
    job.machine.context.progress.costs.add_measurement(Cost.WARM_UP, 40.0)
    (one,) = forecast_moves(job.machine.context, ["n1"], ["s0"], stays=True)
    assert one.wait_s is not None
    assert one.wait_s > 39.0
    assert "s0 is warm in about 40.0 s" in one.why


def test_a_drain_without_a_warm_standby_forecasts_the_remaining_nodes() -> None:
    job = beside(warm=False)
    (one,) = forecast_moves(job.machine.context, ["n1"])
    assert (one.to, one.moved_bytes) == ("", 0)
    assert "2 of 3 nodes go on, a step takes 1.50 times as long" in one.why
    (one,) = forecast_moves(beside(warm=True).machine.context, ["n1"])
    assert one.to == "s0"


def test_one_standby_replaces_one_of_two_nodes_and_draining_it_moves_nothing() -> None:
    parts = beside(warm=True).machine.context
    assert [one.to for one in forecast_moves(parts, ["n1", "n2"])] == ["s0", ""]
    (one,) = forecast_moves(parts, ["s0"])
    assert (one.to, one.ranks, one.moved_bytes, one.down_s) == ("", (), 0, 0.0)


def test_a_forecast_of_an_impossible_move_is_refused() -> None:
    with pytest.raises(RefusedError, match="there is no standby"):
        forecast_moves(beside().machine.context, ["n1"], stays=True)


def test_the_forecast_counts_expert_replicas() -> None:
    shape = msg.ExpertShape(layers=2, experts=4, slots=4)
    job = Job().boot()
    for name in ("n0", "n1", "n2"):
        job.connect(hello(name))
        job.deliver(attach(w(name), experts=shape))
    for name in ("n0", "n1", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=1, applied=0))
    (one,) = forecast_moves(job.machine.context, ["n1"])
    assert one.expert_replicas == 8, "four slots in each of two layers"
