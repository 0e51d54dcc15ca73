"""The forecast against closed forms: restarts, live recovery, too few nodes, copies of the state."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from scipy import stats

from holdfast.coordination.config import CoordinatorConfig
from holdfast.errors import BadInputError
from holdfast.planner.fleet.case import FleetCase, check_case
from holdfast.planner.fleet.forecast import Forecasts, forecast
from holdfast.planner.reliability.monte_carlo.estimate import Estimate, SimulationSettings
from holdfast.planning.checkpointing import FailureClock, wasted_fraction
from holdfast.protocol.job_spec import JobSpec

TINY = 1e-6
#: Nothing takes time unless a test sets it.
FREE = {
    "job": {"step_s": TINY, "rounds": 1},
    "checkpoint": {"period_s": 1e6, "save_s": TINY, "load_s": 0.0},
    "recovery": dict.fromkeys(
        ("silent_share", "reset_s", "decide_s", "decide_per_node_s", "tell_s", "tell_per_node_s", "join_s"), 0.0
    )
    | {"nccl_s": 0.0, "nccl_per_worker_s": 0.0},
}


def case_of(**given: Any) -> FleetCase:
    tree = {**{key: value for key, value in given.items() if not isinstance(value, dict)}}
    for section in ("job", "checkpoint", "recovery", "restart"):
        tree[section] = FREE.get(section, {}) | given.get(section, {})
    return check_case(msgspec.convert(tree, FleetCase))


def simulated(case: FleetCase, *, hours: float, replications: int = 20, seed: int = 1) -> Forecasts:
    return forecast(case, SimulationSettings(replications=replications, hours=hours, seed=seed, warmup_hours=0.0))


def agrees(found: Estimate, expected: float, within: float) -> bool:
    return found.contains(expected) and found.high - found.low < within * expected


def test_the_coordinators_own_times_are_its_own() -> None:
    times, config = FleetCase().recovery, CoordinatorConfig(spec=JobSpec())
    assert (times.lease_s, times.heartbeat_s, times.tick_s) == (config.lease_s, config.heartbeat_s, config.tick_s)


def test_restarts_equal_the_closed_form() -> None:
    case = case_of(
        nodes=64, mtbf_hours=500.0, mttr_hours=TINY,
        checkpoint={"period_s": 1800.0, "save_s": 30.0}, restart={"detect_s": 60.0, "restart_s": 300.0},
    )  # fmt: skip
    wasted = wasted_fraction(
        rate=64 / 500.0 / 3600.0, period=1800.0, save=30.0, detect=60.0, restart=300.0, clock=FailureClock.RUNNING
    )
    found = simulated(case, hours=2000.0)
    assert agrees(found.restarts.ettr, 1.0 - float(wasted), within=0.02)


def test_live_recovery_trains_unless_a_node_failed_within_one_recovery_time() -> None:
    case = case_of(nodes=64, mtbf_hours=50.0, mttr_hours=TINY, recovery={"nccl_s": 500.0, "tell_s": 100.0})
    found = simulated(case, hours=500.0)
    assert agrees(found.live.ettr, math.exp(-64 / 50.0 * 600.0 / 3600.0), within=0.02)
    assert found.live.rollbacks.mean == 0.0


@pytest.mark.parametrize("standbys", [0, 2])
def test_fewer_nodes_train_less(standbys: int) -> None:
    case = case_of(nodes=20, standbys=standbys, mtbf_hours=100.0, mttr_hours=10.0, job={"rounds": 100_000})
    up = stats.binom(20 + standbys, 100.0 / 110.0)
    expected = sum(up.pmf(count) * min(count, 20) for count in range(21 + standbys)) / 20
    found = forecast(case, SimulationSettings(replications=20, hours=2000.0, seed=3))
    assert agrees(found.live.goodput, expected, within=0.02)
    assert found.live.ettr.mean == pytest.approx(1.0, abs=1e-4)


def test_a_job_waits_for_enough_nodes() -> None:
    case = case_of(nodes=4, min_nodes=4, mtbf_hours=100.0, mttr_hours=5.0)
    found = forecast(case, SimulationSettings(replications=20, hours=5000.0, seed=4))
    assert agrees(found.live.lost["wait"], 1.0 - (100.0 / 105.0) ** 4, within=0.15)


def test_state_is_lost_if_all_its_copies_fail_within_one_recovery() -> None:
    # Four nodes hold two parts in two copies. One holder fails, then the other one before the recovery ends.
    case = case_of(nodes=4, mtbf_hours=10.0, mttr_hours=TINY, job={"copies": 2}, recovery={"nccl_s": 360.0})
    found = simulated(case, hours=4000.0)
    expected = 24 * 2 * 2 / 10.0 * -math.expm1(-0.1 / 10.0)
    # In one of 30 cases, a third failure restarts the recovery and prolongs it.
    assert found.live.rollbacks.mean == pytest.approx(expected, rel=0.12)
    often = {"period_s": 1.0}
    case = case_of(nodes=4, mtbf_hours=10.0, mttr_hours=TINY, job={"copies": 1}, checkpoint=often)
    alone = simulated(case, hours=500.0).live
    assert alone.rollbacks.mean == pytest.approx(alone.failures.mean, rel=0.01)


def test_copies_on_several_racks_survive_a_rack() -> None:
    racks = {"nodes": 32, "rack_nodes": 8, "mtbf_hours": 1e9, "mtbf_rack_hours": 100.0, "mttr_hours": 1.0}
    apart = simulated(case_of(**racks, job={"copies": 2}, recovery={"nccl_s": 1.0}), hours=1000.0).live
    assert apart.failures.mean == pytest.approx(24 * 4 / 100.0, rel=0.2)
    assert apart.rollbacks.mean == 0.0
    one_rack = simulated(case_of(**racks | {"rack_nodes": 32}, job={"copies": 2}), hours=1000.0).live
    assert one_rack.rollbacks.mean > 0.0


def test_all_time_is_accounted_for() -> None:
    case = check_case(FleetCase(nodes=256, mtbf_hours=200.0, standbys=2, min_nodes=100))
    for one in (found := simulated(case, hours=300.0, replications=4)).live, found.restarts:
        stopped = sum(share.mean for what, share in one.lost.items() if what != "fewer")
        assert stopped + one.ettr.mean == pytest.approx(1.0, abs=1e-9)
        assert one.goodput.mean + one.lost["fewer"].mean == pytest.approx(one.ettr.mean, abs=1e-9)


def test_the_same_seed_gives_the_same_forecast_and_another_seed_another() -> None:
    case = FleetCase(nodes=128, mtbf_hours=500.0, failure_shape=0.7, repair_shape=0.6)
    first, second, other = (simulated(case, hours=500.0, replications=3, seed=seed) for seed in (7, 7, 8))
    assert first == second != other


def test_bursts_do_not_change_the_number_of_failures() -> None:
    even, bursts = (
        simulated(case_of(nodes=64, mtbf_hours=100.0, mttr_hours=TINY, failure_shape=shape), hours=1000.0).live
        for shape in (1.0, 0.7)
    )
    assert bursts.failures.mean == pytest.approx(even.failures.mean, rel=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 4, "min_nodes": 5}, "min_nodes is 5: it must be at most nodes, 4"),
        ({"nodes": 4, "job": {"copies": 5}}, "job.copies is 5: it must be at most nodes, 4"),
        ({"nodes": 4, "rack_nodes": 6, "standbys": 1}, "rack_nodes is 6: it must be at most nodes and standbys, 5"),
        ({"recovery": {"heartbeat_s": 4.0}}, "recovery.heartbeat_s is 4: it must be at most recovery.lease_s, 3"),
        ({"checkpoint": {"save_s": 9.0, "period_s": 8.0}}, "checkpoint.save_s is 9: it must be at most"),
    ],
)
def test_inconsistent_values_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        case_of(**given)
    assert said in str(caught.value)
