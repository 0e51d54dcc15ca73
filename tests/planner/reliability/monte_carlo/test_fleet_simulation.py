"""Simulated means against their closed forms, each within its own 99 % confidence interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from holdfast.errors import BadInputError
from holdfast.planner.reliability.distributions import (
    Empirical,
    Exponential,
    LogNormal,
    RateProfile,
    RepairMix,
    Weibull,
)
from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings, estimate, simulate_strategy
from holdfast.planner.reliability.monte_carlo.job import useful_time
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planner.reliability.sparing.case import Cluster, FailureModel, SparingCase, SparingStrategy
from holdfast.planner.reliability.sparing.evaluation import evaluate_strategy
from holdfast.planner.reliability.sparing.recovery import Checkpoint, Elastic, RackFailures, Synchronous
from holdfast.planning.checkpointing import FailureClock

CHECKPOINT = Checkpoint(period_seconds=1800.0, save_seconds=120.0, detect_seconds=300.0, restart_seconds=900.0)


def make_case(*, mtbf: float = 3000.0, rack: float = 1500.0, zones: int = 2, **failures: object) -> SparingCase:
    """Return a small cluster that fails often, so that blocking and rollbacks both matter."""
    return SparingCase(
        cluster=Cluster(zones=zones, racks_per_zone=24, gpus_per_rack=16, gpus_per_tray=2),
        failures=FailureModel(mtbf_tray_hours=mtbf, mtbf_rack_hours=rack, mttr_hours=24.0, **failures),
        recovery=Synchronous(checkpoint=CHECKPOINT),
        strategies=(SparingStrategy(block_gpus=16),),
    )


SETTINGS = SimulationSettings(replications=60, hours=4000.0, seed=11)


def assert_agrees(case: SparingCase, strategy: SparingStrategy, **kinds: object) -> None:
    closed = evaluate_strategy(case, strategy)
    simulated = simulate_strategy(case, strategy, int(closed.spare_blocks), SETTINGS, **kinds)
    for name in ("cett", "beta", "gamma"):
        assert estimate(getattr(simulated, name)).contains(float(getattr(closed, name))), name
    assert estimate(simulated.block_failure_rate).contains(1.0 / float(closed.block_mtbf_hours))


@pytest.mark.parametrize("block_gpus", [16, 8])
@pytest.mark.parametrize("spare_blocks", [None, 2])
def test_cett_beta_gamma_and_block_mtbf_without_spare_trays(block_gpus: int, spare_blocks: int | None) -> None:
    assert_agrees(make_case(), SparingStrategy(block_gpus=block_gpus, spare_blocks=spare_blocks))


@pytest.mark.parametrize("chain", RepairChain)
def test_cett_beta_gamma_and_block_mtbf_with_spare_trays(chain: RepairChain) -> None:
    # Eq. 3 adds the rack's rate to the rate of the trays, which is exact only if one of them dominates. Here only one
    # exists.
    case = make_case(mtbf=500.0, rack=np.inf, repair_chain=chain)
    assert_agrees(case, SparingStrategy(block_gpus=16, spare_gpus=4, spare_blocks=2))


@pytest.mark.parametrize(
    "repairs",
    [
        RepairMix(epsilon=0.5, auto=Exponential(1.0), ticket=Exponential(47.0)),
        Weibull(shape=0.5, scale=12.0),
        LogNormal(mu=np.log(24.0) - 0.5, sigma=1.0),
        Empirical(np.array([1.0, 2.0, 3.0, 90.0])),
    ],
    ids=["mix", "weibull", "lognormal", "empirical"],
)
def test_without_spare_trays_only_the_mean_repair_matters(repairs) -> None:
    # A block without spare trays alternates between up and down. Its availability depends only on the two means.
    assert repairs.mean == pytest.approx(24.0)
    assert_agrees(make_case(), SparingStrategy(block_gpus=16, spare_blocks=3), repairs=repairs)


def test_running_clock_agrees_with_its_own_closed_form() -> None:
    case = make_case()
    running = replace(case, recovery=Synchronous(checkpoint=replace(CHECKPOINT, clock=FailureClock.RUNNING)))
    assert_agrees(running, SparingStrategy(block_gpus=16, spare_blocks=3))
    assert evaluate_strategy(running, case.strategies[0]).cett < evaluate_strategy(case, case.strategies[0]).cett


def test_racks_that_fail_once_interrupt_less_but_block_more() -> None:
    case, strategy = make_case(mtbf=10_000.0, rack=500.0, zones=1), SparingStrategy(block_gpus=4, spare_blocks=8)
    once = replace(case, failures=replace(case.failures, rack_failures=RackFailures.PER_RACK))
    closed = evaluate_strategy(once, strategy)
    each, together = (simulate_strategy(one, strategy, 8, SETTINGS) for one in (case, once))
    assert estimate(together.gamma).contains(float(closed.gamma))
    assert estimate(together.gamma).high < estimate(each.gamma).low
    assert estimate(together.beta).low > estimate(each.beta).high


def test_bad_weeks_block_more_than_steady_failures() -> None:
    case, strategy = make_case(), SparingStrategy(block_gpus=16, spare_blocks=4)
    bad_weeks = RateProfile(168.0, np.array([0.2, 0.2, 0.2, 3.4]))
    steady = simulate_strategy(case, strategy, 4, SETTINGS)
    bursty = simulate_strategy(case, strategy, 4, SETTINGS, timeline=bad_weeks)
    assert estimate(bursty.beta).low > estimate(steady.beta).high
    assert estimate(bursty.block_failure_rate).mean == pytest.approx(estimate(steady.block_failure_rate).mean, rel=0.1)


def test_bursty_gaps_keep_the_failure_rate() -> None:
    case, strategy = make_case(rack=np.inf), SparingStrategy(block_gpus=16, spare_blocks=4)
    gaps = Weibull(shape=0.5, scale=1.0)
    simulated = simulate_strategy(case, strategy, 4, SETTINGS, failure_gaps=gaps)
    closed = evaluate_strategy(case, strategy)
    assert estimate(simulated.block_failure_rate).contains(1.0 / float(closed.block_mtbf_hours))


def test_results_depend_on_the_seed() -> None:
    case, strategy = make_case(), SparingStrategy(block_gpus=16)
    few = SimulationSettings(replications=2, hours=200.0, seed=3)
    first, again = (simulate_strategy(case, strategy, 3, few).cett for _ in range(2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != simulate_strategy(case, strategy, 3, replace(few, seed=4)).cett.tolist()


def test_without_failures_only_saving_costs_time() -> None:
    case = make_case(mtbf=1e15, rack=np.inf)
    simulated = simulate_strategy(
        case, SparingStrategy(block_gpus=16), 0, SimulationSettings(replications=2, hours=100.0)
    )
    np.testing.assert_allclose(simulated.cett, 1800.0 / 1920.0, rtol=0.01)
    assert simulated.beta.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("clock", "fault_hours", "useful_hours"),
    [
        # Periods take 0.5 h, saving 0.05 h; a failure costs 0.1 h.
        (FailureClock.FROZEN, [], 1.0),
        (FailureClock.FROZEN, [0.4], 0.5),  # It is back at 0.5, and a period is saved by 1.05.
        (FailureClock.FROZEN, [0.52], 1.0),  # A failure while saving has no effect.
        (FailureClock.RUNNING, [0.52], 0.5),  # A failure while saving loses the period; the next is saved by 1.17.
        (FailureClock.FROZEN, [0.4, 0.45], 0.5),  # The second failure is while restarting, without effect.
        (FailureClock.RUNNING, [0.4, 0.45], 0.5),  # It begins the restart again: back at 0.55, saved by 1.10.
        (FailureClock.RUNNING, [0.4, 0.45, 0.62], 0.0),
        (FailureClock.FROZEN, [5.0], 1.0),  # After the end.
    ],
)
def test_useful_time_by_hand(clock: FailureClock, fault_hours: list[float], useful_hours: float) -> None:
    checkpoint = Checkpoint(
        period_seconds=1800.0, save_seconds=180.0, detect_seconds=120.0, restart_seconds=240.0, clock=clock
    )
    faults = np.array(fault_hours).reshape(-1, 1)
    assert useful_time(faults, np.array([1.2]), checkpoint) == pytest.approx(useful_hours)


def test_more_failures_than_fit_are_refused() -> None:
    with pytest.raises(BadInputError, match="simulate fewer hours"):
        simulate_strategy(make_case(mtbf=0.01), SparingStrategy(block_gpus=16), 0, SETTINGS)


def test_only_the_synchronous_scheme_is_simulated() -> None:
    elastic = replace(make_case(), recovery=Elastic(down_seconds=60.0))
    with pytest.raises(BadInputError, match="synchronous"):
        simulate_strategy(elastic, SparingStrategy(block_gpus=16), 0, SETTINGS)


@pytest.mark.parametrize("wrong", [{"replications": 1}, {"hours": 0.0}, {"seed": -1}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInputError, match=next(iter(wrong))):
        SimulationSettings(**wrong)
