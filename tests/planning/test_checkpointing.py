"""Eq. 5 (corrected) against its Markov chain, and the best period against a search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from holdfast.errors import BadInputError
from holdfast.planning.checkpointing import (
    FailureClock,
    best_period,
    daly_period,
    period_times,
    wasted_fraction,
    young_period,
)

RATE = 64_512 / 72 * (36 / 20_000 + 1 / 10_000) / 3600.0  # Per second, from Table 1's first row.
TIMES = {"save": 0.05, "detect": 60.0, "restart": 360.0}


def test_is_the_limit_of_the_discrete_chain() -> None:
    # Appendix C, C.1: mean steps to D successes in a row, each of probability rho.
    period, steps = 250.0, 200_000
    rho = np.exp(-RATE * period / steps)
    processing = period / steps * np.sum(rho ** -np.arange(1.0, steps + 1))
    failures = RATE * processing
    total = processing + failures * (TIMES["detect"] + TIMES["restart"]) + TIMES["save"]
    assert wasted_fraction(rate=RATE, period=period, **TIMES) == pytest.approx(1 - period / total, rel=1e-5)


@given(
    rate=st.floats(1e-9, 1e-2),
    period=st.floats(1, 1e4),
    save=st.floats(0, 100),
    down=st.floats(0, 1000),
    clock=st.sampled_from(FailureClock),
)
def test_times_of_a_period_add_up_to_gamma(
    rate: float, period: float, save: float, down: float, clock: FailureClock
) -> None:
    arguments = {"rate": rate, "period": period, "save": save, "detect": 0.0, "restart": down, "clock": clock}
    total = period_times(**arguments).total
    if np.isfinite(total):
        assert wasted_fraction(**arguments) == pytest.approx(1 - period / total, rel=1e-6, abs=1e-9)


def test_running_clock_equals_its_closed_form_and_wastes_more() -> None:
    tc, ts, down = 250.0, 0.05, 420.0
    total = (np.exp(RATE * (tc + ts)) - 1) * np.exp(RATE * down) / RATE
    running = wasted_fraction(rate=RATE, period=tc, **TIMES, clock=FailureClock.RUNNING)
    assert running == pytest.approx(1 - tc / total)
    assert running > wasted_fraction(rate=RATE, period=tc, **TIMES)


def test_without_failures_only_saving_is_lost() -> None:
    assert wasted_fraction(rate=0.0, period=90.0, save=10.0, detect=60.0, restart=60.0) == pytest.approx(0.1)


@pytest.mark.parametrize("clock", FailureClock)
def test_hopeless_rates_waste_everything_without_overflow(clock: FailureClock) -> None:
    gamma = wasted_fraction(rate=np.array([1.0, 1e3, 1e9]), period=250.0, **TIMES, clock=clock)
    np.testing.assert_allclose(gamma, 1.0)


@given(
    rate=st.floats(1e-8, 1e-2), save=st.floats(1e-3, 300), down=st.floats(0, 600), clock=st.sampled_from(FailureClock)
)
def test_best_period_is_where_a_search_ends(rate: float, save: float, down: float, clock: FailureClock) -> None:
    def log_waste(log_period: float) -> float:
        times = period_times(rate=rate, period=np.exp(log_period), save=save, detect=0.0, restart=down, clock=clock)
        return float(np.log(times.total / times.useful - 1.0))

    best = float(best_period(rate=rate, save=save, detect=0.0, restart=down, clock=clock))
    found = optimize.minimize_scalar(log_waste, bounds=(np.log(best) - 3, np.log(best) + 3), method="bounded")
    assert log_waste(np.log(best)) <= found.fun + 1e-9


def test_youngs_and_dalys_periods_approach_the_best_where_saving_is_cheap() -> None:
    rate, save = 1e-6, 1.0
    best = best_period(rate=rate, save=save, detect=0.0, restart=0.0, clock=FailureClock.RUNNING)
    assert daly_period(rate=rate, save=save) == pytest.approx(float(best), rel=1e-6)
    assert young_period(rate=rate, save=save) == pytest.approx(float(best), rel=1e-2)
    assert daly_period(rate=1.0, save=5.0) == 1.0


def test_saving_for_free_has_no_best_period() -> None:
    with pytest.raises(BadInputError, match="save"):
        best_period(rate=1e-3, save=0.0, detect=0.0, restart=0.0)
