"""MTBF and MTTR from a trace, with confidence intervals, and the distance from exponential distributions.

Axes: N values of a sample, S samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.reliability.distributions import LogNormal, Weibull
from holdfast.planner.reliability.monte_carlo.estimate import Estimate
from holdfast.planner.reliability.traces.trace import FailureTrace
from holdfast.planning.special import FloatArray, chi_square_quantile

HOURS_PER_WEEK = 168.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFit:
    """The distribution of a sample of times, compared with an exponential of the same mean."""

    count: int
    mean_hours: float
    median_hours: float
    #: standard deviation over mean: 1 for an exponential
    cv: float
    #: largest distance between the sample's distribution function and the exponential's
    ks_distance: float
    #: probability that an exponential sample of this size is at least as far away
    ks_p_value: float
    weibull: Weibull
    lognormal: LogNormal
    #: Akaike's criterion minus the exponential's; a negative value fits better
    weibull_aic: float
    #: likewise
    lognormal_aic: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFit:
    """MTBF and MTTR of a trace. Hours; intervals at `confidence`."""

    confidence: float
    failures: int
    open_repairs: int
    nodes: int
    span_hours: float
    #: The interval is exact for failures of a Poisson process.
    mtbf_hours: Estimate
    #: The interval resamples full weeks, which keeps shorter bursts together.
    mtbf_bursty_hours: Estimate
    #: The interval is exact for exponential repairs.
    mttr_hours: Estimate
    #: The interval resamples repairs, including unfinished ones.
    mttr_resampled_hours: Estimate
    #: variance over mean of the failures per week: 1 for a Poisson process
    weekly_dispersion: float
    gaps: ShapeFit
    repairs: ShapeFit


def fit_trace(trace: FailureTrace, *, confidence: float = 0.95, seed: int = 0, resamples: int = 1000) -> TraceFit:
    """Return MTBF, MTTR and the shapes of gaps and repairs.

    MTBF is the time in service of all nodes over the number of failures. MTTR is the time in repair, including
    unfinished repairs, over the number of repairs that ended. This is the maximum-likelihood estimate for exponential
    repairs, some of which are censored by the end of the trace. The shape of repairs only uses repairs that ended.

    Args:
        trace: the failures and repairs.
        confidence: of all intervals.
        seed: of the resamples, and of the simulated p-values.
        resamples: the number of resamples for the intervals that do not assume exponential times.

    Raises:
        BadInputError: fewer than two repairs ended, or all of them in no time, or all failures start at the same time,
            or all gaps or all repairs are equally long.
    """
    repairs = trace.repair_hours
    if repairs.size < 2 or not np.any(repairs > 0):
        raise BadInputError("trace: needs at least two repairs that ended, one of them of more than 0 hours")
    if not np.any(trace.gap_hours > 0):
        raise BadInputError("trace: all failures start at the same time, so there are no gaps between them to fit")
    rng = np.random.default_rng(seed)
    failures, up = trace.start_hours.size, trace.node_hours_up
    tail = (1.0 - confidence) / 2.0
    mtbf = Estimate(
        mean=up / failures,
        low=2.0 * up / chi_square_quantile(1.0 - tail, 2 * failures + 2),
        high=2.0 * up / chi_square_quantile(tail, 2 * failures),
    )
    mttr = fit_mttr(trace, confidence)
    weekly = weekly_failures(trace)
    drawn = rng.integers(failures, size=(resamples, failures))
    in_repair = trace.in_repair_hours
    resampled = in_repair[drawn].sum(axis=1) / np.maximum(trace.ended[drawn].sum(axis=1), 1)
    return TraceFit(
        confidence=confidence,
        failures=failures,
        open_repairs=trace.open_repairs,
        nodes=trace.nodes,
        span_hours=trace.span_hours,
        mtbf_hours=mtbf,
        mtbf_bursty_hours=_bursty(mtbf.mean, weekly, rng, resamples, tail),
        mttr_hours=mttr,
        mttr_resampled_hours=_percentiles(mttr.mean, resampled, tail),
        weekly_dispersion=float(weekly.var(ddof=1) / weekly.mean()) if weekly.size > 1 and weekly.any() else math.nan,
        gaps=fit_shape(trace.gap_hours, rng),
        repairs=fit_shape(repairs, rng),
    )


def fit_mttr(trace: FailureTrace, confidence: float) -> Estimate:
    """Return the mean time to repair, for exponential repairs, some of which the end of the trace cuts off.

    It is all time in repair over the number of repairs that ended; the interval is from chi-square quantiles.
    """
    tail, total, ended = (1.0 - confidence) / 2.0, float(trace.in_repair_hours.sum()), int(trace.ended.sum())
    # With unfinished repairs, the number of ended repairs is random, like the number of failures for MTBF.
    more = 2 if trace.open_repairs else 0
    return Estimate(
        mean=total / ended,
        low=2.0 * total / chi_square_quantile(1.0 - tail, 2 * ended + more),
        high=2.0 * total / chi_square_quantile(tail, 2 * ended),
    )


def weekly_failures(trace: FailureTrace) -> FloatArray:
    """Return the failures in each full week of the trace, or one element if it is shorter than a week."""
    weeks = max(1, int(trace.span_hours / HOURS_PER_WEEK))
    inside = trace.start_hours[trace.start_hours < weeks * HOURS_PER_WEEK]
    return np.bincount((inside / HOURS_PER_WEEK).astype(np.int64), minlength=weeks).astype(np.float64)


def _bursty(mtbf: float, weekly: FloatArray, rng: np.random.Generator, resamples: int, tail: float) -> Estimate:
    """Return the MTBF with an interval from resampled weeks, which keeps bursts within a week.

    `weekly` has the failures of each week. Each bound leaves a share `tail` out; without failures in a resample's
    quantile, the upper bound is infinite, or the lower one 0.
    """
    counts = weekly[rng.integers(weekly.size, size=(resamples, weekly.size))].mean(axis=1)
    few, many = (float(count) for count in np.quantile(counts, [tail, 1.0 - tail]))
    total = mtbf * float(weekly.mean())
    # A low quantile of 0 failures leaves the upper end open, a high quantile of 0 also the lower end.
    return Estimate(mean=mtbf, low=total / many if many else 0.0, high=total / few if few else math.inf)


def _percentiles(mean: float, samples: FloatArray, tail: float) -> Estimate:
    """Return a mean with an interval from the quantiles of resampled values, a share `tail` outside on each side."""
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return Estimate(mean=mean, low=float(low), high=float(high))


def fit_shape(hours: FloatArray, rng: np.random.Generator, simulations: int = 400) -> ShapeFit:
    """Fit a Weibull and a lognormal to times (N,) of 0 or more, and compare them and the sample with an exponential.

    The AICs are relative to the exponential's, and the p-value of its distance is simulated. Times of 0 count as half
    the smallest positive one; at least one time must be positive.

    Raises:
        BadInputError: all times are equal.
    """
    mean = float(hours.mean())
    positive = np.maximum(hours, 0.5 * float(hours[hours > 0].min()))
    logs = np.log(positive)
    weibull = fit_weibull(positive)
    lognormal = LogNormal(mu=float(logs.mean()), sigma=max(float(logs.std()), 1e-12))
    distance = float(_distance_to_exponential(hours[None, :])[0])
    simulated = _distance_to_exponential(rng.exponential(1.0, (simulations, hours.size)))
    exponential = -float(np.sum(np.log(positive.mean()) + positive / positive.mean()))
    return ShapeFit(
        count=hours.size,
        mean_hours=mean,
        median_hours=float(np.median(hours)),
        cv=float(hours.std(ddof=1)) / mean,
        ks_distance=distance,
        # The exponential's mean is fitted, so its own samples give the usual distance (Lilliefors).
        ks_p_value=(1.0 + int((simulated >= distance).sum())) / (1.0 + simulations),
        weibull=weibull,
        lognormal=lognormal,
        weibull_aic=2.0 * (exponential - _weibull_log_likelihood(positive, weibull)) + 2.0,
        lognormal_aic=2.0 * (exponential - _lognormal_log_likelihood(logs, lognormal)) + 2.0,
    )


def _distance_to_exponential(samples: FloatArray) -> FloatArray:
    """Return Kolmogorov's distance of each row (S, N) from the exponential with the row's mean, (S,)."""
    ordered = np.sort(samples, axis=1)
    expected = -np.expm1(-ordered / ordered.mean(axis=1, keepdims=True))
    count = samples.shape[1]
    rank = np.arange(count, dtype=np.float64)
    above, below = (rank + 1.0) / count - expected, expected - rank / count
    return np.maximum(above.max(axis=1), below.max(axis=1))


def fit_weibull(hours: FloatArray) -> Weibull:
    """Return the maximum-likelihood Weibull distribution for positive times (N,).

    Raises:
        BadInputError: all times are equal.
    """
    from scipy import optimize  # pyright: ignore[reportMissingTypeStubs] - only this needs it, and it takes long

    logs = np.log(hours / hours.max())
    if logs.std() < 1e-9:
        raise BadInputError("trace: all its gaps, or all its repairs, are equally long, so there is no spread to fit")

    def slope(shape: float) -> float:
        """Return the log-likelihood's derivative by the shape, up to a factor. Its root is the estimate."""
        power = np.exp(shape * logs)
        return float((power * logs).sum() / power.sum() - 1.0 / shape - logs.mean())

    untyped: Any = optimize
    shape = cast(float, untyped.brentq(slope, 1e-3, 10.0 / float(logs.std())))
    mean_power = float(np.exp(shape * logs).mean())
    return Weibull(shape=shape, scale=float(hours.max()) * mean_power ** (1.0 / shape))


def _weibull_log_likelihood(hours: FloatArray, weibull: Weibull) -> float:
    """Return the log density of all observed `hours` under a Weibull distribution, summed."""
    log_scaled = np.log(hours / weibull.scale)
    density = (weibull.shape - 1.0) * log_scaled - np.exp(weibull.shape * log_scaled)
    return float(density.sum()) + hours.size * math.log(weibull.shape / weibull.scale)


def _lognormal_log_likelihood(logs: FloatArray, lognormal: LogNormal) -> float:
    """Return the log density of all times, given as `logs`, under a lognormal distribution, summed."""
    z = (logs - lognormal.mu) / lognormal.sigma
    return float(np.sum(-logs - math.log(lognormal.sigma * math.sqrt(2.0 * math.pi)) - z**2 / 2.0))
