"""Random draws have the mean that the distribution states, within its confidence interval."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.errors import BadInputError
from holdfast.planner.reliability.distributions import (
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    RateProfile,
    RepairMix,
    Scaled,
    Weibull,
)
from holdfast.planner.reliability.monte_carlo.estimate import estimate

EVERY: list[Distribution] = [
    Exponential(24.0),
    Weibull(shape=0.5, scale=10.0),
    LogNormal(mu=1.0, sigma=1.0),
    Empirical(np.array([0.0, 1.0, 5.0, 100.0])),
    RepairMix(epsilon=0.3, auto=Exponential(1.0), ticket=Exponential(48.0)),
    Scaled(shape=Weibull(shape=0.7, scale=3.0), mean=2.0),
]


@pytest.mark.parametrize("distribution", EVERY, ids=lambda each: type(each).__name__)
def test_draws_have_the_mean(distribution: Distribution) -> None:
    draws = distribution.draw(np.random.default_rng(1), 200_000)
    assert draws.shape == (200_000,)
    assert estimate(draws).contains(distribution.mean)


def test_a_timeline_keeps_the_mean_rate_and_follows_its_spells() -> None:
    timeline = RateProfile(10.0, np.array([0.0, 3.0, 1.0, 0.0]))
    rng = np.random.default_rng(2)
    replications, hours = 2000, 130.0
    even = np.sort(rng.uniform(0, hours + timeline.span_hours, (replications, 400)), axis=1)
    replication = np.repeat(np.arange(replications), 400)
    warped = timeline.warp(rng, replication, even.ravel()).reshape(even.shape)
    assert (np.diff(warped, axis=1) >= 0).all()
    assert warped.min() >= 0
    counts = ((warped >= 0) & (warped < hours)).sum(axis=1).astype(float)
    assert estimate(counts).contains(400 * hours / (hours + timeline.span_hours))


def test_a_timeline_without_variation_changes_nothing() -> None:
    hours = np.linspace(0.0, 500.0, 50)
    timeline = RateProfile(10.0, np.ones(7))
    warped = timeline.warp(np.random.default_rng(0), np.zeros(50, dtype=np.int64), hours)
    np.testing.assert_allclose(warped, hours, atol=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Exponential(0.0),
        lambda: Weibull(shape=-1.0, scale=1.0),
        lambda: Empirical(np.array([])),
        lambda: Empirical(np.zeros(3)),
        lambda: RepairMix(epsilon=1.5, auto=Exponential(1.0), ticket=Exponential(1.0)),
        lambda: RateProfile(1.0, np.zeros(3)),
    ],
)
def test_invalid_distributions_are_refused(wrong) -> None:
    with pytest.raises(BadInputError):
        wrong()
